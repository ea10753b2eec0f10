"""High-resolution fine-tuning of a classifier: arXiv 2302.01327 §5.3, App. D, and anyone's labelled images."""
