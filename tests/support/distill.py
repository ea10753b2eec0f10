"""Distillation trainings of seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.run.console import Console
from dpn_cli.weights.backbone import export_backbone, load_backbone
from tasks.classify.classifier import Classifier, save_classifier
from tasks.classify.distill import command
from tasks.classify.distill.config import DistillConfig, finalize, resolve

SMALL: dict[str, Any] = {
    "data": {"held_out": 0.2, "jitter": 0.0},
    "batch_size": 8,
    "lr": 1e-3,
    "stem_share": 0.5,
    "schedule": {"steps": 6, "warmup": 1},
    "evaluate_every": 2,
    "runtime": {"workers": 0, "device": "cpu"},
}


CLASSES = ("class0", "class1", "class2")


def write_teacher(
    path: Path, arch: str = "mu/8", classes: int = 3, names: tuple[str, ...] = CLASSES, **options: Any
) -> Path:
    """Write a classifier with random weights, those of its head included; without classes a network without a head."""
    model = load_backbone(
        arch, stem=options.pop("stem", "none"), image_size=16, num_classes=classes, seed=5, **options
    ).eval()
    if not classes:
        export_backbone(model, path)
        return path
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    save_classifier(Classifier(model, names[:classes], "softmax", None, {}), path)
    return path


def distill_config(photos: Path | str, teacher: Path | str, **changes: Any) -> DistillConfig:
    """Build a config of a few steps; `changes` replace its values."""
    given = {"data": {"source": str(photos)}, "teacher": str(teacher)}
    return finalize(build(DistillConfig, resolve(None, merge(SMALL, given, changes), {}), "test"))


def train_distill(config: DistillConfig, path: Path, **options: Any) -> dict[str, Any]:
    """Train without console output; returns the result."""
    result = command.run(config, LaunchOptions(path, **options), Console(quiet=True))
    assert result is not None
    return result
