"""Pre-trainings of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.run.console import Console
from tasks.classify import pretrain as command
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve


def stages_config(places: Path, stages: Sequence[Mapping[str, Any]]) -> PretrainConfig:
    """Build a config of stages on a folder with train, val and test."""
    asked = merge(
        SMALL, {"backbone": {"arch": "nano/8"}, "data": {"source": str(places), "val_fraction": None}, "stages": stages}
    )
    asked.pop("schedule")
    asked.pop("lr")
    asked["backbone"].pop("dropout")
    return finalize(build(PretrainConfig, resolve("sun397", None, "none", None, asked, {}), "test"))


SMALL: dict[str, Any] = {
    "backbone": {"arch": "nano/8", "image_size": 32, "dropout": 0.1, "drop_path": 0.2},
    "data": {"val_fraction": 0.2},
    "batch_size": 16,
    "loss": "softmax",
    "head_bias": 0.0,
    "lr": 3e-3,
    "schedule": {"steps": 24},
    "runtime": {"workers": 0, "checkpoint_every": 5},
}


def pretrain_config(arch: str, *, preset: Any = None, level: str | None = None, **settings: Any) -> PretrainConfig:
    """Build the shipped config of ImageNet; `asked` are flags."""
    flags = merge({"backbone": {"arch": arch}, "data": {"source": "imagenet"}}, settings)
    return build(PretrainConfig, resolve("imagenet", preset, level, None, flags, {}), "test")


def small_pretrain_config(source: Path, **changes: Any) -> PretrainConfig:
    """Build a config of 24 steps; `changes` replace its values."""
    asked = merge(SMALL, {"data": {"source": str(source)}}, changes)
    return finalize(build(PretrainConfig, resolve("imagenet", None, "medium2", None, asked, {}), "test"))


def train_pretrain(config: PretrainConfig, path: Path, **arguments: Any) -> dict[str, Any]:
    """Train without console output; returns the result."""
    result = command.run(config, LaunchOptions(path, **arguments), Console(quiet=True))
    assert result is not None
    return result
