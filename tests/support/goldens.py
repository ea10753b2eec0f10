"""Recorded outputs of the reference implementations (tests/goldens/README.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"


Arrays = dict[str, np.ndarray[Any, Any]]


def to_nchw(image: np.ndarray[Any, Any]) -> Tensor:
    """Return an NHWC array as an NCHW tensor."""
    return torch.from_numpy(image).permute(0, 3, 1, 2).contiguous()


DPN_PARAMS = str(GOLDENS / "vit_dpn.params.npz")


def read_golden(name: str) -> Arrays:
    """Read the arrays of a recorded file."""
    with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
