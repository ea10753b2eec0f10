"""LiT: a text tower trained from scratch against a frozen image tower (arXiv 2111.07991; arXiv 2302.01327 §6.2)."""
