"""Weights: from any source and format into a network, and back into files."""
