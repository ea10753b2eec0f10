"""A linear probe on a few images per class, as big_vision's fewshot_lsr evaluator does it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpn_cli.config.schema import Runtime
from dpn_cli.data.decode import Pixels
from dpn_cli.data.pixels import Transform, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.errors import DataError
from dpn_cli.run import signals
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.run.precision import autocast
from dpn_cli.weights.backbone import Backbone

L2 = 1024.0  # 2^10, on every weight, that of the constant included
CONSTANT = 100.0  # the feature that stands for the bias
STD_FLOOR = 1e-5
POOL = 65_000  # big_vision draws ImageNet's shots from train[:65000]

Array = npt.NDArray[Any]


def check_shots(option: str, labels: Sequence[int], names: Sequence[str], shots: int) -> None:
    """Raise `DataError` when a class has fewer images than `shots`."""
    counts = np.bincount(np.asarray(labels), minlength=len(names))
    if counts.min() < shots:
        smallest_class = int(counts.argmin())
        raise DataError(
            f"{option} {shots}: class {names[smallest_class]} has {counts[smallest_class]} training images to draw "
            "from; use fewer shots, or draw from more images"
        )


def square_crop(pixels: Pixels, size: tuple[int, int]) -> Tensor:
    """Resize to a square 256 : 224 larger and cut the centre, the probe's preparation: (3, *size) uint8."""
    height, width = (round(side * 256 / 224) for side in size)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return resize(pixels, (height, width))[:, top : top + size[0], left : left + size[1]]


def encode(
    model: Backbone,
    split: LabelledImages,
    runtime: Runtime,
    device: torch.device,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    skip_bad: bool = False,
    transform: Transform | None = None,
    on_progress: OnProgress = ignore_progress,
) -> tuple[Array, Array]:
    """Return the head's input for every image of `rows`, (n, d) in float64, and its class (n,).

    Images are prepared by `square_crop` unless `transform` is given. With `skip_bad` unreadable images are left out;
    otherwise raises `DataError` naming the first one. `on_progress` receives the number of processed images.
    """
    features, labels = [], []
    transform = transform or partial(square_crop, size=model.config.image_size)
    with stream(split, transform, batch_size, rows=rows, workers=runtime.workers, skip_bad=skip_bad) as parts:
        for part in parts:
            signals.check_here()
            on_progress(len(part.images) + part.skipped)
            if len(part.images):
                with torch.inference_mode(), autocast(runtime, device, model):
                    tokens = model.forward_features(model.normalize(part.images.to(device)))
                    features.append(model.forward_head(tokens, pre_logits=True).double().cpu())
                labels.append(part.labels)
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def draw_examples(x: Array, y: Array, classes: int, shots: int, seed: int) -> tuple[Array, Array]:
    """Draw `shots` examples of every class; more shots of one seed contain fewer ones."""
    rows = draw_rows(y, classes, shots, seed)
    return x[rows], y[rows]


def draw_rows(y: Array, classes: int, shots: int, seed: int) -> Array:
    """Return the rows drawn for a number of shots: one generator goes through the classes in order."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(np.flatnonzero(y == label))[:shots] for label in range(classes)])


def probe(
    x_train: Array,
    y_train: Array,
    x_test: Array,
    y_test: Array,
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


def _with_constant(x: Array) -> Array:
    return np.concatenate([x, np.full((len(x), 1), CONSTANT)], axis=1)
