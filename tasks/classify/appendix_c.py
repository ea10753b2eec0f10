"""Appendix C's table: how strongly each architecture is regularised, and the augmentation levels' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dpn_cli.config.load import Plain

Level = Literal["none", "light1", "light2", "medium1", "medium2", "strong1", "strong2"]

# RandAugment's operations and magnitude, and mixup's strength: App. C, big_vision configs/vit_i1k.py.
LEVELS: dict[Level, tuple[int, int, float]] = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
assert tuple(LEVELS) == get_args(Level)


@dataclass(frozen=True)
class Regularization:
    """One architecture's line of the table; dropout and stochastic depth are rates."""

    level: Level
    dropout: float
    drop_path: float
    pre_logits: bool


APPENDIX_C: dict[str, Regularization] = {
    "Ti/16": Regularization("light1", 0.0, 0.0, pre_logits=True),
    "S/32": Regularization("medium1", 0.0, 0.0, pre_logits=False),
    "S/16": Regularization("medium2", 0.0, 0.0, pre_logits=True),
    "B/32": Regularization("medium2", 0.1, 0.1, pre_logits=True),
    "B/16": Regularization("medium2", 0.1, 0.1, pre_logits=True),
    "L/16": Regularization("medium2", 0.1, 0.1, pre_logits=True),  # listed, without an ImageNet-1k result
}


def augmentation_keys(level: Level) -> Plain:
    """Return the config keys of an augmentation level."""
    layers, magnitude, mixup = LEVELS[level]
    return {"randaugment": {"layers": layers, "magnitude": float(magnitude)}, "mixup": mixup}


def regularization_keys(row: Regularization) -> Plain:
    """Return the config keys of a line of the table."""
    backbone = {"dropout": row.dropout, "drop_path": row.drop_path, "pre_logits": row.pre_logits}
    return {"backbone": backbone, **augmentation_keys(row.level)}


# `--preset short` of ImageNet: 90 epochs of big_vision's "better plain ViT" config (configs/vit_s16_i1k.py) with App.
# C's network.
SHORT: Plain = {
    "epochs": 90,
    "batch_size": 1024,
    "loss": "softmax",
    "head_bias": 0.0,
    "backbone": {"dropout": 0.0, "drop_path": 0.0},
    **augmentation_keys("light2"),
}

# `--preset short` of CIFAR: 100 epochs on images in their own size, a fortieth of the work for each.
SHORT_CIFAR: Plain = {
    "epochs": 100,
    "backbone": {"arch": "S/4", "image_size": 32},
    "schedule": {"steps": 38672, "warmup": 1934},
}
