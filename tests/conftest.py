"""What the tests share. Nothing here reaches the network, and no test writes outside its own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens"
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    home = tmp_path_factory.mktemp("home")
    for name in ("DPN_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(home / name.lower()))
    monkeypatch.delenv("DPN_DATA_DIR", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Arrays]:
    """Read a recorded fixture: outputs of the reference implementations (tests/goldens/README.md)."""

    def read(name: str) -> Arrays:
        with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    return read


def nchw(image: np.ndarray[Any, Any]) -> Tensor:
    """NHWC array to NCHW tensor."""
    return torch.from_numpy(image).permute(0, 3, 1, 2).contiguous()
