"""The order of training images that lie in shards: shard after shard, so that only a few are read at a time.

The terms:

- position: index of an image in a batch of all ranks, 0 to batch_size - 1;
- draw: an image of the training, counted over all steps;
- lane: consecutive positions of the batch. The shards of an epoch are divided among lanes, and a lane reads them one
  block after the other;
- chunk: consecutive images of a shuffled shard. A shard that two lanes share has two of them;
- block: the chunks of a lane that are shuffled together. It has one chunk unless lanes are fewer than open shards.

Neighbouring positions have neighbouring lanes, so a rank has shards of its own. The order is a function of seed, step
and position alone; it does not depend on the number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dpn_cli.config.schema import SampledData
from dpn_cli.data.compact import Rows
from dpn_cli.data.sources.base import LabelledImages, ShardIndex
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DpnError

# Independent streams of random numbers: the order of shards, of images in a shard, and of images in a block.
SHARDS, WITHIN_SHARD, WITHIN_BLOCK = 1, 2, 3
# Batches looked up at a time where the order is given as rows instead of a `ShardOrder`.
LOOKAHEAD_BATCHES = 64


class Chunk(NamedTuple):
    """Images `start` up to `end` of a shard, counted in the epoch's random order."""

    shard: int
    start: int
    end: int


class ShardUse(NamedTuple):
    """A shard that steps `first` to `last` read."""

    first: int
    last: int
    shard: int


def iter_shard_uses(shards: ShardIndex, rows: Sequence[int], batch_size: int) -> Iterator[ShardUse]:
    """Yield the shards of images that are read in batches, in order of use, `LOOKAHEAD_BATCHES` batches at a time."""
    for start in range(0, len(rows), LOOKAHEAD_BATCHES * batch_size):
        draws = range(start, min(start + LOOKAHEAD_BATCHES * batch_size, len(rows)))
        shard_of_draw = shards.of[[rows[draw] for draw in draws]]
        numbers, first_draws = np.unique(shard_of_draw, return_index=True)
        last_draws = len(shard_of_draw) - 1 - np.unique(shard_of_draw[::-1], return_index=True)[1]
        steps = (start + np.array([first_draws, last_draws])) // batch_size
        yield from sorted(map(ShardUse, *steps.tolist(), numbers.tolist()))


@dataclass(frozen=True)
class LaneEpoch:
    """The blocks that a lane reads in an epoch, and the lane's first draw of each, with the end of the last."""

    blocks: list[list[Chunk]]
    starts: Rows


@dataclass(frozen=True, eq=False)
class ShardOrder:
    """Sampling of the images of every step. An epoch has each image once, and may end inside a batch.

    Args:
        shards: the number of each image's shard (n,).
        batch_size: images per step, over all ranks.
        seed: another one gives another order.
        open_shards: how many shards the images of a batch come from, over all ranks.
        steps: length of the training; later steps read nothing.
    """

    shards: Rows
    batch_size: int
    seed: int
    open_shards: int
    steps: int = sys.maxsize
    # By lane: the epoch, the number and the images of the block that it draws from.
    _open_blocks: dict[int, tuple[int, int, Rows]] = field(default_factory=dict, repr=False)

    @property
    def image_count(self) -> int:
        """The number of images of an epoch."""
        return len(self.shards)

    @property
    def lane_count(self) -> int:
        """The number of lanes."""
        return min(self.open_shards, self.batch_size)

    @cached_property
    def rows_by_shard(self) -> dict[int, Rows]:
        """The images of every shard that has any."""
        sorted_rows = np.argsort(self.shards, kind="stable")
        numbers, starts = np.unique(self.shards[sorted_rows], return_index=True)
        return dict(zip(numbers.tolist(), np.split(sorted_rows, starts[1:]), strict=True))

    @cached_property
    def _bounds(self) -> Rows:
        """The first position of every lane, and the end of the last one."""
        return -(-np.arange(self.lane_count + 1) * self.batch_size // self.lane_count)

    def _draws_per_lane(self, draws: int) -> Rows:
        """Return how many of the first `draws` of a training each lane has (lanes,)."""
        steps, remainder = divmod(draws, self.batch_size)
        first, width = self._bounds[:-1], np.diff(self._bounds)
        return steps * width + np.clip(remainder - first, 0, width)

    def plan(self, epoch: int) -> list[LaneEpoch]:
        """Return the blocks of every lane in an epoch.

        The shuffled shards, one after the other, are cut where the draws of a lane end. The two lanes of a shard
        that is cut both start with it, or both end with it, so that it is fetched once.
        """
        numbers = np.array(list(self.rows_by_shard))[
            _permute(len(self.rows_by_shard), self.seed, SHARDS, epoch)
        ].tolist()
        ends = np.cumsum([len(self.rows_by_shard[shard]) for shard in numbers])
        starts = np.concatenate([[0], ends[:-1]])
        draws = self._draws_per_lane((epoch + 1) * self.image_count) - self._draws_per_lane(epoch * self.image_count)
        lanes = []
        for lane, (low, high) in enumerate(pairwise(np.concatenate([[0], np.cumsum(draws)]).tolist())):
            overlapping = range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(starts, high)))
            chunks = [
                Chunk(numbers[i], max(0, low - int(starts[i])), min(high, int(ends[i])) - int(starts[i]))
                for i in (overlapping if low < high else ())
            ]
            if lane % 2 == 0:
                chunks.reverse()
            lanes.append(self._divide_into_blocks(chunks))
        return lanes

    def _divide_into_blocks(self, chunks: Sequence[Chunk]) -> LaneEpoch:
        """Divide the chunks of a lane into blocks of equally many, about as many as the lane may have open."""
        chunks_per_block = -(-self.open_shards // self.lane_count)
        count = max(1, -(-len(chunks) // chunks_per_block))
        cuts = [len(chunks) * number // count for number in range(count + 1)]
        blocks = [list(chunks[low:high]) for low, high in pairwise(cuts)]
        sizes = [sum(chunk.end - chunk.start for chunk in block) for block in blocks]
        return LaneEpoch(blocks, np.cumsum([0, *sizes]))

    def block(self, epoch: int, lane: int, number: int) -> Rows:
        """Return the images of a lane's block in the order in which they are drawn."""
        chunks = _plan(self, epoch)[lane].blocks[number]
        parts = []
        for shard, start, end in chunks:
            rows = self.rows_by_shard[shard]
            parts.append(rows[_permute(len(rows), self.seed, WITHIN_SHARD, epoch, shard)[start:end]])
        block_rows = np.concatenate(parts)
        shuffled: Rows = block_rows[_permute(len(block_rows), self.seed, WITHIN_BLOCK, epoch, lane, number)]
        return shuffled

    def rows(self, step: int) -> list[int]:
        """Return the images of a step's batch (b,), of all ranks."""
        parts: list[Rows] = []
        draw, last = step * self.batch_size, (step + 1) * self.batch_size
        while draw < last:
            epoch = draw // self.image_count
            end = min(last, (epoch + 1) * self.image_count)
            previous_draws = self._draws_per_lane(epoch * self.image_count)
            spans = zip(
                (self._draws_per_lane(draw) - previous_draws).tolist(),
                (self._draws_per_lane(end) - previous_draws).tolist(),
                strict=True,
            )
            for lane, (low, high) in enumerate(spans):
                parts += self._iter_draws(epoch, lane, low, high)
            draw = end
        rows: list[int] = np.concatenate(parts).tolist()
        return rows

    def _iter_draws(self, epoch: int, lane: int, low: int, high: int) -> Iterator[Rows]:
        """Yield the images of a lane's draws from `low` up to `high` of an epoch."""
        starts = _plan(self, epoch)[lane].starts
        while low < high:
            number = int(np.searchsorted(starts, low, "right")) - 1
            end = min(high, int(starts[number + 1]))
            if self._open_blocks.get(lane, ())[:2] != (epoch, number):
                self._open_blocks[lane] = epoch, number, self.block(epoch, lane, number)
            yield self._open_blocks[lane][2][low - starts[number] : end - starts[number]]
            low = end

    def iter_shard_uses(self, start: int, positions: Sequence[int]) -> Iterator[ShardUse]:
        """Yield the shards that the steps from `start` on read at `positions` of their batches, in order of use."""
        lanes = sorted({position * self.lane_count // self.batch_size for position in positions})
        widths = np.diff(self._bounds)
        for epoch in range(
            start * self.batch_size // self.image_count, -(-self.steps * self.batch_size // self.image_count)
        ):
            previous_draws = self._draws_per_lane(epoch * self.image_count)
            uses = []
            for lane in lanes:
                plan = _plan(self, epoch)[lane]
                for block, (low, high) in zip(
                    plan.blocks, pairwise((plan.starts + previous_draws[lane]).tolist()), strict=True
                ):
                    first, last = low // widths[lane], (high - 1) // widths[lane]
                    uses += [ShardUse(int(first), int(last), chunk.shard) for chunk in block]
            yield from sorted(use for use in uses if use.last >= start and use.first < self.steps)


def make_shard_order(
    split: LabelledImages, data: SampledData, batch_size: int, seed: int, steps: int
) -> ShardOrder | None:
    """Return the order of a training on a split; None where its images are shuffled all together.

    Raises `DpnError` for ``--shuffle shards`` on a split without shards.
    """
    if data.shuffle == "images":
        return None
    if split.shards is None:
        raise DpnError(
            "--shuffle shards: the images of --data are in no packed or webdataset shards; pack them with 'dpn data "
            "pack', or leave --shuffle at images"
        )
    return ShardOrder(split.shards.of, batch_size, seed, data.open_shards, steps)


# Two, because a batch can have the end of an epoch and the start of the next one.
@lru_cache(maxsize=2)
def _plan(order: ShardOrder, epoch: int) -> list[LaneEpoch]:
    return order.plan(epoch)


def _permute(count: int, *numbers: int) -> Rows:
    """Return the numbers below `count` in an order that depends on the other `numbers` alone.

    NumPy promises that the bits of a generator stay the same in later versions, but not what `permutation` makes of
    them, and a training may go on with a later version.
    """
    return np.argsort(np.random.PCG64(fold(*numbers)).random_raw(count), kind="stable")
