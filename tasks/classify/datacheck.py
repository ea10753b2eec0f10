"""``dpn data check highres`` and ``pretrain``: all labelled images, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import open_clip
from timm.data import ImageNetInfo

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.imagenet import describe_imagenet, imagenet_folders
from dpn_cli.data.loader_sizing import check_batch
from dpn_cli.data.sources.base import ImageSubset, LabelledImages
from dpn_cli.data.sources.packs import PackedImages, read_manifest
from dpn_cli.data.sources.shards import ShardImages
from dpn_cli.run.console import count_noun
from tasks.classify.config import SupervisedConfig
from tasks.classify.data import open_data, open_tuning_splits
from tasks.classify.preflight import fingerprints, input_size
from tasks.classify.pretrain_config import PretrainConfig


def check_data(config: SupervisedConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Inspect all images of a config's splits; return the fingerprints that a result carries."""
    is_tuning = isinstance(config, PretrainConfig) and config.stages
    data = findings.open(lambda: open_tuning_splits(config) if is_tuning else open_data(config))
    if data is None:
        return {}
    splits = {"train": data.train, "minival": data.minival, "val": data.val}
    inspections = {
        name: findings.inspect_labelled(name, split, data.classes)
        for name, split in splits.items()
        if len(split.labels)
    }
    train = inspections["train"]
    if isinstance(data.minival, ImageSubset) and "minival" in inspections:
        inspections["minival"].side = train.side  # cut from the training images: copies in both are no leak
    findings.add_duplicates(*inspections.values())
    size, count = input_size(config), len(train.readable)
    if small := sum(min(side) < min(size) for side in train.sides[train.readable].tolist()):
        images = f"{count} training images" if count == len(data.train.labels) else f"{count} readable training images"
        findings.notes.append(f"{small} of {images} are smaller than the input of {min(size)} pixels")
    _check_order(str(config.data.source), data.classes, findings)
    if message := describe_imagenet(data):
        findings.notes.append(message)
    _note_storage(data.train, findings)
    check_batch(findings, len(data.train.labels), config.batch_size, ranks, config.runtime.workers, 3 * math.prod(size))
    return fingerprints(data)


def _check_order(source: str, classes: Sequence[str], findings: DataFindings) -> None:
    """Compare the order of the classes with the official ones, and that of numbers with their values."""
    official = {
        "ImageNet-1k's folders": imagenet_folders(),
        "ImageNet-1k's names": tuple(ImageNetInfo("imagenet-1k").label_descriptions()),
        "ImageNet-1k's names in open_clip": tuple(open_clip.IMAGENET_CLASSNAMES),
    }
    for name, order in official.items():
        if sorted(classes) == sorted(order) and tuple(classes) != order:
            first = next(number for number, pair in enumerate(zip(classes, order, strict=True)) if len(set(pair)) > 1)
            findings.add_problems(
                "classes",
                f"--data {source}: {name} in another order than the official one: class {first} is {classes[first]!r}, "
                f"there {order[first]!r}; networks with the official order score nothing on them",
            )
    if all(name.isdecimal() for name in classes) and sorted(classes, key=int) != list(classes):
        first = next(number for number, name in enumerate(classes) if number != int(name))
        findings.warnings.append(
            f"--data {source}: classes that are numbers, in the order of text: class {first} is {classes[first]!r}; "
            "write them with leading zeros where networks of others know the classes by number"
        )


def _note_storage(train: LabelledImages, findings: DataFindings) -> None:
    """Note the number of shards, and warn of a pack whose images were resized."""
    source = train
    while isinstance(source, ImageSubset):
        source = source.whole
    if not isinstance(source, PackedImages | ShardImages):
        return
    shards = count_noun(len(source.paths), "shard")
    findings.notes.append(
        f"{shards}, which every process reads at random: any number of ranks and of processes will do"
    )
    if isinstance(source, PackedImages):
        packing = read_manifest(source.paths[0].parent.parent)
        if packing["size"]:
            findings.warnings.append(
                f"packed with a shorter side of at most {packing['size']} pixels: images that were larger are "
                "smoothed copies, and scores may differ from those on the files"
            )
