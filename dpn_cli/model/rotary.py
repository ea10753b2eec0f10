"""Rotary positions in two dimensions, as in DINOv3 (arXiv 2508.10104), for queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Period of the slowest rotation, relative to that of the fastest: DINOv3's.
THETA = 100.0


class RotaryPositions(nn.Module):
    """Rotate queries or keys (b, heads, n, c) of the patches by angles that depend on their row and column.

    Rows and columns are counted from -1 to 1, whatever the grid. Tokens in front of the patches' stay as they are.
    Half of a head's channels pairs with the other half; of each half, one part follows the row, one the column.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, grid: tuple[int, int], head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        for name in ("cosines", "sines"):  # on the CPU even when the network is built on the meta device
            self.register_buffer(name, torch.empty(0, device="cpu"), persistent=False)
        self.set_grid(grid)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Compute the angles for another number of rows and columns."""
        device = self.cosines.device
        rows, columns = ((torch.arange(side, device="cpu") + 0.5) / side * 2 - 1 for side in grid)
        positions = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)  # (n, 2)
        frequencies = THETA ** -torch.arange(0, 1, 4 / self.head_width, device="cpu")
        angles = (2 * math.pi * positions[:, :, None] * frequencies).flatten(1).tile(2)  # (n, c)
        self.cosines, self.sines = angles.cos().to(device), angles.sin().to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rotated queries or keys, of the same shape and type."""
        first = x.shape[-2] - self.cosines.shape[0]
        prefix, patches = x[..., :first, :], x[..., first:, :]
        low, high = patches.chunk(2, -1)
        rotated = patches * self.cosines + torch.cat([-high, low], -1) * self.sines
        return torch.cat([prefix, rotated.to(x.dtype)], -2)
