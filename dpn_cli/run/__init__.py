"""A running run: its folder, ranks, signals and console output."""
