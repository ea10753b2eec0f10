"""Measurements of a trained network: its stem, its positions, its attention, its tokens."""
