"""Many trainings of one config: their grid, the scheduler that runs them, and the statistics of their differences."""
