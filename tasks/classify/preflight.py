"""Checks before the training of a classifier: the batch, the images, and the start of a resumed run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpn_cli.config.launch import SCRATCH_PIXELS
from dpn_cli.config.load import Logger, discard_message
from dpn_cli.data.crops import scale_to_short_side
from dpn_cli.data.decode import decode, is_stored_turned
from dpn_cli.data.imagenet import describe_imagenet
from dpn_cli.data.loader import count_workers
from dpn_cli.data.prefetch import check_cache
from dpn_cli.data.resize import Size
from dpn_cli.data.shard_sampler import ShardOrder, make_shard_order
from dpn_cli.data.sources.base import ImageSubset, LabelledImages, fingerprint, sample_rows_to_check
from dpn_cli.data.splits import MINIVAL_CHOOSES, ClassData, hash_order
from dpn_cli.data.turned_images import describe_turned
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run import distributed
from dpn_cli.run.baseline_warnings import crop_warning
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World
from dpn_cli.run.run_dir import RunFolder, describe_device
from tasks.classify.classifier import resize_for
from tasks.classify.config import ConfigT, SupervisedConfig
from tasks.classify.fewshot import check_probe_data, final_probe_options
from tasks.classify.probe import POOL, check_shots

Json = dict[str, Any]
# Training images that are decoded before training, to see whether the files are images at all.
SAMPLE = 100
# Mean distance between the highest and the lowest channel from which an image is in colour, in grey levels of 255; and
# the smallest crop of images in colour; see docs/measurements.md.
LEAST_COLOUR, PHOTO_AREA = 2.0, 0.25
# Training images that decide whether most are in colour.
COLOUR_SAMPLE = 25


def check_batch(config: SupervisedConfig, world: World) -> None:
    """Raise `DpnError` unless ranks can share the batch, and micro-batches divide their shares: it is never rounded."""
    batch = config.batch_size
    check_divides(batch, config.runtime.micro_batch_size, world)
    odd_shares = [share for rank in range(world.size) if (share := len(replace(world, rank=rank).rows(batch))) % 2]
    if config.mixing == "timm" and odd_shares:
        even_batch = -(-batch // (2 * world.size)) * 2 * world.size
        raise DpnError(
            f"--batch-size {batch}: timm mixes images in pairs, and the {odd_shares[0]} images of a rank "
            f"({world.size} ranks) are odd; use {even_batch}"
        )


def check_divides(batch: int, micro: int | str, world: World) -> None:
    """Raise `DpnError` unless every rank has a share of a batch, and micro-batches divide it.

    Where the ranks do not divide the batch, micro-batches have to divide the batch itself.
    """
    if batch < world.size:
        engine.refuse_batch(batch, world.size)
    share, equal = world.most(batch), batch % world.size == 0
    divisor = share if equal else batch
    if isinstance(micro, int) and share > micro and divisor % micro:
        fits = max(size for size in range(1, micro) if divisor % size == 0)
        description = f"the {share} images of a rank (--batch-size {batch} over {world.size} ranks)"
        raise DpnError(
            f"--micro-batch-size {micro}: does not divide {description if equal else f'--batch-size {batch}'}; "
            f"use {fits}, or auto"
        )


def interval(requested: int, steps: int) -> int:
    """Return the steps between evaluations of a training: `every`, or a quarter of a training shorter than that."""
    return requested if requested < steps else max(1, steps // 4)


def shard_order(config: SupervisedConfig, data: ClassData) -> ShardOrder | None:
    """Return the order of a training whose duration is in steps; None where images are shuffled all together."""
    return make_shard_order(data.train, config.data, config.batch_size, config.seed, config.schedule.steps)


def check_shards(config: SupervisedConfig, data: ClassData, world: World) -> None:
    """Raise `DpnError` for a training in an order that the data do not have, or the cache has no room for."""
    workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
    draws = config.schedule.steps * config.batch_size
    check_cache(data.train, shard_order(config, data), draws, workers, world)


def check_data(config: SupervisedConfig, data: ClassData, folder: RunFolder, world: World, console: Console) -> Json:
    """Decode a sample, and check that a resumed run has its first classes and images. Raises `DataError`."""
    facts: Json = {
        "classes": list(data.classes),
        "data": fingerprints(data),
    }
    saved_facts = distributed.from_leader(folder.facts)
    if "classes" in saved_facts and saved_facts["classes"] != facts["classes"]:
        raise DataError(
            f"--data {config.data.source}: {len(facts['classes'])} classes now, {len(saved_facts['classes'])} others "
            f"when this run started ({_change(saved_facts['classes'], facts['classes'])}); start another with -o"
        )
    if "data" in saved_facts and saved_facts["data"] != facts["data"]:
        raise DataError(
            f"--data {config.data.source}: the images have changed since this run started; start another with -o"
        )
    if config.fewshot:
        _check_probe(config.fewshot, data)
    if options := final_probe_options(config):
        check_probe_data(options)
    if message := describe_imagenet(data):
        console.info(message)
    console.info(
        f"{len(data.train.labels)} images to train on, {len(data.minival.labels)} in minival, "
        f"{len(data.val.labels)} to validate, {len(data.classes)} classes; "
        f"{count_noun(config.schedule.steps, 'step')} of "
        f"{config.batch_size}, {config.schedule.steps * config.batch_size / len(data.train.labels):.2f} epochs"
    )
    if config.select == "best" and (warning := _choice_warning(len(data.minival.labels))):
        console.warn(warning)
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **facts)
        check_images(config, data, console)
    return facts


def fingerprints(data: ClassData) -> dict[str, str]:
    """Return a hash of each split; see `fingerprint`."""
    return {name: fingerprint(getattr(data, name)) for name in ("train", "minival", "val")}


def check_images(config: SupervisedConfig, data: ClassData, console: Console) -> None:
    """Decode a sample of every split, and warn of evaluation crops that show too little. Raises `DataError`."""
    samples = [decode_some(split, config.data.skip_bad_images) for split in (data.train, data.minival, data.val)]
    if message := describe_turned_samples(samples, config.data.exif):
        console.info(message)
    if warning := _crop_warning(config, samples[-1].sizes):
        console.warn(warning)


@dataclass(frozen=True)
class DecodedSample:
    """Some images of a split: their sizes in pixels, how many are stored turned, and whether most are in colour."""

    sizes: list[Size]
    turned: int
    in_colour: bool


def decode_some(split: LabelledImages, skip_bad: bool, count: int = SAMPLE) -> DecodedSample:
    """Decode a sample of `count` images of a split, and all rows that are no files.

    Raises `DataError` unless `skip_bad`.
    """
    sizes, turned, coloured = [], 0, 0
    for index in sample_rows_to_check(split, count):
        try:
            image = split.open(index)
            turned += is_stored_turned(image)
            pixels = decode(image, split.locate(index), split.reading.decoder)
            sizes.append(pixels.shape[:2])
            coloured += bool((pixels.max(-1) - pixels.min(-1)).mean() > LEAST_COLOUR)
        except DataError:
            if not skip_bad:
                raise
    return DecodedSample(sizes, turned, 2 * coloured > len(sizes))


def describe_turned_samples(samples: Sequence[DecodedSample], exif: bool) -> str | None:
    """Return how many images of some samples are stored turned; None without any."""
    return describe_turned(sum(sample.turned for sample in samples), sum(len(sample.sizes) for sample in samples), exif)


def augment_by_images(config: ConfigT, data: ClassData, log: Logger = discard_message) -> ConfigT:
    """Return the config with crops and flips decided by the training images, where it leaves them open.

    Images in colour are taken for photographs: they are cropped at random and flipped. Grey ones may be digits, letters
    or X-rays, which are taken whole and unflipped. Raises `DataError` as `decode_some` does.
    """
    keys = config.data
    if keys.crop is not None and keys.flip is not None:
        return config
    in_colour = decode_some(data.train, keys.skip_bad_images, COLOUR_SAMPLE).in_colour
    update: dict[str, Any] = {}
    if keys.crop is None:
        random_crop = in_colour or keys.crop_area is not None
        update["crop"] = "inception" if random_crop else "whole"
        update["crop_area"] = (keys.crop_area or PHOTO_AREA) if random_crop else None
    if keys.flip is None:
        update["flip"] = in_colour
    decided = " and ".join(f"data.{key}" for key in update if key in ("crop", "flip"))
    log(f"most training images are {'in colour' if in_colour else 'grey'}, which decides {decided}")
    return config.model_copy(update={"data": keys.model_copy(update=update)})


def _crop_warning(config: SupervisedConfig, images: list[Size]) -> str | None:
    """Return a warning if the evaluation's central crop is too small; inception crops are never below a twentieth."""
    size = input_size(config)
    side = resize_side_of(config, size)
    return None if side is None else crop_warning(size, [scale_to_short_side(image, side) for image in images])


def _choice_warning(images: int) -> str | None:
    """Return a warning if minival is too small to choose between checkpoints."""
    if images >= MINIVAL_CHOOSES:
        return None
    if not images:
        return "select=best: there is no minival to choose on, so the last step is kept; see data.minival"
    uncertain = 100 * 1.96 * math.sqrt(0.25 / images)  # 95 % around an accuracy of a half
    return (
        f"select=best chooses on {images} minival images, on which an accuracy is uncertain by up to {uncertain:.0f} "
        f"points; use select=last, or a minival of {MINIVAL_CHOOSES} images (data.minival)"
    )


def _check_probe(shots: int, data: ClassData) -> None:
    """Raise `DpnError` when there is nothing to test the few-shot probe on, or too little to draw from."""
    if not data.minival.labels:
        raise DpnError(
            f"--eval-fewshot {shots}: the probe is tested on minival, and there is none (data.minival); leave some "
            "images to it, or probe the finished run with 'dpn eval fewshot'"
        )
    check_shots("--eval-fewshot", shot_pool(data.train).labels, data.classes, shots)


def _change(previous: list[str], current: list[str]) -> str:
    removed, added = sorted(set(previous) - set(current)), sorted(set(current) - set(previous))
    return f"gone: {', '.join(removed[:3]) or 'none'}; new: {', '.join(added[:3]) or 'none'}"


def shot_pool(train: LabelledImages) -> LabelledImages:
    """Return the training images that few-shot probes draw from: big_vision's first 65,000."""
    return train if len(train.labels) <= POOL else ImageSubset(train, sorted(hash_order(train)[:POOL]))


def input_size(config: SupervisedConfig) -> Size:
    """Return the (height, width) of the network's input in pixels; 224 stands for a checkpoint's own."""
    pixels = config.backbone.image_size or SCRATCH_PIXELS
    return (pixels, pixels) if isinstance(pixels, int) else pixels


def resize_side_of(config: SupervisedConfig, size: Size) -> int | None:
    """Return the shorter side that images are evaluated at before the central crop; None: whole, as they train."""
    if config.data.eval_resize is None and config.data.crop == "whole":
        return None
    return config.data.eval_resize or resize_for(size)
