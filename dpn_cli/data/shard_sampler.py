"""The order of training images that lie in shards: shard after shard, so that only a few are read at a time.

The places of a batch are divided into lanes, and the shards of an epoch among the lanes. A lane draws the images of one
shard (of several, where there are fewer places than shards to be open) in random order before it turns to the next one.
Neighbouring places have neighbouring lanes, so a rank has shards of its own; but the order is one of steps and places,
which ranks have no part in: it is a function of seed and step alone.
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

# Independent streams of random numbers: the order of shards, of a shard's images, of the images that are read together.
SHARDS, INSIDE, TOGETHER = 1, 2, 3
# Batches looked up at a time where the order is given as rows instead of a `ShardOrder`.
LOOKAHEAD_BATCHES = 64


class Chunk(NamedTuple):
    """Images `begin` up to `end` of a shard's in an epoch, counted in a random order."""

    shard: int
    begin: int
    end: int


class ShardUse(NamedTuple):
    """A shard that steps `first` to `last` read."""

    first: int
    last: int
    shard: int


def iter_shard_uses(shards: ShardIndex, rows: Sequence[int], batch_size: int) -> Iterator[ShardUse]:
    """Yield the shards of images that are read in batches, in order of use, `LOOKAHEAD_BATCHES` batches at a time."""
    for begin in range(0, len(rows), LOOKAHEAD_BATCHES * batch_size):
        places = range(begin, min(begin + LOOKAHEAD_BATCHES * batch_size, len(rows)))
        of = shards.of[[rows[place] for place in places]]
        numbers, firsts = np.unique(of, return_index=True)
        lasts = len(of) - 1 - np.unique(of[::-1], return_index=True)[1]
        steps = (begin + np.array([firsts, lasts])) // batch_size
        yield from sorted(map(ShardUse, *steps.tolist(), numbers.tolist()))


@dataclass(frozen=True)
class ShardGroup:
    """A lane's epoch: pieces of shards that are read together, and where each such block begins among its draws."""

    blocks: list[list[Chunk]]
    begins: Rows


@dataclass(frozen=True, eq=False)
class ShardOrder:
    """Sampling of the images of every step. An epoch has each image once, and may end inside a batch.

    Args:
        shards: the number of each image's shard (n,).
        batch_size: images per step, over all ranks.
        seed: another one gives another order.
        open_shards: how many shards the images of a batch come from, over all ranks.
        steps: how long the training is; what comes after it is not read.
    """

    shards: Rows
    batch_size: int
    seed: int
    open_shards: int
    steps: int = sys.maxsize
    _open: dict[int, tuple[int, int, Rows]] = field(
        default_factory=dict, repr=False
    )  # by lane, the block it draws from

    @property
    def images(self) -> int:
        """Return the number of images of an epoch."""
        return len(self.shards)

    @property
    def lanes(self) -> int:
        """Return the number of lanes that the places of a batch are divided into."""
        return min(self.open_shards, self.batch_size)

    @cached_property
    def members(self) -> dict[int, Rows]:
        """The images of every shard that has any."""
        sorted_rows = np.argsort(self.shards, kind="stable")
        numbers, begins = np.unique(self.shards[sorted_rows], return_index=True)
        return dict(zip(numbers.tolist(), np.split(sorted_rows, begins[1:]), strict=True))

    @cached_property
    def _bounds(self) -> Rows:
        """The first place of every lane, and the end of the last one."""
        return -(-np.arange(self.lanes + 1) * self.batch_size // self.lanes)

    def _draws_per_group(self, draws: int) -> Rows:
        """Return how many of the first `draws` of a training are each lane's (lanes,)."""
        steps, rest = divmod(draws, self.batch_size)
        first, width = self._bounds[:-1], np.diff(self._bounds)
        return steps * width + np.clip(rest - first, 0, width)

    def plan(self, epoch: int) -> list[ShardGroup]:
        """Return what every lane reads in an epoch.

        The shuffled shards, one after the other, are cut where a lane's share of the draws ends. The two lanes of a
        shard that is cut both begin with it, or both end with it, so that it is fetched once.
        """
        numbers = np.array(list(self.members))[_permute(len(self.members), self.seed, SHARDS, epoch)].tolist()
        ends = np.cumsum([len(self.members[shard]) for shard in numbers])
        begins = np.concatenate([[0], ends[:-1]])
        shares = self._draws_per_group((epoch + 1) * self.images) - self._draws_per_group(epoch * self.images)
        lanes = []
        for lane, (low, high) in enumerate(pairwise(np.concatenate([[0], np.cumsum(shares)]).tolist())):
            met = range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(begins, high)))
            pieces = [
                Chunk(numbers[i], max(0, low - int(begins[i])), min(high, int(ends[i])) - int(begins[i]))
                for i in (met if low < high else ())
            ]
            if lane % 2 == 0:
                pieces.reverse()
            lanes.append(self._blocks(pieces))
        return lanes

    def _blocks(self, pieces: Sequence[Chunk]) -> ShardGroup:
        """Divide a lane's pieces into equally many at a time, as near to the number of open shards as that allows."""
        chunks_per_block = -(-self.open_shards // self.lanes)
        count = max(1, -(-len(pieces) // chunks_per_block))
        cuts = [len(pieces) * number // count for number in range(count + 1)]
        blocks = [list(pieces[low:high]) for low, high in pairwise(cuts)]
        sizes = [sum(piece.end - piece.begin for piece in block) for block in blocks]
        return ShardGroup(blocks, np.cumsum([0, *sizes]))

    def block(self, epoch: int, lane: int, number: int) -> Rows:
        """Return the images of a lane's block in the order in which they are drawn."""
        pieces = _plan(self, epoch)[lane].blocks[number]
        parts = []
        for shard, begin, end in pieces:
            rows = self.members[shard]
            parts.append(rows[_permute(len(rows), self.seed, INSIDE, epoch, shard)[begin:end]])
        joined = np.concatenate(parts)
        mixed: Rows = joined[_permute(len(joined), self.seed, TOGETHER, epoch, lane, number)]
        return mixed

    def rows(self, step: int) -> list[int]:
        """Return the images of a step's batch (b,), of all ranks."""
        parts: list[Rows] = []
        draw, last = step * self.batch_size, (step + 1) * self.batch_size
        while draw < last:
            epoch = draw // self.images
            end = min(last, (epoch + 1) * self.images)
            before = self._draws_per_group(epoch * self.images)
            spans = zip(
                (self._draws_per_group(draw) - before).tolist(),
                (self._draws_per_group(end) - before).tolist(),
                strict=True,
            )
            for lane, (low, high) in enumerate(spans):
                parts += self._span(epoch, lane, low, high)
            draw = end
        rows: list[int] = np.concatenate(parts).tolist()
        return rows

    def _span(self, epoch: int, lane: int, low: int, high: int) -> Iterator[Rows]:
        """Yield the images of a lane's draws from `low` up to `high` of an epoch."""
        begins = _plan(self, epoch)[lane].begins
        while low < high:
            number = int(np.searchsorted(begins, low, "right")) - 1
            end = min(high, int(begins[number + 1]))
            if self._open.get(lane, ())[:2] != (epoch, number):
                self._open[lane] = epoch, number, self.block(epoch, lane, number)
            yield self._open[lane][2][low - begins[number] : end - begins[number]]
            low = end

    def needs(self, start: int, places: Sequence[int]) -> Iterator[ShardUse]:
        """Yield the shards that the steps from `start` on read for `places` of their batches, in the order of need."""
        lanes = sorted({place * self.lanes // self.batch_size for place in places})
        widths = np.diff(self._bounds)
        for epoch in range(start * self.batch_size // self.images, -(-self.steps * self.batch_size // self.images)):
            before = self._draws_per_group(epoch * self.images)
            needs = []
            for lane in lanes:
                plan = _plan(self, epoch)[lane]
                for block, (low, high) in zip(
                    plan.blocks, pairwise((plan.begins + before[lane]).tolist()), strict=True
                ):
                    first, last = low // widths[lane], (high - 1) // widths[lane]
                    needs += [ShardUse(int(first), int(last), piece.shard) for piece in block]
            yield from sorted(need for need in needs if need.last >= start and need.first < self.steps)


def make_shard_order(
    split: LabelledImages, data: SampledData, batch_size: int, seed: int, steps: int
) -> ShardOrder | None:
    """Return the order of a training on a split; None where its images are shuffled all together.

    Raises `DpnError` where shards are to be drawn, and the split has none.
    """
    if data.shuffle == "images":
        return None
    if split.shards is None:
        raise DpnError(
            "--shuffle shards: the images of --data are in no packed or webdataset shards; pack them with 'dpn data "
            "pack', or leave --shuffle at images"
        )
    return ShardOrder(split.shards.of, batch_size, seed, data.open_shards, steps)


# As long as an epoch is under way, and its end is in the same batch as the beginning of the next one.
@lru_cache(maxsize=2)
def _plan(order: ShardOrder, epoch: int) -> list[ShardGroup]:
    return order.plan(epoch)


def _permute(count: int, *numbers: int) -> Rows:
    """Return the numbers up to `count` in an order that depends on the other `numbers` alone.

    NumPy promises that the bits of a generator stay the same in later versions, but not what `permutation` makes of
    them, and a training may go on with a later version.
    """
    return np.argsort(np.random.PCG64(fold(*numbers)).random_raw(count), kind="stable")
