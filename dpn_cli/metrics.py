"""Metrics as counts: they add up over batches and ranks, and are divided once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


class Top1:
    """Counts of right predictions. Every example of every rank must be given exactly once."""

    def __init__(self, classes: int, device: torch.device) -> None:
        from torchmetrics.classification import MulticlassStatScores  # 0.8 s, and not needed to train

        self.counts = MulticlassStatScores(classes, average="micro", validate_args=False).to(device)

    def update(self, logits: Tensor, label: Tensor) -> None:
        """Add logits (b, classes) and labels (b,)."""
        self.counts.update(logits, label)

    def compute(self) -> tuple[int, int]:
        """Return (right, all) over all ranks."""
        right, _, _, _, support = self.counts.compute().tolist()
        return int(right), int(support)
