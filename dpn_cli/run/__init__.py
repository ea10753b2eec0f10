"""A run while it is at work: its folder, its ranks, its signals, what the user sees."""
