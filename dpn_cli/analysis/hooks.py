"""One pass of images through a network, in which everything that needs images is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpn_cli.analysis.attention import AttentionDistances, uniform_distance
from dpn_cli.analysis.patch_probes import ordinary_patch
from dpn_cli.analysis.patches import ExplainedVariance
from dpn_cli.analysis.tokens import Lengths, TokenLengths
from dpn_cli.run import signals
from dpn_cli.weights.backbone import Backbone

# Numbers of one layer's attention that are held at a time.
MOST_ATTENTION = 2**25


@dataclass(frozen=True)
class Activations:
    """Measurements of a network on images; see `AttentionDistances`, `TokenLengths` and `ExplainedVariance`.

    `ordinary` (3, p, q) is the patch of median contrast in the first batch, in grey levels;
    `distances` are (layers, heads) in pixels, `uniform` that of uniform attention.
    """

    images: int
    ordinary: Tensor
    distances: Tensor
    uniform: float
    lengths: list[Lengths]
    shares: dict[str, float | None]


def inspection_batch_size(model: Backbone) -> int:
    """Return how many images go through a network at a time: at most 16, fewer where attention is large."""
    tokens = model.config.grid[0] * model.config.grid[1] + max(1, model.config.prefix_tokens)
    return max(1, min(16, MOST_ATTENTION // (model.config.size.heads * tokens**2)))


@torch.no_grad()
def record_activations(model: Backbone, batches: Iterable[Tensor]) -> Activations:
    """Send batches (b, 3, h, w) of uint8 pixels through a network in evaluation mode and measure it meanwhile."""
    device = model.patch_embed.proj.weight.device
    grid, patch = model.config.grid, model.config.patch
    attention, explained = AttentionDistances(model), ExplainedVariance(model)
    lengths = TokenLengths(grid[0] * grid[1], model.config.has_class_token)
    images, ordinary = 0, torch.empty(0)
    with attention.record(model), lengths.record(model), explained.record(model):
        for pixels in batches:
            signals.check_here()
            ordinary = ordinary if images else ordinary_patch(model, pixels)
            model.forward_features(model.normalize(pixels.to(device)))
            images += len(pixels)
    uniform = uniform_distance(grid, patch)
    return Activations(images, ordinary, attention.pixels, uniform, lengths.summary(), explained.shares())
