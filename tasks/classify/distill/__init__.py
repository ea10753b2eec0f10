"""Distillation: a network with another stem, other norms or another size learns what a trained one computes."""
