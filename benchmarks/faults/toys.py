"""The four tasks at toy size: their data as files, so that a file can be exchanged, and their command lines."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dpn_cli.data.sources import synthetic

SHARED = (
    "--arch",
    "mu/8",
    "--checkpoint",
    "none",
    "--device",
    "cpu",
    "--no-report",
    "-o",
    "run",
    "-q",
    "--set",
    "schedule.warmup=1",
)


def draw(path: Path, number: int, side: int = synthetic.SCENE_SIZE) -> None:
    """Write the scene of that number as an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(synthetic.render(synthetic.sample_scene(0, number))[0]).resize((side, side)).save(path)


def write_photos(root: Path) -> None:
    """Write 3 classes of 12 JPEGs."""
    for number in range(36):
        draw(root / f"class{number % 3}" / f"{number:03d}.jpg", number)


def write_vtab(root: Path) -> None:
    """Write ``svhn`` with 800 / 200 / 24 PNGs of 16 x 16 pixels."""
    number = 0
    for split, count in {"train800": 800, "val200": 200, "test": 24}.items():
        lines = []
        for _ in range(count):
            draw(root / "svhn" / "images" / f"{number:04d}.png", number, side=16)
            lines.append(f"images/{number:04d}.png {number % 10}\n")
            number += 1
        (root / "svhn" / f"{split}.txt").write_text("".join(lines))


def write_pairs(root: Path) -> None:
    """Write 40 images and ``pairs.csv`` with their captions, and ``val.csv`` with those of 8 others."""
    for name, numbers in {"pairs": range(40), "val": range(40, 48)}.items():
        rows = [("file", "caption")]
        for number in numbers:
            draw(root / f"{number:03d}.png", number)
            rows.append((f"{number:03d}.png", f"image number {number}"))
        with (root / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_masks(root: Path) -> None:
    """Write 16 / 6 scenes with their masks in ADE20K's layout."""
    number = 0
    for split, count in {"training": 16, "validation": 6}.items():
        for _ in range(count):
            draw(root / "images" / split / f"{number:03d}.jpg", number)
            mask = root / "annotations" / split / f"{number:03d}.png"
            mask.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(synthetic.render(synthetic.sample_scene(0, number))[1]).save(mask)
            number += 1
    (root / "classes.txt").write_text("\n".join(synthetic.MASK_CLASSES) + "\n")


@dataclass(frozen=True)
class Task:
    """A command with its options, whose paths are relative to the folder that it runs in.

    `data` is the name of its data, and `weights` are the files of the run whose tensors are the outcome.
    """

    words: tuple[str, ...]
    data: str
    weights: str = "weights.safetensors"

    def command(self, *more: str) -> list[str]:
        """Return the command line."""
        return [*self.words, *SHARED, *more]


TASKS = {
    "vtab": Task(
        (
            *("finetune", "vtab", "--data", "data", "--tasks", "svhn", "--image-size", "16", "-b", "16"),
            *("--steps", "6", "--lrs", "1e-3,1e-2", "--seeds", "2", "--set", "keep_weights=all"),
            *("--set", "runtime.checkpoint_every=2"),
        ),
        "vtab",
        "trials/**/weights.safetensors",
    ),
    "highres": Task(
        (
            *("finetune", "highres", "--data", "data", "--val-fraction", "0.25", "--image-size", "32", "-b", "8"),
            *("--steps", "12", "--set", "data.minival=0.2", "--set", "evaluate_every=5", "--set", "optim.name=adam"),
            *("--set", "runtime.checkpoint_every=2"),
        ),
        "photos",
    ),
    "lit": Task(
        (
            *("lit", "train", "--data", "data/pairs.csv", "--set", "data.val_source=data/val.csv"),
            *("--text-size", "mu", "--image-size", "32", "-b", "8", "--steps", "12", "--cache-dir", "cache"),
            *("--set", "runtime.checkpoint_every=2"),
        ),
        "pairs",
    ),
    "segment": Task(
        (
            *("segment", "folder", "--data", "data", "--image-size", "64", "-b", "4", "--steps", "8"),
            *("--label-offset", "1", "--ignore-label", "0"),
            *("--set", "evaluate_every=4", "--set", "runtime.checkpoint_every=2", "--set", "optim.name=adam"),
        ),
        "masks",
    ),
}
WRITERS = {"vtab": write_vtab, "photos": write_photos, "pairs": write_pairs, "masks": write_masks}
