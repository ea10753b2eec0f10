"""VTAB-1k: 19 tasks of 1000 training images each, three learning rates, three seeds (arXiv 2302.01327 §6.1, App. E)."""
