"""The patch stems of Dual PatchNorm (arXiv 2302.01327, Table 6), as one timm patch embedding.

Axes: b batch, c channel, h w grid rows and columns, p q rows and columns inside a patch, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import PatchEmbed
from torch import Tensor, nn

from dpn_cli.arch import Norm, Stem
from dpn_cli.model.norms import token_norm


class Affine(nn.Module):
    """Scale and bias per feature without any normalisation (the "only learnable" row of Table 6)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one and the bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``weight * x + bias`` over the last axis."""
        return torch.addcmul(self.bias, self.weight, x)


def _affine(features: int, eps: float) -> Affine:
    return Affine(features)


# The norms of each stem by their slot: ``norm_in`` (raw patch), ``norm`` (projection) or ``norm_posemb``.
NORMS: dict[Stem, dict[str, Callable[..., nn.Module]]] = {
    "none": {},
    "pre": {"norm_in": nn.LayerNorm},
    "post": {"norm": nn.LayerNorm},
    "post_posemb": {"norm_posemb": nn.LayerNorm},
    "dpn": {"norm_in": nn.LayerNorm, "norm": nn.LayerNorm},
    "dpn_no_affine": dict.fromkeys(("norm_in", "norm"), partial(nn.LayerNorm, elementwise_affine=False)),
    "affine_only": {"norm_in": _affine, "norm": _affine},
    "rms": {"norm_in": nn.RMSNorm, "norm": nn.RMSNorm},
}


def stem_norm(stem: Stem, slot: str, features: int, eps: float, kind: Norm = "ln") -> nn.Module:
    """Build the norm that `stem` has in a slot, or an identity if it has none; `kind` replaces LayerNorm."""
    norm = NORMS[stem].get(slot)
    if norm is nn.LayerNorm:
        return token_norm(kind, features, eps=eps)
    return norm(features, eps=eps) if norm else nn.Identity()


class PatchStem(PatchEmbed):
    """Image (b, 3, H, W) to tokens (b, h*w, d): flatten patches, normalise, project, normalise.

    `proj` keeps timm's convolution weight (d, c, p, q), so a plain ViT's weights are timm's weights. A patch
    is flattened as (row, column, channel), the order of the paper's listing; ``norm_in`` follows that order.
    """

    def __init__(
        self, *, stem: Stem, eps: float, embed_dim: int, in_chans: int = 3, norm: Norm = "ln", **timm: Any
    ) -> None:
        timm["bias"] = True  # timm has none before a pre-norm; a bias of zero is the same network
        super().__init__(embed_dim=embed_dim, in_chans=in_chans, **timm)
        rows, columns = self.patch_size
        self.norm_in = stem_norm(stem, "norm_in", rows * columns * in_chans, eps, norm)
        self.norm = stem_norm(stem, "norm", embed_dim, eps, norm)

    def forward(self, image: Tensor) -> Tensor:
        """Return tokens (b, h*w, d) in float32 at any autocast precision; in float64 if the weights are.

        Both norms take their statistics in float32. The projection follows autocast to bfloat16, whose range is
        float32's; in float16 its output can overflow before the second norm, so it stays in float32.
        """
        if tuple(image.shape[-2:]) != tuple(self.img_size):
            raise ValueError(
                f"the model was built for images of {tuple(self.img_size)} pixels, "
                f"got {tuple(image.shape[-2:])}; load the backbone with that image_size"
            )
        device = image.device.type
        bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        full = torch.promote_types(self.proj.weight.dtype, torch.float32)
        compute = torch.bfloat16 if bf16 else full
        rows, columns = self.patch_size
        with torch.autocast(device, enabled=False):
            patches = rearrange(image.to(full), "b c (h p) (w q) -> b (h w) (p q c)", p=rows, q=columns)
            weight = rearrange(self.proj.weight, "d c p q -> d (p q c)")
            x = F.linear(self.norm_in(patches).to(compute), weight.to(compute), self.proj.bias.to(compute))
            tokens: Tensor = self.norm(x.to(full))
        return tokens
