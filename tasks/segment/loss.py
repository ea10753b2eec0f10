"""The cross-entropy per pixel, without a map of all classes: logits are upsampled a strip of rows at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpn_cli.engine.fit import Batch
from tasks.segment.labels import IGNORE
from tasks.segment.sliding_window import resize_rows

# Pixels of a strip: what a core's cache holds, and on a GPU a whole image of 512.
STRIP_PIXELS = {"cpu": 2**15}
LARGEST_STRIP = 2**18
# Below one labelled pixel in a batch of 65,536.
SMALLEST_SHARE = 1e-5


def segmentation_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy per labelled pixel of logits per patch (b, classes, h/p, w/p), upsampled to the labels.

    It is divided by the labelled pixels of the whole batch, so micro-batches and ranks add up to the batch's mean.
    """
    label = batch["label"]
    total: Tensor = UpsampledCrossEntropy.apply(logits.float(), label)
    # Micro-batches of sparse masks have less than one pixel of the mean; where no pixel is labelled the total is zero.
    return total / (len(label) * batch["valid"][0]).clamp(min=SMALLEST_SHARE)


class UpsampledCrossEntropy(torch.autograd.Function):
    """``F.cross_entropy(F.interpolate(logits, label's size, mode="bilinear"), label, reduction="sum")``.

    The gradient is made next to the value, so that a strip of upsampled logits is never needed again: of 150 classes at
    512 x 512, torch's own keeps 150 MiB an image, several times over.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor) -> Tensor:
        """Return the sum over labelled pixels, for logits (b, k, h, w) float32 and labels (b, H, W) uint8."""
        sizes = zip(logits.shape[-2:], label.shape[-2:], strict=True)
        row_matrix, column_matrix = (_resizing(old_size, new, logits.device) for old_size, new in sizes)
        rows = max(1, STRIP_PIXELS.get(logits.device.type, LARGEST_STRIP) // label.shape[-1])
        gradient, total = torch.empty_like(logits), logits.new_zeros(())
        with torch.autocast(logits.device.type, enabled=False):
            for image, target, slope in zip(logits, label, gradient, strict=True):
                widened = image @ column_matrix.T
                slopes = torch.zeros_like(widened)
                for part, truth in zip(torch.split(row_matrix, rows), torch.split(target, rows), strict=True):
                    value, strip = _cross_entropy(part @ widened, truth)
                    total += value
                    slopes += part.T @ strip
                slope.copy_(slopes @ column_matrix)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None


@lru_cache(maxsize=8)
def _resizing(old_size: int, new_size: int, device: torch.device) -> Tensor:
    """Return the matrix (new, old) that resizes rows; kept, so that no step waits for a copy of it to the device."""
    with torch.inference_mode(mode=False):
        return resize_rows(torch.eye(old_size, dtype=torch.float64), new_size).float().to(device)


def _cross_entropy(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over labelled pixels and its gradient (k, h, w), in the place of the scores (k, h, w)."""
    is_labelled = truth != IGNORE
    labels = truth.long().masked_fill(~is_labelled, 0)[None]
    scores -= scores.amax(0)
    right = scores.gather(0, labels)[0]
    normalizer = scores.exp_().sum(0)
    value = ((normalizer.log() - right) * is_labelled).sum()
    scores *= is_labelled / normalizer
    return value, scores.scatter_add_(0, labels, -is_labelled[None].float())
