"""Supervised pre-training: arXiv 2302.01327 Appendix C and Appendix F, and the demo tower."""
