"""Training a classifier on labelled images: what pre-training and fine-tuning share, recipe keys included."""
