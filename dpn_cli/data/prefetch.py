"""Shards behind URLs and a cache that does not hold them all: what is needed next is fetched ahead, by a process."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from multiprocessing.connection import Connection

from dpn_cli.config.paths import cache_bytes
from dpn_cli.data import remote
from dpn_cli.data.collate import batches_ahead
from dpn_cli.data.remote import RemotePath
from dpn_cli.data.shard_sampler import ShardOrder, ShardUse
from dpn_cli.data.sources.base import LabelledImages, Shard, ShardIndex, is_remote
from dpn_cli.data.workers import follow_parent, kill_processes, watch_processes
from dpn_cli.errors import DpnError
from dpn_cli.run.distributed import World

# Seconds for which a shard that is needed is kept; this is noted again long before they are over.
KEEP = 3600.0


@contextmanager
def prefetch_shards(
    split: LabelledImages, needs: Callable[[], Iterator[ShardUse]] | None, rows: int, workers: int, here: int
) -> Iterator[Callable[[int], None]]:
    """Fetch the shards that a training or another pass over images needs, in their order, while the block goes on.

    Yields a function that is to be told the last step whose batch has been read, before the first one, too. What the
    batches of this rank's `rows` need that `workers` are making stays in the cache, of which each of the `here` ranks
    of this machine has a share; what comes next is fetched while there is room. What cannot be fetched is left to the
    process that reads it, which tells why. Without `needs` or `workers` nothing is fetched ahead. Raises `WorkerError`
    inside the block when the process that fetches dies.
    """
    if not needs or not workers or not is_remote(split):
        yield lambda step: None
        return
    assert split.shards
    lists = sum(path.stat().st_size for path in remote.cache_dir().glob("*") if path.suffix != ".tar")
    window = PrefetchWindow(split.shards, needs(), batches_ahead(rows, workers), (cache_bytes() - lists) // here)
    orders, told = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_fetch, args=(split.shards.paths, orders), daemon=True)
    process.start()

    def tell(step: int) -> None:
        if wanted := window.take(step):
            told.send(wanted)

    try:
        with watch_processes([process]):
            yield tell
    finally:
        kill_processes([process])
        window.close()


class PrefetchWindow:
    """The shards that are needed now or soon, in `budget` bytes of the cache, and which of them to fetch next.

    As many batches as `reach` are being made.
    """

    def __init__(self, shards: ShardIndex, needs: Iterator[ShardUse], reach: int, budget: int) -> None:
        self.paths, self.needs, self.reach, self.budget = shards.paths, needs, reach, budget
        self.next = next(needs, None)
        self.held: list[ShardUse] = []
        self.noted = -math.inf

    def take(self, step: int) -> list[int]:
        """Return the shards to fetch when a step's batch has been read: for those being made, and ahead of need.

        What is not needed any more is released, and the rest is kept. Where there is room, as many shards are fetched
        ahead as are open.
        """
        made, taken = step + self.reach, list[int]()
        gone = {need.shard for need in self.held if need.last <= step}
        self.held = [need for need in self.held if need.last > step]
        while self.next and (self.next.first <= made or self._has_room(made)):
            self.held.append(self.next)
            taken.append(self.next.shard)
            self.next = next(self.needs, None)
        needed = {need.shard for need in self.held}
        for shard in gone - needed:
            remote.mark_unused(self._path(shard).cached)
        if taken or time.monotonic() - self.noted > KEEP / 4:
            self.noted = time.monotonic()
            for shard in needed:
                remote.mark_used(self._path(shard).cached, KEEP)
        return taken

    def close(self) -> None:
        """Release everything."""
        for need in self.held:
            remote.mark_unused(self._path(need.shard).cached)

    def _has_room(self, made: int) -> bool:
        assert self.next
        open_now = sum(need.first <= made for need in self.held)
        size = sum(shard_bytes(self._path(shard)) for shard in {need.shard for need in (*self.held, self.next)})
        return len(self.held) < 2 * open_now and size <= self.budget

    def _path(self, shard: int) -> RemotePath:
        path = self.paths[shard]
        assert isinstance(path, RemotePath)
        return path


def _fetch(paths: Sequence[Shard], orders: Connection) -> None:
    """Fetch what is ordered, a few shards at once."""
    follow_parent(0)
    with ThreadPoolExecutor(remote.CLIENTS) as pool:
        while True:
            for shard in orders.recv():
                pool.submit(_fetch_shard, paths[shard])


def _fetch_shard(path: Shard) -> None:
    assert isinstance(path, RemotePath)
    with contextlib.suppress(DpnError):
        path.fetch()
        remote.mark_used(path.cached, KEEP)


def shard_bytes(path: RemotePath) -> int:
    """Return the bytes of a shard; 0 where the store does not say, and there is no copy."""
    if path.size is None:
        with contextlib.suppress(FileNotFoundError):
            return path.cached.stat().st_size
    return path.size or 0


def check_cache(split: LabelledImages, order: ShardOrder | None, draws: int, workers: int, world: World) -> None:
    """Raise `DpnError` where a training would fetch the same shards over and over, since the cache is too small.

    `draws` is how many images the training draws, shuffled all together where there is no `order`.
    """
    if not (shards := split.shards) or not is_remote(split):
        return
    limit, used = cache_bytes(), set(shards.of.tolist())
    sizes = {shard: shard_bytes(path) for shard in used if isinstance(path := shards.paths[shard], RemotePath)}
    total, said = sum(sizes.values()), f"DPN_CACHE_GB={limit / 1e9:g}"
    if total <= limit:
        return
    if order:
        ahead = batches_ahead(world.most(order.batch_size), workers)
        needed = world.here * _peak_bytes(order, sizes, ahead, world)
        if needed > limit:
            raise DpnError(
                f"{said}: the shards that are read at a time take up to {needed / 1e9:.3g} GB; allow more for the "
                f"cache, or read fewer than {order.open_shards} with --set data.open_shards=N"
            )
        return
    # Of images drawn at random, those of shards that are not in the cache fetch a shard each.
    fetched = min(draws, len(split.labels)) * (1 - limit / total) * total / len(sizes)
    if fetched > total:
        raise DpnError(
            f"{said}: the training images take {total / 1e9:.3g} GB, and drawn in the order of --shuffle images they "
            f"would be fetched over and over: about {fetched / 1e9:.3g} GB an epoch; pass --shuffle shards, or allow "
            f"{total / 1e9:.3g} GB for the cache"
        )


def _peak_bytes(order: ShardOrder, sizes: Mapping[int, int], reach: int, world: World) -> int:
    """Return the most bytes that a rank's shards take which are needed at the same time, in an epoch."""
    changes: dict[int, int] = {}
    for need in replace(order, steps=-(-order.images // order.batch_size)).needs(0, world.rows(order.batch_size)):
        begin, end = max(0, need.first - reach), need.last
        changes[begin] = changes.get(begin, 0) + sizes[need.shard]
        changes[end] = changes.get(end, 0) - sizes[need.shard]
    return max(accumulate(changes[step] for step in sorted(changes)))
