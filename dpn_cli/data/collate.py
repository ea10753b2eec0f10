"""Batches that worker processes make in parts of few images, put together in order while the last one is in use.

Whole batches would have to lie in shared memory, two for every worker, and one worker would make all of the first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpn_cli.data.workers import PATIENCE, kill_processes, open_loader
from dpn_cli.errors import DpnError
from dpn_cli.run.cores import shared_memory
from dpn_cli.run.distributed import count_local_ranks

CPU = torch.device("cpu")
# Most images of a part, and parts that each worker has ready or in the making.
CHUNK_IMAGES, PREFETCH_CHUNKS = 64, 2
# Most shared memory of all parts of all ranks of a machine, in bytes, and its share of what is free.
MAX_SHARED_BYTES, SHARED_FRACTION = 2**29, 0.5

Value = Tensor | float | tuple[int, ...]
Example = tuple[Value, ...] | DpnError  # what a data set makes of an item
Column = Tensor | list[Any]


class BatchChunk(NamedTuple):
    """Collated items: tensors (n, ...) or lists of n numbers, and the errors of items without examples."""

    columns: list[Column]
    errors: list[DpnError]


class CollatedBatch(NamedTuple):
    """A batch: tensors (b, ...), none where no item became an example, and the errors of those that did not."""

    columns: list[Tensor]
    errors: list[DpnError]


def chunks_in_memory(workers: int) -> int:
    """Return how many parts of one rank are in shared memory at once: two of them are being put into a batch."""
    return PREFETCH_CHUNKS * workers + 2


def batches_ahead(rows: int, workers: int) -> int:
    """Return how many batches of so many rows may be in the making, or ready, next to the one in use."""
    return 1 + (min(PREFETCH_CHUNKS * workers, -(-PREFETCH_CHUNKS * workers * CHUNK_IMAGES // rows)) if workers else 0)


def chunk_size(image_bytes: int, workers: int, ranks: int) -> int:
    """Return how many images a worker hands over at once.

    64, or fewer: all that `ranks` of this machine with so many workers each have in shared memory is at most 512 MiB
    and half of what is free, as long as one image at a time is few enough.
    """
    if not workers:
        return CHUNK_IMAGES
    free = shared_memory()
    most = MAX_SHARED_BYTES if free is None else min(MAX_SHARED_BYTES, int(free * SHARED_FRACTION))
    return max(1, min(CHUNK_IMAGES, most // (ranks * chunks_in_memory(workers) * image_bytes)))


@contextmanager
def open_batches(
    dataset: Dataset[Example],
    batches: Iterable[Sequence[Any]],
    workers: int,
    *,
    image_bytes: int,
    device: torch.device = CPU,
) -> Iterator[Iterator[CollatedBatch]]:
    """Iterate over batches of a data set's items in order; what becomes of them does not depend on the workers.

    With workers, the next batch is made while one is in use. The processes end with the block. Raises `WorkerError`
    inside it as soon as one of them dies.

    Args:
        dataset: makes an example of an item, or returns an error, which would come back from a worker wrapped.
        batches: the items of every batch.
        workers: the number of processes; 0 makes batches when they are asked for.
        image_bytes: the size of an example.
        device: where batches go; those for a GPU are in pinned memory.
    """
    lengths, size = deque[int](), chunk_size(image_bytes, workers, count_local_ranks())
    options = {"batch_sampler": _split_batches(batches, size, lengths), "collate_fn": _collate}
    if workers:
        options["prefetch_factor"] = PREFETCH_CHUNKS
    with open_loader(dataset, workers, **options) as items:
        collated = _concat_chunks(items, size, lengths, pin=device.type == "cuda")
        if not workers:
            yield collated
            return
        with closing(_Prefetcher(items, collated, device)) as prefetcher:
            yield iter(prefetcher)


def _split_batches(batches: Iterable[Sequence[Any]], size: int, lengths: deque[int]) -> Iterator[list[Any]]:
    for batch in batches:
        lengths.append(len(batch))
        for start in range(0, len(batch), size):
            yield list(batch[start : start + size])


def _collate(examples: Sequence[Example]) -> BatchChunk:
    decoded = [example for example in examples if not isinstance(example, DpnError)]
    errors = [example for example in examples if isinstance(example, DpnError)]
    # Numbers stay lists: every tensor that a worker hands over takes an open file.
    columns = [torch.stack(v) if isinstance(v[0], Tensor) else list(v) for v in zip(*decoded, strict=True)]
    return BatchChunk(columns, errors)


def _concat_chunks(
    parts: Iterator[BatchChunk], size: int, lengths: deque[int], *, pin: bool
) -> Iterator[CollatedBatch]:
    """Copy parts into whole batches."""
    for first in parts:
        rows = lengths.popleft()
        yield _concat_batch(chain([first], islice(parts, -(-rows // size) - 1)), rows, pin=pin)


def _concat_batch(parts: Iterator[BatchChunk], rows: int, *, pin: bool) -> CollatedBatch:
    columns, errors, count = list[Column](), list[DpnError](), 0
    for part in parts:
        errors += part.errors
        if not part.columns:
            continue
        columns = columns or [
            torch.empty((rows, *column.shape[1:]), dtype=column.dtype, pin_memory=pin)
            if isinstance(column, Tensor)
            else []
            for column in part.columns
        ]
        start, count = count, count + len(part.columns[0])
        for column, more in zip(columns, part.columns, strict=True):
            if isinstance(column, list):
                column += more
            else:  # NumPy copies in this thread; torch would start others
                np.copyto(column[start:count].numpy(), np.asarray(more))
    return CollatedBatch(
        [c[:count] if isinstance(c, Tensor) else torch.tensor(c, pin_memory=pin) for c in columns], errors
    )


class _Prefetcher:
    """Batches that a thread makes one ahead of what is asked for."""

    def __init__(self, items: Any, collated: Iterator[CollatedBatch], device: torch.device) -> None:
        self.items, self.made, self.device = items, collated, device
        self.ready: SimpleQueue[CollatedBatch | BaseException | None] = SimpleQueue()
        self.room, self.ended = threading.Semaphore(), threading.Event()
        self.thread = threading.Thread(target=self._make, daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[CollatedBatch]:
        while (batch := self.ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            self.room.release()
            yield batch

    def _make(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own, and pinning would wake up the first GPU
        try:
            while self.room.acquire() and not self.ended.is_set():
                self.ready.put(next(self.made, None))
        except BaseException as error:
            self.ready.put(error)

    def close(self) -> None:
        """End the thread, though it waits for a worker that does not come back."""
        self.ended.set()
        self.room.release()
        parts = self.items._worker_result_queue
        parts.put((None, None))  # which is none, so that waiting for one ends in an error
        parts.cancel_join_thread()  # a dead worker may hold the queue's lock
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            kill_processes(self.items._workers)  # which the loader notices
            self.thread.join()
