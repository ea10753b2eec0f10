"""What a classifier gets right: counts over a split, each image once whatever the ranks, in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli import distributed, stopping
from dpn_cli.data.labelled import Labelled
from dpn_cli.data.pixels import Transform, stream
from dpn_cli.distributed import World
from dpn_cli.losses import LOSSES, Loss
from dpn_cli.sanity import class_floors


@dataclass
class Scores:
    """Counts of a split; `confusion` is (classes, classes), rows the truth."""

    images: int
    right: int
    right5: int
    loss: float
    skipped: int
    confusion: Tensor
    predictions: list[int] = field(default_factory=list)

    @property
    def top1(self) -> float:
        """Accuracy in percent."""
        return 100 * self.right / self.images

    @property
    def top5(self) -> float:
        """Percent of images whose class is among the five best (of fewer classes: all of them)."""
        return 100 * self.right5 / self.images

    @property
    def floors(self) -> dict[str, float]:
        """Accuracies in percent that need no learning, by name."""
        return class_floors(self.confusion.sum(1).tolist())


def score(
    logits_of: Callable[[Tensor], Tensor],
    split: Labelled,
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
) -> Scores:
    """Score a split.

    `logits_of` maps uint8 images (b, 3, h, w) to logits, of which `columns` picks those of the split's classes.
    With `keep_predictions` the best class of every image is kept in order (alone, not over ranks). Raises `DataError`
    for an unreadable image unless `skip_bad`, `StoppedError` when a signal asks to stop.
    """
    from torchmetrics.classification import MulticlassConfusionMatrix  # 0.8 s, and not needed to train

    confusion = MulticlassConfusionMatrix(classes, validate_args=False).to(world.device)
    sums = torch.zeros(4, dtype=torch.float64)  # images, right among five, loss, skipped
    rows = range(world.rank, len(split.labels), world.size)
    predictions: list[int] = []
    with stream(split, transform, batch_size, rows=rows, workers=workers, skip_bad=skip_bad) as parts:
        # Rank 0 has the most rows; all ranks go round as often as it, because they decide together when to stop.
        for _ in range(0, -(-len(split.labels) // world.size), batch_size):
            stopping.check()
            part = next(parts, None)
            if part is None:
                continue
            sums[3] += part.skipped
            if not len(part.images):
                continue
            labels = part.labels.to(world.device)
            with torch.inference_mode():
                logits = logits_of(part.images.to(world.device)).float()
                logits = logits if columns is None else logits[:, columns]
                confusion.update(logits, labels)
                best = logits.topk(min(5, classes), dim=-1).indices
                value = LOSSES[loss](logits, F.one_hot(labels, classes).float()) * len(labels)
            sums[:3] += torch.tensor([len(labels), int((best == labels[:, None]).sum()), value.item()])
            if keep_predictions:
                predictions += best[:, 0].tolist()
    images, right5, total, skipped = distributed.reduce_over_ranks(sums).tolist()
    table = confusion.compute().cpu()
    if not int(table.sum()) == images == len(split.labels) - skipped:
        raise RuntimeError(
            f"{int(images)} images were scored and {int(table.sum())} of them counted in the confusion matrix, but the "
            f"split has {len(split.labels)}, of which {int(skipped)} are unreadable"
        )
    return Scores(int(images), int(table.trace()), int(right5), total / images, int(skipped), table, predictions)
