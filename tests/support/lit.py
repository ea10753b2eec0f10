"""LiT trainings of seconds, and untrained towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpn_cli.arch import Size
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.run.console import Console
from dpn_cli.weights.backbone import load_backbone
from tasks.lit import command
from tasks.lit.config import LitConfig, finalize, resolve
from tasks.lit.text_tower import TextTower
from tasks.lit.tokenizer import Tokenizer
from tasks.lit.towers import Towers

SMALL: dict[str, Any] = {
    "backbone": {"arch": "nano/8", "checkpoint": "none", "pool": "gap", "image_size": 32},
    "text": {"size": "mu", "context": 12},
    "temperature": 100.0,
    "batch_size": 64,
    "lr": 1e-2,
    "optim": {"weight_decay": 0.0},
    "schedule": {"steps": 220, "warmup": 44},
    "runtime": {"workers": 0, "checkpoint_every": 10},
}


def lit_config(source: Path | str, **changes: Any) -> LitConfig:
    """Build a config of a small text tower; `changes` replace its values."""
    data = {"source": str(source), "val_source": str(source)} if str(source) != "demo" else {"source": "demo"}
    plain = resolve(None, merge(SMALL, {"data": data}, changes), {})
    return finalize(build(LitConfig, plain, "test"))


def train_lit(config: LitConfig, path: Path, **arguments: Any) -> dict[str, Any]:
    """Train without console output; returns the result."""
    result = command.run(config, LaunchOptions(path, **arguments), Console(quiet=True))
    assert result is not None
    return result


def make_towers(seed: int = 2) -> Towers:
    """Build untrained towers."""
    image = load_backbone("mu/8", image_size=16, seed=1)
    text = TextTower(Size(32, 1, 128, 2), 49408, 16, 32, 10.0, None, seed)
    return Towers(image, text, Tokenizer(16, "canonicalize"), "softmax", {}).to(torch.device("cpu"))
