"""Many trainings at once: what may begin when, and the processes that run them. Knows no task and no torch."""
