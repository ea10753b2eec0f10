"""Cache of the teacher's outputs for a fixed number of views of every image, computed once and read from the disk.

A cache is the folder ``teacher`` of a run, belongs to that run alone, and is deleted at its end. ``cache.json`` says
what it is of. Entry ``view * images + row`` holds the tensors of `NetworkOutputs` for that view of that image one
after the
other in float16; a shard ``targets-00000.npy`` (entries, values) has as many of them as its size allows, and next to it
lies its digest.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli.data.loader import count_workers, iter_crops
from dpn_cli.data.pixels import to_device
from dpn_cli.data.sampler import StepSampler, rank_positions
from dpn_cli.data.shard_sampler import ShardOrder
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.engine.fit import Batch, Batches
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.run import distributed, signals
from dpn_cli.run.arrays import facts_of, save_array
from dpn_cli.run.console import LINE_EVERY, Console
from dpn_cli.run.distributed import World
from dpn_cli.run.files import read_object, replace_json
from dpn_cli.run.precision import precision_of
from dpn_cli.weights.backbone import Backbone
from tasks.classify.distill.config import DistillConfig, Losses
from tasks.classify.distill.data import augmentation_of
from tasks.classify.distill.losses import NetworkOutputs

FOLDER = "teacher"
# Most bytes of a shard, which a killed run computes again, and most memory maps that are open together.
SHARD, OPEN = 2**28, 256
# Entries of an older cache that a rank recomputes to check them, and the cosine that they must reach.
SPOT_CHECKS, SPOT_COSINE = 8, 0.999
# Prefix of the targets' names in a batch.
PREFIX = "teacher."

Shapes = dict[str, tuple[int, ...]]


def target_shapes(teacher: ViTConfig, losses: Losses) -> Shapes:
    """Return the shapes of one image's targets, by the names of `NetworkOutputs`."""
    width, patches = teacher.size.width, teacher.grid[0] * teacher.grid[1]
    shapes: Shapes = {"tokens": (patches + teacher.prefix_tokens, width)} if losses.tokens else {}
    if losses.representation:
        shapes["representation"] = (width,)
    if losses.logits:
        shapes["logits"] = (teacher.num_classes,)
    blocks = [teacher_layer for _, teacher_layer in losses.layers]

    def tokens(block: int) -> int:
        return patches + (teacher.prefix_tokens if block >= teacher.class_token_at else 0)

    if losses.tokens:
        shapes |= {f"tokens.{pair}": (tokens(block), width) for pair, block in enumerate(blocks)}
    if losses.attention:
        for pair, block in enumerate(blocks or [teacher.size.depth - 1]):
            shapes[f"attention.{pair}"] = (teacher.size.heads, tokens(block), tokens(block))
    return shapes


def count_values(shapes: Shapes) -> int:
    """Return the number of values of an entry."""
    return sum(math.prod(shape) for shape in shapes.values())


def check_views(config: DistillConfig, images: int) -> None:
    """Raise `DpnError` where the teacher would see more views than the training."""
    views, draws = config.cache_teacher or 0, config.schedule.steps * config.batch_size
    if views * images > draws:
        raise DpnError(
            f"--cache-teacher {views}: the teacher would see {views * images} views of {images} images, and the "
            f"training sees {draws}; "
            + (f"use --cache-teacher {draws // images} at most" if draws >= images else "leave it out")
        )


def cached_targets(batch: Batch) -> NetworkOutputs:
    """Return the targets that `TargetCache.joined` put into a batch."""
    return {name.removeprefix(PREFIX): value for name, value in batch.items() if name.startswith(PREFIX)}


class TargetCache:
    """The targets of all views of all training images, in shards; see the module.

    Args:
        run: the run's folder.
        config: the run's config, with a number of views.
        network: the teacher.
        teacher: returns the teacher's outputs for a batch.
        images: the training images.
        world: this rank.
        console: receives messages about long and repeated work.
    """

    def __init__(
        self,
        run: Path,
        config: DistillConfig,
        network: Backbone,
        teacher: Callable[[Batch], NetworkOutputs],
        images: LabelledImages,
        world: World,
        console: Console,
    ) -> None:
        assert config.cache_teacher
        self.folder, self.config, self.teacher, self.images = run / FOLDER, config, teacher, images
        self.world, self.console, self.filled = world, console, False
        self.views, self.shapes = config.cache_teacher, target_shapes(network.config, config.losses)
        self.augmentation = augmentation_of(config, network.config.image_size)
        self.entries, self.values = self.views * len(images.labels), count_values(self.shapes)
        self.per_shard = max(1, SHARD // (2 * self.values))
        self.shards = [
            range(first, min(first + self.per_shard, self.entries)) for first in range(0, self.entries, self.per_shard)
        ]
        self.facts = {
            "teacher": network.report.digest,
            "data": fingerprint(images),
            "decoder": images.reading.versions(),
            "config": config.model_dump(mode="json", include={"data", "losses", "seed", "cache_teacher"}),
            "precision": f"{precision_of(config.runtime, world.device, network)} on {world.device.type}",
            "targets": {name: list(shape) for name, shape in self.shapes.items()},
        }
        self._open = lru_cache(OPEN)(partial(np.load, mmap_mode="r"))

    def check_space(self) -> None:
        """Log the size of the cache. Raises `DpnError` if the disk has too little space for it."""
        folder = next(parent for parent in (self.folder, *self.folder.absolute().parents) if parent.is_dir())
        missing = sum(len(entries) for number, entries in enumerate(self.shards) if not self._file(number).is_file())
        total, bytes_needed = (2 * self.values * count for count in (self.entries, missing))
        free = shutil.disk_usage(folder).free
        contents = f"what the teacher computes for {self.views} views of {len(self.images.labels)} images"
        if bytes_needed > free:
            raise DpnError(
                f"--cache-teacher {self.views}: {contents} takes {total / 1e9:.3g} GB, {bytes_needed / 1e9:.3g} of "
                f"them still to be written, and {folder} has {free / 1e9:.3g} GB free; use fewer views, or leave the "
                "option out"
            )
        if missing:
            self.console.info(f"{contents} takes {total / 1e9:.3g} GB in {self.folder} until the run has finished")

    def fill(self) -> None:
        """Compute the missing shards; ranks share the work, and finished shards survive a stop.

        A cache of another training and damaged shards are logged and recomputed. Raises `DpnError` if the disk
        is too small, `DataError` for an unreadable image unless the config skips them, for images that have changed
        and for targets that float16 does not hold, and `StoppedError` when a signal asks to stop.
        """
        if self.filled:
            return
        problem: DpnError | None = None
        if self.world.leads:
            try:
                self._prepare_folder()
                self.check_space()
            except DpnError as error:
                problem = error
        if problem := distributed.from_leader(problem):
            raise problem
        rank_shards = range(self.world.rank, len(self.shards), self.world.size)
        complete_shards = [number for number in rank_shards if self._is_whole(number)]
        self._check_some(complete_shards)
        self._compute(sorted(set(rank_shards) - set(complete_shards)))
        distributed.barrier()
        self.filled = True

    def with_targets(self, batches: Batches, order: ShardOrder | None = None) -> Batches:
        """Return `batches`, which hold views of this cache, with the targets of each row; see `cached_targets`.

        `order` is that of the batches.
        """
        config, world, images = self.config, self.world, len(self.images.labels)
        positions, sizes = (
            rank_positions(config.batch_size, world),
            [math.prod(shape) for shape in self.shapes.values()],
        )

        def with_targets(start: int) -> Generator[Batch, None, None]:
            steps = StepSampler(images, config.batch_size, config.seed, start, positions, views=self.views, order=order)
            with closing(batches(start)) as stream:
                for items, batch in zip(steps, stream, strict=False):
                    saved = to_device(self.read([view * images + row for view, row, _ in items]), world.device)
                    parts = zip(self.shapes.items(), torch.split(saved, sizes, 1), strict=True)
                    yield {**batch, **{PREFIX + name: part.reshape(len(part), *shape) for (name, shape), part in parts}}

        return with_targets

    def read(self, entries: Sequence[int]) -> Tensor:
        """Return entries (n, values) in float16."""
        values = np.empty((len(entries), self.values), np.float16)
        for index, entry in enumerate(entries):
            number, position = divmod(entry, self.per_shard)
            values[index] = self._open(self._file(number))[position]
        return torch.from_numpy(values)

    def delete(self) -> None:
        """Delete the files."""
        self._open.cache_clear()
        if self.world.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"targets-{number:05d}.npy"

    def _prepare_folder(self) -> None:
        """Make the folder; clear a cache of another training."""
        path = self.folder / "cache.json"
        if read_object(path) != self.facts:
            if any(self.folder.glob("*.npy")):
                self.console.warn(f"{self.folder}: damaged, or not of this training; all of it is computed again")
            shutil.rmtree(self.folder, ignore_errors=True)
            replace_json(path, self.facts)

    def _is_whole(self, number: int) -> bool:
        signals.check_here()
        try:
            return facts_of(self._file(number)) is not None
        except DataError as error:
            self.console.warn(f"{error}; it is computed again")
            return False

    def _check_some(self, complete_shards: Sequence[int]) -> None:
        """Recompute a few entries of older shards. Raises `DataError` if they differ."""
        if not complete_shards:
            return
        shards = [
            self.shards[complete_shards[index * len(complete_shards) // SPOT_CHECKS]] for index in range(SPOT_CHECKS)
        ]
        entries = [shard[index * len(shard) // SPOT_CHECKS] for index, shard in enumerate(shards)]
        with closing(self._teacher_outputs([entries], workers=0)) as outputs:
            similarity = F.cosine_similarity(next(outputs).float(), self.read(entries).float())
        if not similarity.min() > SPOT_COSINE:
            row = entries[int(similarity.argmin())] % len(self.images.labels)
            raise DataError(
                f"{self.images.locate(row)}: the teacher computes something else for it than {self.folder} holds, so "
                "the image has changed since this run started; start another with -o"
            )

    def _compute(self, numbers: Sequence[int]) -> None:
        """Compute shards in separate batches, so that their bytes do not depend on the other shards."""
        step, last_message_time, rows = self.config.eval_batch_size, time.monotonic(), list[Tensor]()
        parts = [
            (number, self.shards[number][start : start + step])
            for number in numbers
            for start in range(0, len(self.shards[number]), step)
        ]
        with closing(self._teacher_outputs(part for _, part in parts)) as outputs:
            for count, ((number, part), values) in enumerate(zip(parts, outputs, strict=True), 1):
                signals.check_here()
                rows.append(values)
                if part[-1] == self.shards[number][-1]:
                    save_array(self._file(number), torch.cat(rows).numpy())
                    rows = []
                if time.monotonic() - last_message_time >= LINE_EVERY:
                    last_message_time = time.monotonic()
                    self.console.info(f"the teacher has seen {count / len(parts):.1%} of the views")

    def _teacher_outputs(
        self, batches: Iterable[Sequence[int]], workers: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Yield the targets of batches of entries, (b, values) in float16. Raises as `fill` does."""
        config, world, images = self.config, self.world, len(self.images.labels)
        workers = count_workers(config.runtime.workers, world.device, world.local_ranks) if workers is None else workers
        items = ([(entry // images, entry % images, entry % images) for entry in part] for part in batches)
        settings = config.batch_size, config.seed, items, world.device, workers, config.data.skip_bad_images
        with closing(iter_crops(self.images, self.augmentation, *settings)) as crops:
            for batch, _ in crops:
                outputs = self.teacher({"image": batch})
                values = torch.cat([outputs[name].flatten(1).half() for name in self.shapes], 1)
                if not values.isfinite().all():
                    raise DataError(
                        "the teacher computes numbers that float16 does not hold; leave --cache-teacher out"
                    )
                yield values.cpu()
