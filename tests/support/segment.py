"""Segmentation trainings of seconds, and scenes with masks."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from PIL import Image

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.data.sources import synthetic
from dpn_cli.run.console import Console
from tasks.segment import command
from tasks.segment.config import SegmentConfig, finalize, resolve

CLASS_NAMES = [*synthetic.MASK_CLASSES]


SMALL: dict[str, Any] = {
    "backbone": {"arch": "mu/16", "checkpoint": "none", "pool": "gap", "image_size": 64, "drop_path": 0.0},
    "data": {"scale": [256, 64], "label_offset": 1, "ignore_label": 0},
    "augment": {"cat_max": 1.0},
    "evaluation": {"batch_size": 4},
    "batch_size": 8,
    "epochs": None,
    "lr": 1e-2,
    "schedule": {"steps": 30},
    "runtime": {"workers": 0, "checkpoint_every": 10},
}


def write_scenes(root: Path, counts: dict[str, int]) -> Path:
    """The built-in scenes as a folder in ADE20K's layout, with masks of raw values 1 to 5."""
    number = 0
    for split, count in counts.items():
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for index in range(count):
            image, mask = synthetic.render(synthetic.sample_scene(0, number))
            Image.fromarray(image).save(root / "images" / split / f"{index:04d}.jpg", quality=95)
            Image.fromarray(mask).save(root / "annotations" / split / f"{index:04d}.png")
            number += 1
    (root / "classes.txt").write_text("\n".join(CLASS_NAMES) + "\n")
    return root


def segment_config(source: Path | str, **changes: Any) -> SegmentConfig:
    """Build a config of 30 steps; `changes` replace its values."""
    plain = resolve("segment", None, merge(SMALL, {"data": {"source": str(source)}}, changes), {})
    return finalize(build(SegmentConfig, plain, "test"))


def train_segment(config: SegmentConfig, path: Path, **arguments: Any) -> dict[str, Any]:
    """Train without console output; returns the result."""
    result = command.run(config, LaunchOptions(path, **arguments), Console(quiet=True))
    assert result is not None
    return result


def import_mmseg() -> None:
    """Import mmsegmentation's models, which warn about operators that are not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("mmseg.models")
