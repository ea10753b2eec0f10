"""Losses that couple the rows of a batch, as contrastive losses do: they are not sums over micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
GRADIENT = "feature_gradient"


class CrossBatchLoss(ABC):
    """A loss of the features of all rows together.

    `fit` computes its gradient exactly with micro-batches of any size, in two passes (GradCache, arXiv 2101.06983).
    The first computes the features of all rows without gradients, and the gradient of the loss with respect to them;
    the second backpropagates that gradient through the network, one micro-batch at a time. Called with a whole batch,
    it is an ordinary loss.
    """

    @abstractmethod
    def features(self, model: nn.Module, part: Batch) -> Tensor:
        """Return the network's features of some rows: (rows, d)."""

    @abstractmethod
    def couple(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of this rank's rows from their features (rows, d), float32.

        It may use the rows of other ranks if gradients flow back to them (`dpn_cli.run.distributed.gather`).
        """

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch in one pass through the network."""
        return self.couple(self.features(model, batch).float(), batch)


def feature_gradient(
    coupled: CrossBatchLoss, model: nn.Module, batch: Batch, micro_batches: Iterable[Batch]
) -> tuple[Tensor, Batch]:
    """Return the loss of a batch, and the batch with the loss's gradient with respect to the features of each row."""
    with torch.no_grad():
        features = torch.cat([coupled.features(model, part).float() for part in micro_batches])
    loss = coupled.couple(features.requires_grad_(), batch)
    (gradient,) = torch.autograd.grad(loss, features)
    return loss.detach(), {**batch, GRADIENT: gradient * len(features)}


class SurrogateLoss:
    """The loss of the second pass: features times the gradient of the coupled loss, a mean over rows.

    Its gradient with respect to the weights is that of the coupled loss, its value means nothing.
    """

    def __init__(self, coupled: CrossBatchLoss) -> None:
        self.coupled = coupled

    @staticmethod
    def placeholder(batch: Batch) -> Batch:
        """Return a batch with a gradient of one everywhere, to try out the memory."""
        first = next(iter(batch.values()))
        return {**batch, GRADIENT: torch.ones(len(first), 1, device=first.device)}

    def __call__(self, model: nn.Module, part: Batch) -> Tensor:
        """Return a scalar with the coupled loss's gradient, weighted as the mean over these rows."""
        return (self.coupled.features(model, part).float() * part[GRADIENT]).sum(-1).mean()
