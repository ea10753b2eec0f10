"""Contrastive losses over the global batch, exact for any micro-batch and any number of ranks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpn_cli.engine.cross_batch_loss import Batch, CrossBatchLoss
from dpn_cli.run.distributed import World, gather

Kind = Literal["softmax", "siglip"]
# Rows whose logits against the whole batch exist at one time: 64 MiB for a batch of 16,384.
ROWS = 1024


class ContrastiveLoss(CrossBatchLoss):
    """``softmax`` is CLIP's and LiT's loss, ``siglip`` the pairwise sigmoid one (arXiv 2303.15343).

    A batch holds ``image`` (b, d), unit features of the frozen tower, and ``tokens`` (b, length). The network's
    features of a text are such that their product with an image's is the logit: see `TextTower`.
    """

    def __init__(self, kind: Kind, world: World) -> None:
        self.rows_loss = {"softmax": softmax_rows, "siglip": sigmoid_rows}[kind]
        self.kind, self.world = kind, world

    def features(self, model: nn.Module, part: Batch) -> Tensor:
        """Return the texts' features (rows, d), with a column for the bias where there is one."""
        features: Tensor = model(part["tokens"])
        return features

    def couple(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the mean over this rank's pairs, each against the pairs of all ranks."""
        with torch.autocast(features.device.type, enabled=False):  # logits in float32, whatever the towers computed in
            image = with_bias_column(batch["image"].float(), features)
            images, texts = gather(image), gather(features)
            first = self.world.rank * len(image)
            loss = self._over_rows(image, texts, first)
            if self.kind == "softmax":  # the sigmoid of a pair does not depend on the other pairs
                loss = (loss + self._over_rows(features, images, first)) / 2
        return loss / len(image)

    def _over_rows(self, rows: Tensor, other_rows: Tensor, first: int) -> Tensor:
        total = torch.zeros((), device=rows.device)
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            if len(rows) <= ROWS:
                total = total + self.rows_loss(part, other_rows, first + start)
            else:  # the logits are computed again in the backward pass instead of being kept
                total = total + checkpoint(self.rows_loss, part, other_rows, first + start, use_reentrant=False)
        return total


def with_bias_column(image: Tensor, text: Tensor) -> Tensor:
    """Return image features that texts with a bias column can be multiplied with."""
    return F.pad(image, (0, text.shape[-1] - image.shape[-1]), value=1.0)


def softmax_rows(rows: Tensor, other_rows: Tensor, first: int) -> Tensor:
    """Return the summed cross-entropy of rows (n, d) against all (m, d), of which number `first` + i belongs to i."""
    target = torch.arange(first, first + len(rows), device=rows.device)
    return F.cross_entropy(rows @ other_rows.T, target, reduction="sum")


def sigmoid_rows(rows: Tensor, other_rows: Tensor, first: int) -> Tensor:
    """Return the summed binary cross-entropy of every pair of rows (n, d) with all (m, d)."""
    logits = rows @ other_rows.T
    sign = torch.full_like(logits, -1.0)
    sign[:, first : first + len(rows)].fill_diagonal_(1.0)
    return -F.logsigmoid(sign * logits).sum()
