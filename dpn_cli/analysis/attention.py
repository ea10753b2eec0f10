"""Mean attention distance per head (arXiv 2010.11929, Appendix D.7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from timm.layers import Attention
from torch import Tensor

from dpn_cli.weights.backbone import Backbone


def patch_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Return the distances (n, n) between the centres of patches in pixels, float32; n = h * w, row by row."""
    row, column = (torch.arange(count, dtype=torch.float64) * side for count, side in zip(grid, patch, strict=True))
    positions = torch.cartesian_prod(row, column)
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist").float()


def uniform_distance(grid: tuple[int, int], patch: tuple[int, int]) -> float:
    """Return the distance of attention that is the same everywhere, in pixels: what a head without a preference has."""
    return float(patch_distances(grid, patch).double().mean())


class AttentionDistances:
    """Sums up, layer by layer, how far heads look while images go through a network.

    Of a query q in head h it is sum_k A[q, k] * |r_q - r_k| with the patches' centres r in pixels; rows and columns of
    the class token are left out, and each row is divided by its sum then. The mean is over queries and images.
    """

    def __init__(self, model: Backbone) -> None:
        config = model.config
        self.distances = patch_distances(config.grid, config.patch).to(model.patch_embed.proj.weight.device)
        self.sums = torch.zeros(config.size.depth, config.size.heads, dtype=torch.float64)
        self.counts = torch.zeros_like(self.sums)

    def add(self, layer: int, attention: Tensor) -> None:
        """Take attention after the softmax, (b, heads, n, n); a class token in front, 1 + n, is left out."""
        n = len(self.distances)
        patch_attention = attention[..., -n:, -n:].float()
        # 0 / 0 where all of a row is on the class token.
        distances = (patch_attention * self.distances).sum(-1) / patch_attention.sum(-1)
        self.sums[layer] += distances.nansum((0, 2)).double().cpu()
        self.counts[layer] += (~distances.isnan()).sum((0, 2)).cpu()

    @property
    def pixels(self) -> Tensor:
        """The mean distances (layers, heads) in pixels, float64."""
        return self.sums / self.counts

    @contextmanager
    def record(self, model: Backbone) -> Iterator[None]:
        """Take the attention of every block while the network runs; the fused kernel, which hides it, is off."""
        with ExitStack() as stack:
            for layer, block in enumerate(model.blocks):
                stack.enter_context(_disable_fused_attention(block.attn))
                hook = block.attn.attn_drop.register_forward_hook(
                    lambda module, inputs, output, layer=layer: self.add(layer, output)
                )
                stack.callback(hook.remove)
            yield


@contextmanager
def _disable_fused_attention(attention: Attention) -> Iterator[None]:
    fused = attention.fused_attn
    attention.fused_attn = False
    try:
        yield
    finally:
        attention.fused_attn = fused
