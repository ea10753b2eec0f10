"""A short training of every task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpn_cli.config.load import from_flags, merge
from support.distill import distill_config, train_distill, write_teacher
from support.highres import highres_config, train_highres
from support.lit import lit_config, train_lit
from support.pretrain import small_pretrain_config, train_pretrain
from support.segment import segment_config, train_segment, write_scenes
from support.vtab import run_vtab

CLASSIFIERS: dict[str, Any] = {
    "highres": (highres_config, train_highres),
    "pretrain": (small_pretrain_config, train_pretrain),
}


def _vtab(digits: Path, photos: Path, path: Path, **changes: Any) -> Callable[[], Any]:
    settings = ["data.tasks=svhn", "seeds=1", "lrs=[0.01]", "schedule.steps=2"]
    settings += [f"{key}={value}" for key, value in changes.items()]
    return lambda: run_vtab(digits, path, *settings)


def _classifier(task: str) -> Callable[..., Callable[[], Any]]:
    build, train = CLASSIFIERS[task]

    def prepare(digits: Path, photos: Path, path: Path, **changes: Any) -> Callable[[], Any]:
        settings = {"schedule": {"steps": 4}, "evaluate_every": 2, "data": {"minival": 0.2}, "fewshot": 2}
        config = build(photos, **merge(settings, from_flags(changes)))
        return lambda: train(config, path)

    return prepare


def _lit(digits: Path, photos: Path, path: Path, **changes: Any) -> Callable[[], Any]:
    pairs = path.parent / f"pairs-{path.name}"
    pairs.mkdir()
    for photo in sorted(photos.glob("*/*"))[:8]:
        (pairs / f"{photo.parent.name}{photo.name}").write_bytes(photo.read_bytes())
        (pairs / f"{photo.parent.name}{photo.stem}.txt").write_text(f"an image {photo.stem}")
    settings = {
        "data": {"val_source": None, "val_fraction": 0.5},
        "batch_size": 4,
        "schedule": {"steps": 2, "warmup": 0},
    }
    config = lit_config(pairs, **merge(settings, from_flags(changes)))
    return lambda: train_lit(config, path)


def _segment(digits: Path, photos: Path, path: Path, **changes: Any) -> Callable[[], Any]:
    data = path.parent / f"data-{path.name}"
    write_scenes(data, {"training": 8, "validation": 2})
    settings = merge({"schedule": {"steps": 4}, "evaluate_every": 2}, from_flags(changes))
    config = segment_config(data, **settings)
    return lambda: train_segment(config, path)


def _distill(digits: Path, photos: Path, path: Path, **changes: Any) -> Callable[[], Any]:
    teacher = path.parent / f"teacher-{path.name}.safetensors"
    write_teacher(teacher)
    shots = path.parent / f"shots-{path.name}"
    for split in ("train", "val"):
        (shots / split).parent.mkdir(exist_ok=True)
        (shots / split).symlink_to(photos)
    settings = merge({"fewshot_data": str(shots), "fewshot": 2}, from_flags(changes))
    config = distill_config(photos, teacher, **settings)
    return lambda: train_distill(config, path)


# By task: a function that prepares a training and returns another one that runs it.
TASKS = {
    "vtab": _vtab,
    "highres": _classifier("highres"),
    "pretrain": _classifier("pretrain"),
    "lit": _lit,
    "segment": _segment,
    "distill": _distill,
}
