"""Decode images to uint8 tensors of one size; shuffle, crop and mirror them for training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from dpn_cli.data.collate import CollatedBatch, open_batches
from dpn_cli.data.decode import Pixels
from dpn_cli.data.prefetch import prefetch_shards
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.shard_sampler import iter_shard_uses
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.thread_loader import ThreadedDataset
from dpn_cli.errors import DataError, StoreError
from dpn_cli.run import signals
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.run.cores import cores
from dpn_cli.run.distributed import World, count_local_ranks

if TYPE_CHECKING:
    from dpn_cli.engine.fit import Batch, Batches

# For fewer images, starting worker processes costs more than it saves.
WORTH_WORKERS = 4000
# A sample image to measure a transform's output, and the columns of an empty batch.
SQUARE = np.zeros((64, 64, 3), np.uint8)
EMPTY_COLUMNS = [torch.empty(0, dtype=dtype) for dtype in (torch.uint8, torch.int64, torch.int64)]


@dataclass
class PixelSet:
    """Decoded images (n, 3, h, w) uint8 with labels (n,) int64, on one device; `rows` are theirs in a split."""

    images: Tensor
    labels: Tensor
    skipped: int = 0
    rows: tuple[int, ...] = ()

    def to(self, device: torch.device) -> PixelSet:
        """Return the set on another device."""
        return PixelSet(self.images.to(device), self.labels.to(device), self.skipped, self.rows)


ReadFailure = DataError | StoreError
Item = tuple[Tensor, int, int] | ReadFailure
Transform = Callable[[Pixels], Tensor]


class _TransformDataset(ThreadedDataset[Item]):
    def __init__(self, split: LabelledImages, transform: Transform, rows: Sequence[int]) -> None:
        self.split, self.transform, self.rows = split, transform, rows
        self.store_error: StoreError | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        if self.store_error:
            return self.store_error
        row = self.rows[index]
        try:
            return self.transform(self.split.pixels(row)), int(self.split.labels[row]), row
        except DataError as error:
            return error  # raised in a worker, it would come back wrapped in the worker's traceback
        except StoreError as error:
            self.store_error = error  # the other images of the batch would wait for the same store
            return error


def count_readers(workers: int | Literal["auto"], images: int) -> int:
    """Return the number of processes that read `images` images; ``auto`` means up to eight with a GPU."""
    if workers != "auto":
        return workers
    return min(8, len(cores())) if images >= WORTH_WORKERS and torch.cuda.is_available() else 0


@contextmanager
def stream(
    split: LabelledImages,
    transform: Transform,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    workers: int | Literal["auto"] = "auto",
    skip_bad: bool = False,
) -> Iterator[Iterator[PixelSet]]:
    """Decode and transform `rows` of a split (all without it) in order, `batch_size` at a time, each image once.

    Without processes, all threads of this one do it whenever a batch is asked for. The processes end with the block.
    Shards behind URLs are fetched ahead, unless `workers` is 0. Raises `DataError` naming the first unreadable image,
    unless `skip_bad` leaves those out and counts them, and `WorkerError` when a process dies.
    """
    rows = range(len(split.labels)) if rows is None else rows
    count = count_readers(workers, len(rows))
    shard_uses = partial(iter_shard_uses, split.shards, rows, batch_size) if split.shards else None
    # Half of the cache: a training that is evaluated has shards in it, too.
    fetchers = max(1, count) if workers == "auto" else count
    prefetch = prefetch_shards(split, shard_uses, batch_size, fetchers, 2 * count_local_ranks())
    batches = (range(first, min(first + batch_size, len(rows))) for first in range(0, len(rows), batch_size))
    image_bytes = transform(SQUARE).nbytes  # of all images: a batch is one tensor
    dataset = _TransformDataset(split, transform, rows)
    with prefetch as on_step, open_batches(dataset, batches, count, image_bytes=image_bytes) as collated:
        yield _notify_batches(_drop_failures(collated, skip_bad), on_step)


def _drop_failures(collated: Iterator[CollatedBatch], skip_bad: bool) -> Iterator[PixelSet]:
    for columns, errors in collated:
        if fatal := [error for error in errors if not skip_bad or isinstance(error, StoreError)]:
            raise fatal[0]
        images, labels, rows = columns or EMPTY_COLUMNS
        yield PixelSet(images, labels, len(errors), tuple(rows.tolist()))


def _notify_batches(batches: Iterator[PixelSet], on_step: Callable[[int], None]) -> Iterator[PixelSet]:
    """Report each batch that has been read to `prefetch_shards`."""
    on_step(-1)
    for step, batch in enumerate(batches):
        on_step(step)
        yield batch


def load(
    split: LabelledImages,
    size: tuple[int, int],
    *,
    workers: int | Literal["auto"] = "auto",
    skip_bad: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> PixelSet:
    """Decode and resize a whole split into memory: 3 * h * w bytes an image.

    `on_progress` receives the number of processed images.
    """
    parts = []
    with stream(split, partial(resize, size=size), 64, workers=workers, skip_bad=skip_bad) as decoded:
        for part in decoded:
            signals.check_here()
            on_progress(len(part.images) + part.skipped)
            parts.append(part)
    return PixelSet(
        torch.cat([part.images for part in parts if len(part.images)]),
        torch.cat([part.labels for part in parts]),
        sum(part.skipped for part in parts),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def crop_and_flip(
    images: Tensor,
    rows: Tensor,
    size: tuple[int, int],
    *,
    crop: bool,
    flip: bool,
    generator: torch.Generator,
    own_rows: slice,
) -> Tensor:
    """Gather `rows` (b,) of images (n, 3, H, W), crop them to `size` at random, mirror every second one at random.

    Numbers are drawn for the whole global batch, and its part `mine` is returned: an image's augmentation does not
    depend on the number of ranks. Without `crop`, the images must have that size.
    """
    count = len(rows)
    if crop:
        margins = [full - part for full, part in zip(images.shape[-2:], size, strict=True)]
        top, left = (torch.randint(room + 1, (count,), generator=generator).tolist() for room in margins)
        chosen = rows.tolist()
        batch = torch.stack(
            [
                images[chosen[i], :, top[i] : top[i] + size[0], left[i] : left[i] + size[1]]
                for i in range(*own_rows.indices(count))
            ]
        )
    else:
        batch = images[to_device(rows[own_rows], images.device)]
    if flip:
        mirrored = to_device((torch.rand(count, generator=generator) < 0.5)[own_rows], images.device)
        batch = torch.where(mirrored[:, None, None, None], batch.flip(-1), batch)
    return batch


def shuffled_batches(
    pixels: PixelSet, size: tuple[int, int], batch_size: int, seed: int, *, crop: bool, flip: bool, world: World
) -> Batches:
    """Return the engine's ``batches``: ``image`` (b, 3, *size) uint8 and ``label`` (b,), this rank's rows."""
    rows_here = world.rows(batch_size)
    own_rows = slice(rows_here.start, rows_here.stop)

    def batches(start: int) -> Generator[Batch, None, None]:
        step = start
        while True:
            rows = rows_of_step(len(pixels.images), batch_size, seed, step)
            generator = torch.Generator().manual_seed((seed + 1) * 2_000_003 + step)
            images = crop_and_flip(
                pixels.images, rows, size, crop=crop, flip=flip, generator=generator, own_rows=own_rows
            )
            yield {"image": images, "label": pixels.labels[to_device(rows[own_rows], pixels.labels.device)]}
            step += 1

    return batches
