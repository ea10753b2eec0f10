"""The order of images in shards: every image once an epoch, few shards at a time, whatever the number of ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dpn_cli.data.shard_sampler import LOOKAHEAD_BATCHES, ShardOrder, iter_shard_uses
from dpn_cli.data.sources.base import ShardIndex
from dpn_cli.run.distributed import World

# Images of each shard, images of a batch, open shards.
CASES = [
    ([12] * 5, 4, 2),
    ([12] * 5, 10, 16),  # more than there are
    ([7, 3, 11, 1, 5, 9], 8, 3),  # lanes of unequal width
    ([100] * 9, 32, 4),
    ([100] * 9, 2, 6),  # three in a lane
    ([3], 5, 4),  # an epoch is less than a batch
    ([5] * 40, 6, 6),
]


def order_of(sizes: list[int], batch: int, opened: int, seed: int = 0, steps: int = 10**6) -> ShardOrder:
    """Shards 0, 3, 6, … of these sizes, their images spread over the data set."""
    shards = np.repeat(3 * np.arange(len(sizes)), sizes)
    return ShardOrder(np.random.default_rng(9).permutation(shards), batch, seed, opened, steps)


def drawn(order: ShardOrder, steps: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The images of some steps (steps * b,)."""
    return np.array([row for step in range(start, start + steps) for row in order.rows(step)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_epoch_has_every_image_once_even_inside_a_batch(case: tuple[list[int], int, int]) -> None:
    order = order_of(*case)
    epochs = drawn(order, -(-4 * order.image_count // order.batch_size))[: 4 * order.image_count].reshape(
        4, order.image_count
    )
    assert (np.sort(epochs) == np.arange(order.image_count)).all()
    if order.image_count > 10:
        assert len({epoch.tobytes() for epoch in epochs}) == 4
        assert not np.array_equal(epochs[0], drawn(order_of(*case, seed=1), 4 * order.image_count)[: order.image_count])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_need_nothing_of_the_steps_before(case: tuple[list[int], int, int]) -> None:
    full = [order_of(*case).rows(step) for step in range(60)]
    for step in (59, 7, 31, 8, 0):
        assert order_of(*case).rows(step) == full[step]
    second = order_of(*case)
    assert [second.rows(step) for step in reversed(range(60))] == full[::-1]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_read_only_the_shards_that_they_need(case: tuple[list[int], int, int], ranks: int) -> None:
    start, stop = 5, 40
    order = order_of(*case, steps=stop)
    for rank in range(min(ranks, order.batch_size)):
        places = range(order.batch_size * rank // ranks, order.batch_size * (rank + 1) // ranks)
        needs = list(order.iter_shard_uses(start, places))
        assert [need.first for need in needs] == sorted(need.first for need in needs)
        assert all(need.first < stop and need.last >= start for need in needs)
        for step in range(start, stop):
            read = set(order.shards[[order.rows(step)[place] for place in places]].tolist())
            needed = {need.shard for need in needs if need.first <= step <= need.last}
            assert read <= needed
            lanes = {place * order.lane_count // order.batch_size for place in places}
            together = -(-order.open_shards // order.lane_count)
            assert len(needed) <= 2 * together * len(lanes)  # a block that ends and one that begins
        first = [need for need in needs if need.first <= start]
        assert len({need.shard for need in first}) <= 2 * order.open_shards


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_read_shards_of_their_own(ranks: int) -> None:
    order = order_of([100] * 64, 32, 8, steps=200)  # an epoch
    worlds = [World(rank, ranks, None) for rank in range(ranks)]  # type: ignore[arg-type]
    mine = [{need.shard for need in order.iter_shard_uses(0, world.rows(32))} for world in worlds]
    assert sum(map(len, mine)) == 64  # equal shards: no shard is cut
    assert {len(one) for one in mine} == {64 // ranks}
    # Unequal ones are cut between neighbours, and each is read by both at the same end of the epoch.
    sizes = np.random.default_rng(0).integers(50, 150, 64).tolist()
    uneven = order_of(sizes, 32, 8, steps=sum(sizes) // 32)
    mine = [{need.shard for need in uneven.iter_shard_uses(0, world.rows(32))} for world in worlds]
    for one, other in pairwise(mine):
        assert len(one & other) <= 1
    assert sum(map(len, mine)) <= 64 + ranks - 1
    counts = [sum(sizes[shard // 3] for shard in one) for one in mine]
    assert max(counts) - min(counts) < 4 * 150


def test_a_shard_is_read_in_one_stretch_of_an_epoch() -> None:
    sizes = np.random.default_rng(1).integers(50, 150, 60).tolist()
    order = order_of(sizes, 32, 8)
    steps = sum(sizes) // 32
    read: dict[int, list[int]] = {}
    for step in range(steps):
        for shard in order.shards[order.rows(step)].tolist():
            read.setdefault(shard, []).append(step)
    # A lane draws 4 images a step: a shard is gone after a quarter as many steps as it has images, but for those that
    # two lanes share at the beginning or at the end.
    longest = max(sizes) // 4 + 2
    assert all(observed[-1] - observed[0] <= longest for observed in read.values())
    open_now = [sum(observed[0] <= step <= observed[-1] for observed in read.values()) for step in range(steps)]
    assert max(open_now) <= 2 * 8
    assert np.mean(open_now) < 8 + 2


def test_images_of_open_shards_are_mixed() -> None:
    order = ShardOrder(np.repeat(np.arange(32), 1000), 64, 0, 16)
    rows = drawn(order, 200)
    for batch in rows.reshape(200, 64):
        assert np.bincount(order.shards[batch], minlength=32).max() == 4  # each open shard has a sixteenth of a batch
    # Within a lane, the distance of two images that follow each other is that of two random ones of a shard: a third.
    lane = rows.reshape(200, 16, 4)[:, 0, :].ravel()
    same = order.shards[lane[1:]] == order.shards[lane[:-1]]
    assert np.abs(np.diff(lane))[same].mean() == pytest.approx(1000 / 3, rel=0.1)
    # Shards that are read together are drawn from at random.
    mixed = ShardOrder(np.repeat(np.arange(32), 1000), 1, 0, 4)
    shards = mixed.shards[drawn(mixed, 4000)]
    assert np.unique(shards).size == 4
    assert (np.diff(shards) == 0).mean() == pytest.approx(1 / 4, abs=0.03)


def test_two_lanes_that_share_a_shard_read_it_at_the_same_end() -> None:
    order = ShardOrder(np.repeat(np.arange(7), 10), 4, 0, 4)  # 17.5 images a lane
    lanes = [[piece for block in lane.blocks for piece in block] for lane in order.plan(0)]
    assert lanes[0][0].shard == lanes[1][0].shard
    assert lanes[1][-1].shard == lanes[2][-1].shard
    assert lanes[2][0].shard == lanes[3][0].shard
    assert [sum(piece.end - piece.start for piece in lane) for lane in lanes] == [18, 18, 17, 17]


def test_the_order_matches_earlier_versions() -> None:
    """A training that goes on draws the rest of the epoch that it has begun."""
    order = ShardOrder(np.repeat(np.arange(4), 5), 6, 7, 3)
    assert order.rows(0) == [18, 16, 15, 19, 10, 14]
    assert order.rows(3) == [2, 4, 11, 12, 15, 19]
    assert order.rows(50) == [10, 11, 14, 13, 4, 2]


@pytest.mark.parametrize("mixed", [False, True])
def test_batches_of_images_in_any_order_need_the_shards_that_they_read(mixed: bool) -> None:
    of = np.repeat([4, 0, 2], [900, 30, 570])
    rows = np.random.default_rng(1).permutation(1500).tolist() if mixed else range(1, 1500, 2)
    needs = list(iter_shard_uses(ShardIndex([Path(str(number)) for number in range(5)], of), rows, 4))
    read = {(place // 4, int(of[row])) for place, row in enumerate(rows)}
    assert read <= {(step, need.shard) for need in needs for step in range(need.first, need.last + 1)}
    assert {(need.first, need.shard) for need in needs} | {(need.last, need.shard) for need in needs} <= read
    assert needs == sorted(needs)
    assert all(need.first // LOOKAHEAD_BATCHES == need.last // LOOKAHEAD_BATCHES for need in needs)
    if not mixed:
        assert [(need.first, need.last, need.shard) for need in needs][:3] == [(0, 63, 4), (64, 112, 4), (112, 116, 0)]
