"""Prefetching of remote shards, by a process, into a cache that is smaller than the data set."""

from __future__ import annotations

import contextlib
import multiprocessing
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

# Seconds for which a shard in use stays in the cache; its mark is renewed after half of them.
RETAIN_SECONDS = 3600.0


@contextmanager
def prefetch_shards(
    split: LabelledImages,
    shard_uses: Callable[[], Iterator[ShardUse]] | None,
    rows: int,
    workers: int,
    local_ranks: int,
) -> Iterator[Callable[[int], None]]:
    """Fetch the shards of a pass over images in reading order while the block runs.

    Yields a function that takes the last step whose batch has been read; call it before the first step, too. Shards
    of the batches (of this rank's `rows` images) that `workers` are making stay in the cache. Later ones are fetched
    while there is room in this rank's part of it, one of `local_ranks`. A failed fetch is left to the process that
    reads the shard, which reports the cause. Without `shard_uses` or `workers` nothing is fetched ahead. Raises
    `WorkerError` inside the block when the fetching process dies.
    """
    if not shard_uses or not workers or not is_remote(split):
        yield lambda step: None
        return
    assert split.shards
    index_bytes = sum(path.stat().st_size for path in remote.cache_dir().glob("*") if path.suffix != ".tar")
    window = PrefetchWindow(
        split.shards, shard_uses(), batches_ahead(rows, workers), (cache_bytes() - index_bytes) // local_ranks
    )
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_fetch, args=(split.shards.paths, receiver), daemon=True)
    process.start()

    def on_step(step: int) -> None:
        fetched, released = window.advance(step)
        if fetched or released:
            sender.send((fetched, released))

    try:
        with watch_processes([process]):
            yield on_step
    finally:
        kill_processes([process])
        window.close()


class PrefetchWindow:
    """The shards in use now or soon, in `budget` bytes of the cache; `lookahead` batches are being made."""

    def __init__(self, shards: ShardIndex, shard_uses: Iterator[ShardUse], lookahead: int, budget: int) -> None:
        self.paths, self.iter_shard_uses, self.lookahead, self.budget = shards.paths, shard_uses, lookahead, budget
        self.next_use = next(shard_uses, None)
        self.active_uses: list[ShardUse] = []

    def advance(self, step: int) -> tuple[list[int], set[int]]:
        """Return the shards to fetch once a step's batch has been read, and those that no later batch reads.

        Fetched are the shards of batches being made, and if there is room, as many ahead of them as are open. Releases
        the shards that are not read again, and retains the rest.
        """
        last_step, fetched = step + self.lookahead, list[int]()
        ended_shards = {need.shard for need in self.active_uses if need.last <= step}
        self.active_uses = [need for need in self.active_uses if need.last > step]
        while self.next_use and (self.next_use.first <= last_step or self._has_room(last_step)):
            self.active_uses.append(self.next_use)
            fetched.append(self.next_use.shard)
            self.next_use = next(self.iter_shard_uses, None)
        active = {need.shard for need in self.active_uses}
        released = ended_shards - active
        for shard in released:
            remote.mark_unused(self._path(shard).cached)
        for shard in active:  # at every step: readers fetch some themselves
            remote.mark_used(self._path(shard).cached, RETAIN_SECONDS)
        return fetched, released

    def close(self) -> None:
        """Release all shards."""
        for need in self.active_uses:
            remote.mark_unused(self._path(need.shard).cached)

    def _has_room(self, last_step: int) -> bool:
        assert self.next_use
        open_now = sum(need.first <= last_step for need in self.active_uses)
        size = sum(
            shard_bytes(self._path(shard)) for shard in {need.shard for need in (*self.active_uses, self.next_use)}
        )
        return len(self.active_uses) < 2 * open_now and size <= self.budget

    def _path(self, shard: int) -> RemotePath:
        path = self.paths[shard]
        assert isinstance(path, RemotePath)
        return path


def _fetch(paths: Sequence[Shard], receiver: Connection) -> None:
    """Fetch the shards that the parent process sends, a few in parallel, unless it has released them meanwhile."""
    follow_parent(0)
    wanted = set[int]()

    def fetch(shard: int) -> None:
        path = paths[shard]
        assert isinstance(path, RemotePath)
        if shard not in wanted:
            return
        with contextlib.suppress(DpnError):
            path.fetch(RETAIN_SECONDS)
        remote.mark_used(path.cached, RETAIN_SECONDS)
        # In this order: the other thread takes a shard from `wanted` before it releases the copy.
        if shard not in wanted:
            remote.mark_unused(path.cached)

    with ThreadPoolExecutor(remote.CLIENTS) as pool:
        while True:
            fetched, all_released = list[int](), set[int]()
            messages = [receiver.recv()]
            while receiver.poll(0.0):
                messages.append(receiver.recv())
            for shards, released in messages:
                fetched += shards
                wanted -= released
                wanted |= set(shards)
                all_released |= released
            for shard in all_released - wanted:  # one that is read again is marked, and stays so
                path = paths[shard]
                assert isinstance(path, RemotePath)
                remote.mark_unused(path.cached)
            for shard in fetched:
                pool.submit(fetch, shard)


def shard_bytes(path: RemotePath) -> int:
    """Return the size of a shard in bytes; 0 if the store does not state it and there is no copy."""
    if path.size is None:
        with contextlib.suppress(FileNotFoundError):
            return path.cached.stat().st_size
    return path.size or 0


def check_cache(split: LabelledImages, order: ShardOrder | None, draws: int, workers: int, world: World) -> None:
    """Raise `DpnError` if the cache is so small that a training would fetch the same shards over and over.

    `draws` is the number of images of all steps, shuffled over the full data set without an `order`.
    """
    if not (shards := split.shards) or not is_remote(split):
        return
    limit, used = cache_bytes(), set(shards.of.tolist())
    sizes = {shard: shard_bytes(path) for shard in used if isinstance(path := shards.paths[shard], RemotePath)}
    total, cache = sum(sizes.values()), f"DPN_CACHE_GB={limit / 1e9:g}"
    if total <= limit:
        return
    if order:
        lookahead = batches_ahead(world.most(order.batch_size), workers)
        peak = world.local_ranks * _peak_bytes(order, sizes, lookahead, world)
        if peak > limit:
            raise DpnError(
                f"{cache}: the shards that are read at a time take up to {peak / 1e9:.3g} GB; allow more for the "
                f"cache, or read fewer than {order.open_shards} with --set data.open_shards=N"
            )
        return
    # Of images drawn at random, those of shards that are not in the cache fetch a shard each.
    fetched = min(draws, len(split.labels)) * (1 - limit / total) * total / len(sizes)
    if fetched > total:
        raise DpnError(
            f"{cache}: the training images take {total / 1e9:.3g} GB, and drawn in the order of --shuffle images they "
            f"would be fetched over and over: about {fetched / 1e9:.3g} GB an epoch; pass --shuffle shards, or allow "
            f"{total / 1e9:.3g} GB for the cache"
        )


def _peak_bytes(order: ShardOrder, sizes: Mapping[int, int], lookahead: int, world: World) -> int:
    """Return the peak of the bytes of the shards that a rank uses at the same time in an epoch."""
    changes: dict[int, int] = {}
    for need in replace(order, steps=-(-order.image_count // order.batch_size)).iter_shard_uses(
        0, world.rows(order.batch_size)
    ):
        start, end = max(0, need.first - lookahead), need.last
        changes[start] = changes.get(start, 0) + sizes[need.shard]
        changes[end] = changes.get(end, 0) - sizes[need.shard]
    return max(accumulate(changes[step] for step in sorted(changes)))
