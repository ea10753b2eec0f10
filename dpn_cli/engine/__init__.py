"""The training engine: one loop, its gradients, its optimizer and its memory."""
