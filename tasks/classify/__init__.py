"""Classification: fine-tuning (highres), pre-training, evaluation, the few-shot probe and export."""
