"""The 19 tasks written as folders, from TensorFlow Datasets: which images, which labels, and how they are stored."""
