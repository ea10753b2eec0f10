"""Semantic segmentation with a linear decoder: arXiv 2302.01327 §6.3, App. G, and anyone's images with masks."""
