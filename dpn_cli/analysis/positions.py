"""Similarity of position embeddings, and its dependence on the distance between two patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli.weights.backbone import Backbone

# Positions per side of the figure: Figure 7 of arXiv 2010.11929 shows 7 x 7.
MOST_SHOWN = 7


@dataclass(frozen=True)
class Similarity:
    """Cosine similarities of position embeddings.

    Args:
        rows, columns: the positions shown, evenly spread over the grid.
        maps: (rows, columns, h, w), the similarity of each of those with all positions.
        distance: distances between two positions in patches, in rings of one patch.
        profile: mean similarity of the pairs at each distance.
    """

    rows: list[int]
    columns: list[int]
    maps: Tensor
    distance: list[float]
    profile: list[float]


def position_similarity(model: Backbone, most: int = MOST_SHOWN) -> Similarity:
    """Compare the position embeddings of a network, without that of a class token, which has none of its own here."""
    height, width = model.config.grid
    table = F.normalize(model.pos_embed.detach().double().cpu()[0], dim=1)
    rows, columns = (torch.linspace(0, side - 1, min(side, most)).round().int().tolist() for side in (height, width))
    positions = torch.tensor([[row * width + column for column in columns] for row in rows])
    maps = (table[positions] @ table.T).view(*positions.shape, height, width)
    return Similarity(rows, columns, maps, *_profile(table, height, width))


def _profile(table: Tensor, height: int, width: int) -> tuple[list[float], list[float]]:
    """Return distances and mean similarities, summed row by row: all pairs of a large grid would not fit in memory."""
    row, column = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    rings = int(((height - 1) ** 2 + (width - 1) ** 2) ** 0.5) + 1
    sums = torch.zeros(3, rings, dtype=torch.float64)
    for index, vector in enumerate(table):
        distance = ((row - row[index]).double() ** 2 + (column - column[index]) ** 2).sqrt()
        for total, values in zip(sums, (torch.ones_like(distance), distance, table @ vector), strict=True):
            total.index_add_(0, distance.int(), values)
    count, distances, similarities = sums[:, sums[0] > 0]
    return (distances / count).tolist(), (similarities / count).tolist()
