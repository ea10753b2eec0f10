"""Scores of label maps, from one confusion matrix of pixels over a data set and all ranks."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpn_cli.data.loader import count_workers
from dpn_cli.data.workers import open_loader
from dpn_cli.errors import DataError
from dpn_cli.run import distributed, signals
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.run.distributed import World
from tasks.segment.boundary import boundary_f, boundary_iou, count_boundaries
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.model import LinearSegmenter
from tasks.segment.pairs import Pairs
from tasks.segment.palette import Class
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.segment.transforms import resize_image

Item = tuple[list[Tensor], Tensor] | DataError


def count_pixels(predicted: Tensor, label: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix (classes, classes) int64 of two label maps, truth in rows, without label 255."""
    is_labelled = label != IGNORE
    # 32 bits a pixel: images of 10,000 x 10,000 are scored in one go.
    return torch.bincount(label[is_labelled].int() * classes + predicted[is_labelled], minlength=classes**2).view(
        classes, classes
    )


class ImageScore(NamedTuple):
    """The mIoU in percent of one image, by its row in the split."""

    row: int
    miou: float


@dataclass(frozen=True)
class SegmentScores:
    """Scores from the confusion matrix of a data set's pixels, (classes, classes) int64, truth in rows.

    `per_image` is the score of every image that has labelled pixels, `boundaries` the sum of `count_boundaries`.
    """

    confusion: Tensor
    images: int
    per_image: Sequence[ImageScore] = ()
    boundaries: Tensor | None = None

    @property
    def iou(self) -> Tensor:
        """Intersection over union per class in percent; NaN for classes in neither truth nor prediction."""
        right = self.confusion.diagonal().double()
        return 100 * right / (self.confusion.sum(0) + self.confusion.sum(1) - right)

    @property
    def recall(self) -> Tensor:
        """Share of a class's pixels that are right, in percent; NaN for classes that do not occur."""
        return 100 * self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def precision(self) -> Tensor:
        """Share of the pixels predicted as a class that are right, in percent; NaN for classes never predicted."""
        return 100 * self.confusion.diagonal().double() / self.confusion.sum(0)

    @property
    def dice(self) -> Tensor:
        """Twice the intersection over the sum of truth and prediction, in percent; NaN for classes in neither."""
        return 200 * self.confusion.diagonal().double() / (self.confusion.sum(0) + self.confusion.sum(1))

    @property
    def fscore(self) -> Tensor:
        """Harmonic mean of precision and recall, in percent; as in mmsegmentation, NaN where one of them is."""
        return 2 * self.precision * self.recall / (self.precision + self.recall)

    @property
    def miou(self) -> float:
        """Mean IoU in percent, over the classes that occur in truth or prediction."""
        return self.iou.nanmean().item()

    @property
    def pixel_accuracy(self) -> float:
        """Share of labelled pixels that are right, in percent."""
        return 100 * int(self.confusion.trace()) / int(self.confusion.sum())

    @property
    def mean_accuracy(self) -> float:
        """Mean recall in percent, over the classes that occur."""
        return self.recall.nanmean().item()

    @property
    def majority_miou(self) -> float:
        """The mIoU of predicting the most frequent class everywhere, in percent."""
        support = self.confusion.sum(1)
        return 100 * int(support.max()) / int(support.sum()) / int((support > 0).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of a result."""
        return {
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "mean_accuracy": self.mean_accuracy,
            "mean_precision": self.precision.nanmean().item(),
            "mdice": self.dice.nanmean().item(),
            "mfscore": self.fscore.nanmean().nan_to_num(0.0).item(),  # undefined where no pixel is right
            **self._boundary_scores(),
            "majority_miou": self.majority_miou,
            "classes_seen": int((self.confusion.sum(1) > 0).sum()),
            "pixels": int(self.confusion.sum()),
            "images": self.images,
        }

    def _boundary_scores(self) -> dict[str, float]:
        """Return the means of the boundary scores, without those for which no class has an outline."""
        if self.boundaries is None:
            return {}
        scores = {"boundary_miou": boundary_iou(self.boundaries), "boundary_mf": boundary_f(self.boundaries)}
        return {name: values.nanmean().item() for name, values in scores.items() if not values.isnan().all()}

    def per_class(self, classes: Sequence[Class]) -> str:
        """Return a CSV of every class: pixels of truth and prediction, and its scores in percent."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        columns = {
            "iou": self.iou,
            "recall": self.recall,
            "precision": self.precision,
            "dice": self.dice,
            "fscore": self.fscore,
        }
        if self.boundaries is not None:
            columns |= {"boundary_iou": boundary_iou(self.boundaries), "boundary_f": boundary_f(self.boundaries)}
        table.writerow(["class", "name", "pixels", "predicted", *columns])
        for index, class_ in enumerate(classes):
            shares = [values[index].item() for values in columns.values()]
            counts = int(self.confusion[index].sum()), int(self.confusion[:, index].sum())
            table.writerow(
                [index, class_.name, *counts, *("" if share != share else f"{share:.2f}" for share in shares)]
            )
        return text.getvalue()


class _Sized(Dataset[Item]):
    def __init__(self, pairs: Pairs, rows: Sequence[int], rule: LabelRule, plan: WindowPlan) -> None:
        self.pairs, self.rows, self.rule, self.plan = pairs, rows, rule, plan

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        row = self.rows[index]
        try:
            pixels, raw = self.pairs.load(row)
            labels = self.rule.labels(raw, self.pairs.locate_mask(row))
        except DataError as error:
            return error  # raised in a worker, it would come back wrapped in the worker's traceback
        full = pixels.shape[0], pixels.shape[1]
        images = [resize_image(pixels, self.plan.size(full, ratio)) for ratio in self.plan.ratios]
        return images, torch.from_numpy(labels)


def score(
    network: LinearSegmenter,
    pairs: Pairs,
    rule: LabelRule,
    plan: WindowPlan,
    world: World,
    *,
    workers: int | Literal["auto"],
    boundaries: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> SegmentScores:
    """Score a network on a split at the labels' own sizes, each image once for any number of ranks.

    `on_progress` receives the number of processed images of this rank. With `boundaries`, outlines are scored, too.

    Raises `DataError` for an unreadable image or a wrong mask, `StoppedError` when a signal asks to stop.
    """
    rows = range(world.rank, len(pairs), world.size)
    count = count_workers(workers, world.device, world.local_ranks)
    confusion = torch.zeros(rule.classes, rule.classes, dtype=torch.int64, device=world.device)
    outlines = torch.zeros(7, rule.classes, dtype=torch.int64, device=world.device) if boundaries else None
    scores: list[ImageScore] = []
    with open_loader(_Sized(pairs, rows, rule, plan), count, batch_size=None) as items:
        # All ranks loop as often as rank 0, which has the most rows, because they decide together when to stop.
        for turn in range(-(-len(pairs) // world.size)):
            signals.check()
            item = next(items, None)
            if item is None:
                continue
            predicted, label = _predict(network, item, plan, world.device)
            counts = count_pixels(predicted, label, rule.classes)
            confusion += counts
            if outlines is not None:
                outlines += count_boundaries(predicted, label, rule.classes)
            on_progress(1)
            if bool(counts.any()):
                scores.append(ImageScore(rows[turn], SegmentScores(counts, 1).miou))
    scores = sorted(score for rank in distributed.from_all(scores) for score in rank)
    outlines = None if outlines is None else distributed.reduce_over_ranks(outlines).cpu()
    return SegmentScores(distributed.reduce_over_ranks(confusion).cpu(), len(pairs), scores, outlines)


def predict_row(
    network: LinearSegmenter, pairs: Pairs, row: int, rule: LabelRule, plan: WindowPlan, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return prediction and truth of an image, (h, w) uint8 labels. Raises as `score` does."""
    return _predict(network, _Sized(pairs, [row], rule, plan)[0], plan, device)


def _predict(network: LinearSegmenter, item: Item, plan: WindowPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    if isinstance(item, DataError):
        raise item
    images, label = [image.to(device) for image in item[0]], item[1].to(device)
    with torch.inference_mode():
        return label_map(network, images, (label.shape[0], label.shape[1]), plan), label
