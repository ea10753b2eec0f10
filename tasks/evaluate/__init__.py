"""What a trained network is worth, and what can be done with it: scores, few-shot probes, predictions, exports."""
