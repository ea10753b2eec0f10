"""Scale and bias of the stem's first norm as images of a patch (arXiv 2302.01327, Figure 3).

A patch is flattened as (row, column, channel), see `PatchStem`; a map is (3, p, q): channel, row, column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from dpn_cli.weights.backbone import Backbone

CHANNELS = ("red", "green", "blue")
REGIONS = ("centre", "corners", "edges", "all")


@dataclass(frozen=True)
class NormProfile:
    """A map (p, q) in numbers.

    Args:
        means: mean by region, see `regions`; None for a region without pixels.
        left_right: correlation of the map with its mirror image; None for a constant map.
        up_down: the same with the map upside down.
        radius: mean distance from the patch's centre in pixels, ring by ring of one pixel.
        profile: mean of the map on each ring.
    """

    means: dict[str, float | None]
    left_right: float | None
    up_down: float | None
    radius: list[float]
    profile: list[float]


def first_norm_maps(model: Backbone) -> dict[str, Tensor]:
    """Return the maps (3, p, q) that there are, in float64: "scale" and "bias".

    Empty for a stem without first norm and for one that learns nothing; RMSNorm has no bias.
    """
    rows, columns = model.config.patch
    maps = {}
    for name, attribute in (("scale", "weight"), ("bias", "bias")):
        values = getattr(model.patch_embed.norm_in, attribute, None)
        if isinstance(values, Tensor) and values.numel() == 3 * rows * columns:
            flat = values.detach().double().cpu().flatten()
            maps[name] = rearrange(flat, "(p q c) -> c p q", p=rows, q=columns)
    return maps


def regions(shape: Sequence[int]) -> dict[str, Tensor]:
    """Return masks (p, q) of the parts of a patch.

    With a unit of an eighth of the side (rounded, at least one pixel), the corners are four squares of one unit, the
    edges the strips of that width between them, and the centre the middle square of about two units.
    """
    centres, borders = [], []
    for side in shape:
        unit = max(1, round(side / 8))
        position = torch.arange(side)
        centres.append((position - (side - 1) / 2).abs() < unit)
        borders.append(torch.minimum(position, side - 1 - position) < unit)
    rows, columns = borders
    return {
        "centre": centres[0][:, None] & centres[1],
        "corners": rows[:, None] & columns,
        "edges": rows[:, None] ^ columns,
        "all": torch.ones(*shape, dtype=torch.bool),
    }


def profile_map(values: Tensor) -> NormProfile:
    """Describe a map (p, q): means of its parts, symmetry, and the profile from the centre outwards."""
    means = {name: _mean(values[mask]) for name, mask in regions(values.shape).items()}
    row, column = (torch.arange(side) - (side - 1) / 2 for side in values.shape)
    distance = (row[:, None].double() ** 2 + column**2).sqrt()
    rings = [distance.int() == ring for ring in sorted(set(distance.int().flatten().tolist()))]
    return NormProfile(
        means,
        _symmetry(values, 1),
        _symmetry(values, 0),
        [float(distance[ring].mean()) for ring in rings],
        [float(values[ring].mean()) for ring in rings],
    )


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _symmetry(values: Tensor, axis: int) -> float | None:
    centred = values - values.mean()
    total = centred.square().sum()
    # Rounding leaves a constant map with a little variance.
    if total <= 1e-12 * values.square().sum():
        return None
    return float((centred * centred.flip(axis)).sum() / total)
