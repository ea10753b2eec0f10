"""Accuracy of a classifier: counts over a split and over ranks, each image once, in constant memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli.data.pixels import PixelSet, Transform, stream
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.engine.losses import LOSSES, Loss
from dpn_cli.run import distributed, signals
from dpn_cli.run.baseline_warnings import class_floors
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.run.distributed import World

if TYPE_CHECKING:
    from torchmetrics.classification import MulticlassConfusionMatrix


class ImagePrediction(NamedTuple):
    """Prediction of a classifier for one image: row in the split, true class, predicted class, confidence."""

    row: int
    label: int
    predicted: int
    confidence: float


@dataclass(frozen=True)
class Confusion:
    """Counts of images by true and predicted class: `pairs` has those that occurred, as ``true * classes + taken``.

    A matrix of ImageNet-21k's classes would take 4 GB.
    """

    classes: int
    pairs: Mapping[int, int]

    @property
    def true(self) -> list[int]:
        """The images of every class."""
        return self._sums((pair // self.classes, images) for pair, images in self.pairs.items())

    @property
    def predicted(self) -> list[int]:
        """The images that were taken for every class."""
        return self._sums((pair % self.classes, images) for pair, images in self.pairs.items())

    @property
    def right(self) -> list[int]:
        """The images of every class that were taken for it."""
        return [self.pairs.get(number * self.classes + number, 0) for number in range(self.classes)]

    def _sums(self, parts: Iterable[tuple[int, int]]) -> list[int]:
        sums = [0] * self.classes
        for number, images in parts:
            sums[number] += images
        return sums

    def worst(self, most: int) -> list[tuple[int, int, int]]:
        """Return the most frequent mistakes as (true, taken, images); of equal ones, those of the first classes."""
        mistakes = [(-images, *divmod(pair, self.classes)) for pair, images in self.pairs.items()]
        mistakes = sorted(one for one in mistakes if one[1] != one[2])
        return [(true, predicted, -negative_images) for negative_images, true, predicted in mistakes[:most]]


@dataclass
class Scores:
    """Counts of a split."""

    images: int
    right: int
    right5: int
    loss: float
    skipped: int
    confusion: Confusion
    predictions: list[ImagePrediction] = field(default_factory=list)

    @property
    def top1(self) -> float:
        """Accuracy in percent."""
        return 100 * self.right / self.images

    @property
    def top5(self) -> float:
        """Percent of images whose class is among the five best (of fewer classes: all of them)."""
        return 100 * self.right5 / self.images

    @property
    def mean_recall(self) -> float:
        """Mean over the classes that occur of the percent of their images that are right."""
        pairs = [(right, true) for right, true in zip(self.confusion.right, self.confusion.true, strict=True) if true]
        return 100 * sum(right / true for right, true in pairs) / len(pairs)

    @property
    def floors(self) -> dict[str, float]:
        """Accuracies in percent that need no learning, by name."""
        return class_floors(self.confusion.true)


def confusion_matrix(classes: int, device: torch.device) -> MulticlassConfusionMatrix:
    """Return torchmetrics' counts of (true, predicted) classes, which `compute` adds up over ranks.

    Every image of every rank must be given exactly once.
    """
    from torchmetrics.classification import MulticlassConfusionMatrix  # 0.8 s, and not needed to train

    return MulticlassConfusionMatrix(classes, validate_args=False).to(device)


def count_right(confusion: MulticlassConfusionMatrix) -> tuple[int, int]:
    """Return (right, all) over all ranks."""
    table = confusion.compute()
    return int(table.trace()), int(table.sum())


def rank_share(
    split: LabelledImages,
    transform: Transform,
    world: World,
    batch_size: int,
    workers: int | Literal["auto"] = "auto",
    *,
    skip_bad: bool = False,
) -> Generator[PixelSet, None, None]:
    """Yield this rank's images of a split, each image on one rank.

    Raises `DataError` for an unreadable image unless `skip_bad`, `StoppedError` when a signal asks to stop.
    """
    rows = range(world.rank, len(split.labels), world.size)
    with stream(split, transform, batch_size, rows=rows, workers=workers, skip_bad=skip_bad) as parts:
        # Rank 0 has the most rows; all ranks loop as often as rank 0, because they decide together when to stop.
        for _ in range(0, -(-len(split.labels) // world.size), batch_size):
            signals.check()
            if (part := next(parts, None)) is not None:
                yield part


def score(
    logits_of: Callable[[Tensor], Tensor],
    split: LabelledImages,
    transform: Transform,
    classes: int,
    world: World,
    *,
    loss: Loss,
    batch_size: int,
    workers: int | Literal["auto"] = "auto",
    skip_bad: bool = False,
    columns: Tensor | None = None,
    keep_predictions: bool = False,
    on_progress: OnProgress = ignore_progress,
    see: Callable[[Sequence[int], Tensor], None] | None = None,
) -> Scores:
    """Score a split.

    `logits_of` maps uint8 images (b, 3, h, w) to logits, of which `columns` picks those of the split's classes.
    `on_progress` receives the number of processed images. With `keep_predictions` every readable image has an
    `ImagePrediction`, in the split's order. `see` is called with the rows and the logits (b, classes) of each part.

    Raises `DataError` for an unreadable image unless `skip_bad`, `StoppedError` when a signal asks to stop.
    """
    pairs = Counter[int]()
    sums = torch.zeros(4, dtype=torch.float64)  # images, right among five, loss, skipped
    predictions: list[ImagePrediction] = []
    with closing(rank_share(split, transform, world, batch_size, workers, skip_bad=skip_bad)) as parts:
        for part in parts:
            on_progress(len(part.images) + part.skipped)
            sums[3] += part.skipped
            if not len(part.images):
                continue
            labels = part.labels.to(world.device)
            with torch.inference_mode():
                logits = logits_of(part.images.to(world.device)).float()
                logits = logits if columns is None else logits[:, columns]
                pairs.update((labels * classes + logits.argmax(-1)).tolist())
                best = logits.topk(min(5, classes), dim=-1).indices
                value = LOSSES[loss](logits, F.one_hot(labels, classes).float()) * len(labels)
            sums[:3] += torch.tensor([len(labels), int((best == labels[:, None]).sum()), value.item()])
            if see:
                see(part.rows, logits)
            if keep_predictions:
                chances = logits.sigmoid() if loss == "sigmoid" else logits.softmax(-1)
                sure, guess = chances.max(-1)
                predictions += map(ImagePrediction, part.rows, labels.tolist(), guess.tolist(), sure.tolist())
    images, right5, total, skipped = distributed.reduce_over_ranks(sums).tolist()
    confusion = Confusion(classes, sum(distributed.from_all(pairs), Counter[int]()))
    counted = sum(confusion.pairs.values())
    if not counted == images == len(split.labels) - skipped:
        raise RuntimeError(
            f"{int(images)} images were scored and {counted} of them counted among the confusions, "
            f"but the split has {len(split.labels)}, of which {int(skipped)} are unreadable"
        )
    predictions = sorted(prediction for rank in distributed.from_all(predictions) for prediction in rank)
    right = sum(confusion.right)
    return Scores(int(images), right, int(right5), total / images, int(skipped), confusion, predictions)
