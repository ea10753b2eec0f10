"""High-resolution fine-tunings of seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.run.console import Console
from tasks.classify import highres as command
from tasks.classify.highres_config import HighresConfig, finalize, resolve

SMALL: dict[str, Any] = {
    "backbone": {"arch": "mu/8", "checkpoint": "none", "pool": "gap", "image_size": 32},
    "data": {"val_fraction": 0.2},
    "batch_size": 16,
    "loss": "softmax",
    "lr": 3e-3,
    "optim": {"name": "adam"},
    "schedule": {"steps": 40},
    "runtime": {"workers": 0, "checkpoint_every": 10},
}


def highres_config(source: Path | str, **changes: Any) -> HighresConfig:
    """Build a config of 40 steps; `changes` replace its values."""
    plain = resolve("highres", merge(SMALL, {"data": {"source": str(source)}}, changes), {})
    return finalize(build(HighresConfig, plain, "test"))


def train_highres(config: HighresConfig, path: Path, **arguments: Any) -> dict[str, Any]:
    """Train without console output; returns the result."""
    result = command.run(config, LaunchOptions(path, **arguments), Console(quiet=True))
    assert result is not None
    return result
