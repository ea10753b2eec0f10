"""Agreement of a student with its teacher on held-out images."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from dpn_cli.data.pixels import Transform
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.engine.losses import Loss
from dpn_cli.metrics import rank_share
from dpn_cli.run import distributed
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone
from tasks.classify.distill.losses import divergence


@dataclass(frozen=True)
class Agreement:
    """Agreement of a student with its teacher on `images` images.

    Args:
        images: the number of images.
        agreement: how often both name the same class, in percent; None where one has no head.
        token_variance: share of the variance of the teacher's tokens after the final norm, around their mean per
            channel, that the student's tokens explain: 1 is equal, below 0 worse than the mean; None for other shapes.
        kl: mean Kullback-Leibler divergence of the student's classes from the teacher's, in nats; see `divergence`.
    """

    images: int
    agreement: float | None
    token_variance: float | None
    kl: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers as plain values."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """Return the known scores of the agreement by name."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "images"}


@torch.inference_mode()
def compute_agreement(
    teacher: Backbone,
    student: Backbone,
    split: LabelledImages,
    transform: Transform,
    world: World,
    *,
    loss: Loss,
    batch_size: int,
    workers: int | Literal["auto"],
    skip_bad: bool,
) -> Agreement:
    """Compare two networks in evaluation mode on all images of a split, which the ranks share.

    Raises `DataError` for an unreadable image unless `skip_bad`.
    """
    classes = teacher.num_classes > 0
    sums = torch.zeros(5, dtype=torch.float64)  # images, equal classes, divergence, squared distance, tokens
    squares, total = torch.zeros((), dtype=torch.float64), torch.zeros(teacher.embed_dim, dtype=torch.float64)
    comparable = True
    with closing(rank_share(split, transform, world, batch_size, workers, skip_bad=skip_bad)) as parts:
        for part in parts:
            if not len(part.images):
                continue
            image = part.images.to(world.device)
            teacher_tokens, student_tokens = (
                network.forward_features(network.normalize(image)) for network in (teacher, student)
            )
            sums[0] += len(image)
            if classes:
                teacher_head, student_head = (
                    teacher.forward_head(teacher_tokens).float(),
                    student.forward_head(student_tokens).float(),
                )
                sums[1] += float((teacher_head.argmax(-1) == student_head.argmax(-1)).sum())
                sums[2] += float(divergence(teacher_head, student_head, loss).sum())
            comparable = teacher_tokens.shape == student_tokens.shape
            if comparable:
                flat_teacher, flat_student = (
                    teacher_tokens.flatten(0, 1).double(),
                    student_tokens.flatten(0, 1).double(),
                )
                sums[3] += float((flat_student - flat_teacher).square().sum())
                sums[4] += len(flat_teacher)
                squares += float(flat_teacher.square().sum())
                total += flat_teacher.sum(0).cpu()
    totals = distributed.reduce_over_ranks(torch.cat([sums, squares[None], total])).cpu()
    images, equal, different, distance, tokens, squared = totals[:6].tolist()
    variance = squared - float(totals[6:].square().sum()) / max(tokens, 1)
    return Agreement(
        int(images),
        100 * equal / images if classes else None,
        1 - distance / variance if comparable else None,
        max(0.0, different / images) if classes else None,
    )
