"""`dpn eval fewshot`: a linear probe on a few images per class, as big_vision's fewshot_lsr evaluator does it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpn_cli import engine, stopping
from dpn_cli.backbone import Backbone, load_backbone
from dpn_cli.console import Console
from dpn_cli.data.classified import Part, Source, has_split, hash_order, hold_out, open_split
from dpn_cli.data.labelled import Labelled, Pixels, fingerprint
from dpn_cli.data.pixels import resize, stream
from dpn_cli.distributed import join
from dpn_cli.errors import DataError, DpnError
from dpn_cli.recipe import Runtime
from dpn_cli.statistics import summarize

L2 = 1024.0  # 2^10, on every weight, that of the constant included
CONSTANT = 100.0  # the feature that stands for the bias
STD_FLOOR = 1e-5
POOL = 65_000  # big_vision draws ImageNet's shots from train[:65000]


def fewshot(
    checkpoint: str,
    source: Source,
    shots: Sequence[int],
    seeds: Sequence[int],
    runtime: Runtime,
    console: Console,
    *,
    arch: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    pool: int = POOL,
    batch_size: int = 64,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Probe a checkpoint's representation and return accuracies in percent by shots and seed.

    Features are what the head reads (after pre-logits and tanh where there are). Raises `DataError` when a class has
    fewer images than the largest number of shots.
    """
    with stopping.listen(), join(runtime.device) as world:
        if world.size > 1:
            raise DpnError("eval fewshot: run on one rank")
        model = load_backbone(arch, stem=None, checkpoint=checkpoint, image_size=image_size)
        console.info(model.report.summary())
        model.to(world.device).eval()
        train, names = open_split(source, "train")
        if has_split(source, "val"):
            test: Labelled = open_split(source, "val")[0]
        elif source.val_fraction:
            train, test = hold_out(train, source.val_fraction)
        else:
            raise DataError(f"--data {source.place}: no images to test on; add --val-data or --val-fraction 0.5")
        if len(train.labels) > pool:
            train = Part(train, sorted(hash_order(train)[:pool]))
        _check_shots(train, names, max(shots))
        features = [
            _features(model, split, runtime, world.device, batch_size, skip_bad, console) for split in (train, test)
        ]
        (x_train, y_train), (x_test, y_test) = features
        accuracy = {
            shot: {
                seed: 100 * probe(*pick(x_train, y_train, len(names), shot, seed), x_test, y_test, len(names))
                for seed in seeds
            }
            for shot in shots
        }
        return {
            "task": "fewshot",
            "network": checkpoint,
            "data": source.place,
            "fingerprints": {"train": fingerprint(train), "test": fingerprint(test)},
            "classes": len(names),
            "images": {"train": len(y_train), "test": len(y_test)},
            "image_size": list(model.config.image_size),
            "accuracy": {
                str(shot): {"seeds": list(by_seed), **summarize(list(by_seed.values())).to_dict()}
                for shot, by_seed in accuracy.items()
            },
        }


def _check_shots(train: Labelled, names: Sequence[str], shots: int) -> None:
    counts = np.bincount(np.asarray(train.labels), minlength=len(names))
    if counts.min() < shots:
        poorest = int(counts.argmin())
        raise DataError(
            f"--shots {shots}: class {names[poorest]} has {counts[poorest]} training images; "
            "use fewer shots or a larger --pool"
        )


def square_crop(pixels: Pixels, size: tuple[int, int]) -> Tensor:
    """Resize to a square 256 : 224 larger and cut the centre, the probe's preparation: (3, *size) uint8."""
    height, width = (round(side * 256 / 224) for side in size)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return resize(pixels, (height, width))[:, top : top + size[0], left : left + size[1]]


def _features(
    model: Backbone,
    split: Labelled,
    runtime: Runtime,
    device: torch.device,
    batch_size: int,
    skip_bad: bool,
    console: Console,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the representation of every image (n, d) in float64, and its class (n,)."""
    features, labels = [], []
    transform = partial(square_crop, size=model.config.image_size)
    for part in stream(split, transform, batch_size, workers=runtime.workers, skip_bad=skip_bad):
        stopping.check_here()
        if len(part.images):
            with torch.inference_mode(), engine.precision_of(runtime, device):
                features.append(model(model.normalize(part.images.to(device))).double().cpu())
            labels.append(part.labels)
    count = sum(map(len, labels))
    console.info(f"{count} images encoded")
    if count < len(split.labels):
        console.warn(f"{len(split.labels) - count} unreadable images are left out")
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def pick(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], classes: int, shots: int, seed: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw `shots` examples of every class; more shots of one seed contain fewer ones."""
    rows = choose(y, classes, shots, seed)
    return x[rows], y[rows]


def choose(y: np.ndarray[Any, Any], classes: int, shots: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the rows drawn for a number of shots: one generator goes through the classes in order."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(np.flatnonzero(y == label))[:shots] for label in range(classes)])


def probe(
    x_train: np.ndarray[Any, Any],
    y_train: np.ndarray[Any, Any],
    x_test: np.ndarray[Any, Any],
    y_test: np.ndarray[Any, Any],
    classes: int,
    l2: float = L2,
) -> float:
    """Return the accuracy in [0, 1] of ridge regression onto targets of plus and minus one, in float64."""
    mean, std = x_train.mean(0), x_train.std(0) + STD_FLOOR
    train, test = (_with_constant((x.astype(np.float64) - mean) / std) for x in (x_train, x_test))
    targets = 2.0 * np.eye(classes)[y_train] - 1
    count, width = train.shape
    if count < width:  # the dual form, the same weights
        weights = train.T @ np.linalg.solve(train @ train.T + l2 * np.eye(count), targets)
    else:
        weights = np.linalg.solve(train.T @ train + l2 * np.eye(width), train.T @ targets)
    return float(((test @ weights).argmax(1) == y_test).mean())


def _with_constant(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([x, np.full((len(x), 1), CONSTANT)], axis=1)


def describe(result: dict[str, Any]) -> str:
    """Return the result as lines for a person."""
    images = result["images"]
    lines = [f"{images['train']} images to draw from, {images['test']} to test on, {result['classes']} classes"]
    for shots, entry in result["accuracy"].items():
        low, high = entry["ci95"] or (float("nan"),) * 2
        lines.append(
            f"{shots:>3}-shot {entry['mean']:6.2f} % ± {entry['stderr'] or 0:.2f} (95 % {low:.1f} ... {high:.1f}, "
            f"n = {entry['n']} draws)"
        )
    return "\n".join(lines)
