"""The patch projection: its principal filters and its singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from dpn_cli.analysis.first_norm import first_norm_maps
from dpn_cli.weights.backbone import Backbone

# As many filters as Figure 7 of arXiv 2010.11929 shows.
FILTERS = 28


@dataclass(frozen=True)
class Filters:
    """Principal components (k, 3, p, q) of the filters, each of length 1, and the share of their variance in each."""

    patterns: Tensor
    shares: Tensor


def applied_weight(model: Backbone, *, with_scale: bool = True) -> Tensor:
    """Return the projection (d, 3, p, q) in float64: what is multiplied with a patch, or with a normalised one.

    The scale of a first norm is part of it unless `with_scale` is false: scale and projection act as their product.
    """
    weight: Tensor = model.patch_embed.proj.weight.detach().double().cpu()
    scale = first_norm_maps(model).get("scale") if with_scale else None
    return weight if scale is None else weight * scale


def principal_filters(model: Backbone, most: int = FILTERS) -> Filters:
    """Return the principal components of the projection's d filters, as in Figure 7 of arXiv 2010.11929.

    The mean filter is subtracted. A component's sign is arbitrary; its largest value is made positive.
    """
    weight = applied_weight(model)
    flat = weight.flatten(1)
    _, values, vectors = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    components = vectors[:most]
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    patterns = rearrange(components * largest.sign(), "k (c p q) -> k c p q", c=weight.shape[1], p=weight.shape[2])
    variance = values.square()
    return Filters(patterns, (variance / variance.sum().clamp(min=torch.finfo().tiny))[:most])


def singular_values(model: Backbone, *, with_scale: bool) -> Tensor:
    """Return the singular values (min(d, 3 p q),) of the projection as a matrix, largest first."""
    values: Tensor = torch.linalg.svdvals(applied_weight(model, with_scale=with_scale).flatten(1))
    return values


def effective_rank(values: Tensor) -> float:
    """Return exp(entropy) of the shares that singular values have in their sum of squares: k for k equal ones."""
    shares = values.square() / values.square().sum()
    return float(torch.special.entr(shares).sum().exp())
