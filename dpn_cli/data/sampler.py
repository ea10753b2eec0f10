"""The images of every training step: shuffled epochs, as a function of seed and step alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count

import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils.data import Sampler

from dpn_cli.data.shard_sampler import ShardOrder
from dpn_cli.engine.seeds import fold
from dpn_cli.run.distributed import World

# Stream of draws; see `dpn_cli.data.loader` for the others.
EPOCH = 5


Item = tuple[int, int, int]  # two seeds of its draws (step and position, or view and row), row of the data set


def rows_of_step(images: int, batch_size: int, seed: int, step: int, repeats: int = 1) -> Tensor:
    """Return the rows of the images in a step's batch: a pure function of (seed, step).

    Shuffled epochs follow each other without a gap, so an epoch may end inside a batch (big_vision's
    shuffle, repeat, batch). With `repeats`, an epoch holds a share of the images, each repeated that often in a row.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    parts = []
    while first < last:
        epoch, offset = divmod(first, images)
        parts.append(_permutation(images, seed, epoch, repeats)[offset : offset + last - first])
        first += len(parts[-1])
    return torch.cat(parts)


@lru_cache(maxsize=4)
def _permutation(images: int, seed: int, epoch: int, repeats: int) -> Tensor:
    if repeats > 1:
        return repeat_epoch(images, seed, epoch, repeats)
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def repeat_epoch(images: int, seed: int, epoch: int, repeats: int) -> Tensor:
    """Return an epoch's order of `images` draws: the first images of a shuffle, each `repeats` times in a row.

    Repeated augmentation (arXiv 1901.09335) as in timm's sampler: an epoch keeps its length and sees a share of the
    images.
    """
    sampler = RepeatAugSampler(range(images), num_replicas=1, rank=0, num_repeats=repeats, selected_round=0)
    sampler.set_epoch(fold(seed, EPOCH, epoch))
    return torch.tensor(list(sampler))


class StepSampler(Sampler[list[Item]]):
    """The items of this rank in every batch from step `start` on.

    `repeats` and `views` are those of `Augmentation`. Without an `order`, the full data set is shuffled; with one,
    the batches end with the training, after one batch at least.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        seed: int,
        start: int,
        positions: Sequence[int],
        repeats: int = 1,
        views: int = 0,
        order: ShardOrder | None = None,
    ) -> None:
        self.images, self.batch_size, self.seed, self.start = images, batch_size, seed, start
        self.positions, self.repeats, self.views, self.order = positions, repeats, views, order

    def __iter__(self) -> Iterator[list[Item]]:
        for step in range(self.start, max(self.start + 1, self.order.steps)) if self.order else count(self.start):
            rows = self._rows(step)
            yield [(*self._seeds(step, i, rows[i]), rows[i]) for i in self.positions]

    def _rows(self, step: int) -> list[int]:
        if self.order:
            return self.order.rows(step)
        rows: list[int] = rows_of_step(self.images, self.batch_size, self.seed, step, self.repeats).tolist()
        return rows

    def _seeds(self, step: int, position: int, row: int) -> tuple[int, int]:
        epoch = (step * self.batch_size + position) // self.images
        return (epoch % self.views, row) if self.views else (step, position)


def rank_positions(batch_size: int, world: World, *, mirrored: bool = False) -> list[int]:
    """Return a rank's positions in the global batch: consecutive, or with `mirrored` each followed by its mirror."""
    rows = world.rows(batch_size)
    if not mirrored:
        return list(rows)
    return [i for first in range(rows.start // 2, rows.stop // 2) for i in (first, batch_size - 1 - first)]
