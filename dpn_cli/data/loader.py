"""Training batches from encoded images: worker processes decode, crop, resize and mirror; the device does the rest.

An image's augmentation is a function of (seed, step, position in the batch), or with a fixed number of views of (seed,
view, image). It never depends on the worker, the rank or earlier steps, so a resumed training continues exactly inside
an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from dpn_cli.data.augment import Augmentation, add_noise, make_transform, seed_globally
from dpn_cli.data.collate import open_batches
from dpn_cli.data.crops import AREA, eval_crop, train_crop
from dpn_cli.data.decode import decode, decoder_of
from dpn_cli.data.prefetch import prefetch_shards
from dpn_cli.data.randaugment import rand_augment
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import Item, StepSampler, rank_positions
from dpn_cli.data.shard_sampler import ShardOrder
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.engine.fit import Batch, Batches
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError, DpnError, StoreError
from dpn_cli.run.cores import cores
from dpn_cli.run.distributed import World

# An unreadable image is replaced by the next readable one among this many.
REPLACEMENTS = 10
# Independent streams of random numbers: crops, flips, mixing.
CROP, FLIP, MIX, RANDAUGMENT, POLICY, NOISE = 1, 2, 3, 4, 7, 8

Loaded = tuple[Tensor, int, int] | DpnError


class _CropDataset(Dataset[Loaded]):
    def __init__(
        self, split: LabelledImages, augmentation: Augmentation, batch_size: int, seed: int, skip_bad: bool
    ) -> None:
        self.split, self.augmentation, self.batch_size = split, augmentation, batch_size
        self.seed, self.skip_bad = seed, skip_bad
        self.store_error: StoreError | None = None

    def __getitem__(self, item: Item) -> Loaded:
        if self.store_error:
            return self.store_error
        first, second, row = item
        unreadable: DataError | None = None
        for skipped in range(REPLACEMENTS + 1 if self.skip_bad else 1):
            index = (row + skipped) % len(self.split.labels)
            generator = torch.Generator().manual_seed(fold(self.seed, CROP, first, second))
            try:
                image, location = self.split.open(index), self.split.locate(index)
                example = self._make_example(image, location, generator, first, second)
                return example, int(self.split.labels[index]), skipped
            except DataError as error:
                unreadable = error  # raised in a worker, it would come back wrapped in the worker's traceback
            except StoreError as error:
                self.store_error = error  # the other images of the batch would wait for the same store
                return error
        assert unreadable is not None
        return unreadable

    def _make_example(
        self, image: Image.Image, location: str, generator: torch.Generator, first: int, second: int
    ) -> Tensor:
        example, augmentation = self._augment_image(image, location, generator, first, second), self.augmentation
        if not augmentation.noise:
            return example
        generator = torch.Generator().manual_seed(fold(self.seed, NOISE, first, second))
        noisy = add_noise(example, augmentation.noise, generator)
        return torch.cat([example, noisy]) if augmentation.noise_pairs else noisy

    def _augment_image(
        self, image: Image.Image, location: str, generator: torch.Generator, first: int, second: int
    ) -> Tensor:
        augmentation = self.augmentation
        if augmentation.random_crop:
            pixels = decode(image, location, decoder_of(augmentation.decode))
            return self._draw_crop(Image.fromarray(pixels), first, second)
        crop = self._cut_crop(image, location, generator)
        if augmentation.layers:
            return self._augment(crop, first, second)
        if augmentation.one_by_one:
            return self._draw_crop(Image.fromarray(crop.permute(1, 2, 0).numpy()), first, second)
        mirrored = augmentation.flip and draw_flips(self.seed, first, self.batch_size)[second]
        return crop.flip(-1) if mirrored else crop

    def _draw_crop(self, image: Image.Image, first: int, second: int) -> Tensor:
        with seed_globally(fold(self.seed, POLICY, first, second)):
            return make_transform(self.augmentation)(image)

    def _cut_crop(self, image: Image.Image, location: str, generator: torch.Generator) -> Tensor:
        augmentation = self.augmentation
        if augmentation.crop == "whole":
            return resize(decode(image, location, decoder_of(augmentation.decode)), augmentation.size)
        if augmentation.crop == "centre":
            assert augmentation.resize_side is not None
            pixels = decode(image, location, decoder_of(augmentation.decode))
            return eval_crop(pixels, augmentation.resize_side, augmentation.size)
        least_area = augmentation.crop_area or AREA[0]
        return train_crop(image, location, augmentation.size, generator, augmentation.decode, least_area)

    def _augment(self, crop: Tensor, first: int, second: int) -> Tensor:
        """Mirror every second crop, then augment it: shearing turns about a corner, so the order matters."""
        generator = torch.Generator().manual_seed(fold(self.seed, RANDAUGMENT, first, second))
        mirrored = bool(torch.rand((), generator=generator) < 0.5)
        if mirrored and self.augmentation.flip:
            crop = crop.flip(-1)
        return rand_augment(crop, self.augmentation.layers, self.augmentation.magnitude, generator)


@lru_cache(maxsize=8)
def draw_flips(seed: int, step: int, batch_size: int) -> list[bool]:
    """Return a flag for every position in a step's batch: True if its image is mirrored.

    The workers mirror: in the training's process, every operation of torch would wake up threads, which take cores from
    the workers.
    """
    generator = torch.Generator().manual_seed(fold(seed, FLIP, step))
    mirrored: list[bool] = (torch.rand(batch_size, generator=generator) < 0.5).tolist()
    return mirrored


def count_workers(workers: int | Literal["auto"], device: torch.device, local_ranks: int = 1) -> int:
    """Return the number of decoding processes per rank: up to 16 with a GPU, one on a CPU of several cores.

    `local_ranks` ranks share the machine.
    """
    if workers != "auto":
        return workers
    count = len(cores())
    return max(1, min(16, count // local_ranks - 1)) if device.type == "cuda" else int(count > 1)


def iter_crops(
    split: LabelledImages,
    augmentation: Augmentation,
    batch_size: int,
    seed: int,
    batches: Iterable[list[Item]],
    device: torch.device,
    workers: int,
    skip_bad: bool,
    on_skip: Callable[[int], None] = lambda count: None,
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield images (b, 3, h, w) and labels (b,) of batches of items, on the device. Raises as `crop_batches` does.

    `batch_size` is that of all ranks.
    """
    with open_batches(
        _CropDataset(split, augmentation, batch_size, seed, skip_bad),
        batches,
        workers,
        image_bytes=augmentation.image_bytes,
        device=device,
    ) as collated:
        for columns, errors in collated:
            if errors:
                raise errors[0]
            images, labels, skipped = columns
            if count := int(skipped.sum()):
                on_skip(count)
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def crop_batches(
    split: LabelledImages,
    augmentation: Augmentation,
    batch_size: int,
    seed: int,
    world: World,
    *,
    workers: int,
    skip_bad: bool = False,
    on_skip: Callable[[int], None] = lambda count: None,
    order: ShardOrder | None = None,
) -> Batches:
    """Return the engine's ``batches``: ``image`` (b, 3, h, w) uint8 and ``label`` (b,), this rank's rows.

    With pairs of noise, ``noisy_image`` (b, 3, h, w) is each image with noise. With random erasing, images are float32
    in the network's input range. With mixup, batches also hold ``other_image`` and ``other_label``, the row of the
    global batch before each, and ``mix`` (b,), the share of the first. Without an `order`, the full data set is
    shuffled. Raises `DataError` naming the first unreadable image, unless `skip_bad` replaces it and calls `on_skip`.
    """
    positions = rank_positions(batch_size, world, mirrored=augmentation.mirrored)
    if augmentation.mixup and world.size > 1:
        # The first row's partner is the last row of another rank.
        positions = [(positions[0] - 1) % batch_size, *positions]

    def batches(start: int) -> Generator[Batch, None, None]:
        repeats, views = augmentation.repeats, augmentation.views
        steps = StepSampler(len(split.labels), batch_size, seed, start, positions, repeats, views, order)
        shard_uses = partial(order.iter_shard_uses, start, positions) if order else None
        with (
            prefetch_shards(split, shard_uses, len(positions), workers, world.local_ranks) as on_step,
            closing(
                iter_crops(split, augmentation, batch_size, seed, steps, world.device, workers, skip_bad, on_skip)
            ) as crops,
        ):
            on_step(start - 1)
            for step, (images, labels) in enumerate(crops, start):
                on_step(step)
                batch = {"image": images[:, :3], "label": labels}
                if augmentation.noise_pairs:
                    batch["noisy_image"] = images[:, 3:]
                if augmentation.mixup:
                    batch = mixup_with_previous(batch, augmentation.mixup, seed, step, wraps=world.size == 1)
                yield batch

    return batches


def blend(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return ``share * first + (1 - share) * second``, with one share per row."""
    weight = share.reshape(-1, *([1] * (first.ndim - 1)))
    return weight * first + (1 - weight) * second


def mixup_with_previous(batch: Batch, strength: float, seed: int, step: int, *, wraps: bool = True) -> Batch:
    """Return a batch with its mixup partners and one weight for all rows, Beta(p, p) folded to at least a half.

    big_vision's get_mixup: each example is mixed with the one before it in the global batch, the first one with the
    last. Without `wraps`, the first row belongs to the previous rank and serves as a partner only.
    """
    draw = np.random.default_rng((seed, MIX, step)).beta(strength, strength)
    if wraps:
        partners = {f"other_{name}": value.roll(1, 0) for name, value in batch.items()}
    else:
        partners = {f"other_{name}": value[:-1] for name, value in batch.items()}
        batch = {name: value[1:] for name, value in batch.items()}
    images = batch["image"]
    return {**batch, **partners, "mix": torch.full((len(images),), max(draw, 1 - draw), device=images.device)}
