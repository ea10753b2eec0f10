"""Losses in which every row of the batch meets every other one: no sum over micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
GRADIENT = "feature_gradient"


class CoupledLoss(ABC):
    """A loss of the features of all rows together, as contrastive losses are.

    `fit` computes it exactly with micro-batches of any size, in two passes (Gao et al., arXiv 2101.06983): the features
    of all rows without gradients, the gradient of the loss with respect to them, then the network again, one
    micro-batch after the other, with that gradient given. Called with a whole batch it is an ordinary loss.
    """

    @abstractmethod
    def features(self, model: nn.Module, part: Batch) -> Tensor:
        """Return what the network makes of some rows: (rows, d)."""

    @abstractmethod
    def couple(self, features: Tensor, batch: Batch) -> Tensor:
        """Return the loss of this rank's rows (a mean) from their features (rows, d), float32.

        Rows of other ranks may be gathered, if their features receive their share of the gradient
        (`dpn_cli.distributed.gather`).
        """

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch that goes through the network at once."""
        return self.couple(self.features(model, batch).float(), batch)


def first_pass(
    coupled: CoupledLoss, model: nn.Module, batch: Batch, parts: Iterable[Batch] | None
) -> tuple[Tensor, Batch]:
    """Return the loss of a batch, and the batch with the gradient that `GivenGradient` needs.

    `parts` are the batch's micro-batches. Without them the gradient is one everywhere, to try out the memory.
    """
    first = next(iter(batch.values()))
    if parts is None:
        return torch.zeros((), device=first.device), {**batch, GRADIENT: torch.ones(len(first), 1, device=first.device)}
    with torch.no_grad():
        features = torch.cat([coupled.features(model, part).float() for part in parts])
    loss = coupled.couple(features.requires_grad_(), batch)
    (gradient,) = torch.autograd.grad(loss, features)
    return loss.detach(), {**batch, GRADIENT: gradient * len(features)}


class GivenGradient:
    """The loss of the second pass: rows of the features times the gradient of the coupled loss, a mean over rows."""

    def __init__(self, coupled: CoupledLoss) -> None:
        self.coupled = coupled

    def __call__(self, model: nn.Module, part: Batch) -> Tensor:
        """Return a scalar with the coupled loss's gradient, weighted as the mean over these rows."""
        return (self.coupled.features(model, part).float() * part[GRADIENT]).sum(-1).mean()
