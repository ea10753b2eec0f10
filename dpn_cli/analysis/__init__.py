"""What is inside a trained network, as numbers: its stem, its positions, its attention, its tokens."""
