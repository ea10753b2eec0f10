"""The images that `--data` names, whatever kind of source they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpn_cli.config.paths import CLASS_FOLDERS, IMAGE_FOLDER
from dpn_cli.config.urls import is_hub, is_shards, is_url
from dpn_cli.data.decode import DEFAULT_READ_OPTIONS, SUFFIXES, ReadOptions
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.remote import RemotePath, resolve_folder
from dpn_cli.data.sources.base import (
    MAX_CLASSES,
    SPLIT_NAMES,
    ImageSubset,
    LabelledImages,
    find_split_name,
    number_classes,
)
from dpn_cli.data.sources.cifar import CifarImages, find_cifar
from dpn_cli.data.sources.folder import ClassFolders, FolderImages
from dpn_cli.data.sources.hub import HubSplit, UnlabelledHubImages, find_hub_split, parse_hub_source
from dpn_cli.data.sources.packs import PackedImages, is_pack, read_manifest
from dpn_cli.data.sources.shards import LabelledShardImages, UnlabelledShardImages
from dpn_cli.data.sources.synthetic import DEMO_SPLITS, LABELS, SceneSplit
from dpn_cli.errors import DataError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ImageSource:
    """Location of images, by ``--data`` and related options.

    `location` is a folder (of classes, packed, or CIFAR's), ``hf:NAME[:CONFIGURATION]``, ``wds:PATTERN``, the URL of a
    packed folder or of shards, or ``demo``; `val_location` is another one for the validation images. Without validation
    images, `val_fraction` of the others is set apart.
    """

    location: str
    val_location: str | None = None
    val_fraction: float | None = None
    image_column: str | None = None
    label_column: str | None = None
    reading: ReadOptions = DEFAULT_READ_OPTIONS


def find_splits(source: ImageSource) -> list[str]:
    """Return which of ``train``, ``val`` and ``test`` a data set has itself, without substitutes."""
    own = [split for split in SPLITS if has_split(source, split)]
    if "val" in own and not source.val_location and _find_name(source.location, "val") == "test":
        own.remove("val")
    return own


def has_split(source: ImageSource, split: str) -> bool:
    """Return whether a data set has images for ``train``, ``val`` or ``test``; a test split serves as ``val``."""
    if split == "train" or (split == "val" and source.val_location):
        return True
    return _find_name(source.location, split) is not None


def _find_name(location: str, split: str) -> str | None:
    """Return the name of ``val`` or ``test`` in a data set, or None when it has none."""
    if location in DEMO_SPLITS:
        return find_split_name(split, DEMO_SPLITS[location][1])
    if is_hub(location):
        return find_hub_split(location, split)
    if is_shards(location):
        return None
    root = resolve_folder(location)
    if isinstance(root, RemotePath) or is_pack(root):
        return find_split_name(split, read_manifest(root)["splits"])
    if find_cifar(root):
        return "val" if split == "val" else None
    return _find_folder(root, split)


def _find_folder(root: Path, split: str) -> str | None:
    """Return the name of a split's folder in `root`, or None when there is none."""
    return find_split_name(split, [name for name in SPLIT_NAMES[split] if (root / name).is_dir()])


def open_split(source: ImageSource, split: str, *, unlabelled: bool = False) -> tuple[LabelledImages, tuple[str, ...]]:
    """Open a split of a data set; returns it with its class names.

    Raises `DataError`, also for fewer than two classes, for more than a network can have, and for withheld labels (-1,
    as in the test split of many hub data sets); `unlabelled` allows these, to store the images.
    """
    location = source.val_location if split == "val" and source.val_location else source.location
    images, classes = _open(source, location, split)
    images.reading = source.reading
    if not unlabelled:
        _check_labels(location, split, images.labels, classes)
    return images, classes


def _open(source: ImageSource, location: str, split: str) -> tuple[LabelledImages, tuple[str, ...]]:
    if location in DEMO_SPLITS:
        task, splits = DEMO_SPLITS[location]
        return SceneSplit(task, *splits[split]), tuple(LABELS[task])
    if location.startswith("demo:"):
        names = ", ".join(f"{name} ({len(LABELS[task])} classes)" for name, (task, _) in DEMO_SPLITS.items())
        raise DataError(f"--data {location}: no such demo; there are {names}")
    if is_shards(location):
        shards = LabelledShardImages(location.removeprefix("wds:"))
        return shards, shards.classes
    if is_hub(location):
        hub_split = find_hub_split(location, split)
        name, config = parse_hub_source(location)
        hub = HubSplit(name, config, hub_split or split, source.image_column, source.label_column, alone=True)
        return hub, hub.classes or number_classes(hub, location)
    root = resolve_folder(location)
    if isinstance(root, Path) and not root.is_dir():
        raise DataError(f"--data {location}: {CLASS_FOLDERS}")
    if isinstance(root, RemotePath) or is_pack(root):
        splits = read_manifest(root)["splits"]
        alone = source.val_location is not None and split == "val" and len(splits) == 1
        packed_images = PackedImages(root, next(iter(splits)) if alone else find_split_name(split, splits) or split)
        return packed_images, packed_images.classes
    if cifar := find_cifar(root):
        cifar_images = CifarImages(*cifar, split)
        return cifar_images, cifar_images.classes
    folders = ClassFolders(root / (_find_folder(root, split) or ""))
    return folders, folders.classes


def _check_labels(location: str, split: str, labels: Sequence[int], classes: Sequence[str]) -> None:
    if min(labels, default=0) < 0:
        report_error(
            DataError(
                f"--data {location}: its {split} images have the label -1, which means no label; choose another split"
            )
        )
    if len(classes) < 2:
        found_classes = f"one class ({classes[0]})" if classes else "no classes"
        raise DataError(
            f"--data {location}: {found_classes}, and a classifier needs two at least; images go into one folder per "
            "class: name the folder that holds these"
        )
    if len(classes) > MAX_CLASSES:
        raise DataError(f"--data {location}: {len(classes)} classes; a network has at most {MAX_CLASSES}")


def check_classes(source: ImageSource, train: Sequence[str], val: Sequence[str]) -> None:
    """Raise `DataError` when two splits have different classes."""
    if tuple(train) == tuple(val):
        return
    missing, extra = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    report_error(
        DataError(
            f"--data {source.location}: training and validation have different classes: only in training: "
            f"{', '.join(missing[:5]) or 'none'}; only in validation: {', '.join(extra[:5]) or 'none'}"
        )
    )


def open_unlabelled(source: ImageSource) -> LabelledImages:
    """Open the training images of `source` without reading labels; a folder needs no class folders in it.

    Of a folder with ``train`` in it those are meant. Raises `DataError` where there are no images.
    """
    location = source.location
    split: LabelledImages
    if is_hub(location):
        name, config = parse_hub_source(location)
        split = UnlabelledHubImages(name, config, find_hub_split(location, "train") or "train", source.image_column)
    elif is_shards(location):
        split = UnlabelledShardImages(location.removeprefix("wds:"))
    elif (
        location in DEMO_SPLITS or is_url(location) or is_pack(root := Path(location).expanduser()) or find_cifar(root)
    ):
        split, _ = open_split(source, "train", unlabelled=True)
    else:
        if not root.is_dir():
            raise DataError(f"--data {location}: {IMAGE_FOLDER}")
        split = FolderImages(root / (_find_folder(root, "train") or ""))
    if not len(split.labels):
        raise DataError(f"--data {location}: no image in it or below it ({', '.join(sorted(SUFFIXES))})")
    split.reading = source.reading
    return split


def find_images(source: str, most: int, seed: int, reading: ReadOptions = DEFAULT_READ_OPTIONS) -> LabelledImages:
    """Return up to `most` images below a folder, drawn by `seed`, or that many scenes of ``demo``.

    Raises `DataError` when there is no such folder or no image in it.
    """
    if source == "demo":
        return SceneSplit("demo_count", 0, most)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"--data {source}: no such folder; pass a folder of images, or demo")
    images = FolderImages(folder, reading=reading)
    if not images.sizes:
        raise DataError(f"--data {source}: no image in it or below it ({', '.join(sorted(SUFFIXES))})")
    return ImageSubset(images, np.random.default_rng(seed).permutation(len(images.sizes))[:most])
