"""Classification losses with big_vision's reductions."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def sigmoid_xent(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits (b, classes) and targets in [0, 1], summed over classes, averaged over b.

    The mean over classes too, torch's default, is `classes` times smaller and changes what gradient clipping does.
    """
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1).mean()


def softmax_xent(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits (b, classes) and target probabilities, averaged over b."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


Loss = Literal["sigmoid", "softmax"]
LOSSES = {"sigmoid": sigmoid_xent, "softmax": softmax_xent}
