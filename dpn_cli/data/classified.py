"""Labelled images with named classes, from every kind of source, in the splits that fine-tuning needs."""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dpn_cli.config.urls import is_hub, is_shards
from dpn_cli.data.decode import SUFFIXES, USUAL, Reading
from dpn_cli.data.file_index import FolderImages, integers
from dpn_cli.data.image_errors import fault
from dpn_cli.data.labelled import MOST_CLASSES, HubSplit, Images, Labelled, SceneSplit, number_names
from dpn_cli.data.remote import RemotePath, folder_of
from dpn_cli.data.shard_sampler import Rows, Sharded
from dpn_cli.data.sources.cifar import Cifar, find_cifar
from dpn_cli.data.sources.packs import Packed, is_pack, read_manifest
from dpn_cli.data.sources.shards import Shards
from dpn_cli.data.sources.synthetic import LABELS
from dpn_cli.errors import DataError

# The share of the training images in minival, and its limit when minival is too small: 50 images show a training's
# course, but an accuracy on them is uncertain by up to 14 points (95 %), on 500 by up to 4.
MINIVAL_SHARE, MINIVAL_MOST_SHARE = 0.01, 0.1
MINIVAL_WATCHES, MINIVAL_CHOOSES = 50, 500
SPLITS = ("train", "val", "test")
# The demo task of the built-in scenes, and the scene numbers of every split. Pre-training has its own scenes, which no
# other task trains or tests on.
DEMO: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "demo": ("demo_color", {"train": (0, 1000), "val": (1000, 2000)}),
    "demo:objects": ("demo_object", {"train": (1_000_000, 1_010_000), "val": (1_010_000, 1_011_000)}),
}


@dataclass(frozen=True)
class ImageSource:
    """Where images are, by ``--data`` and related options.

    `place` is a folder (of classes, packed, or CIFAR's), ``hf:NAME[:CONFIGURATION]``, ``wds:PATTERN``, the URL of a
    packed folder or of shards, or ``demo``; `val_place` is another one for the validation images. Without validation
    images, `val_fraction` of the others is set apart.
    """

    place: str
    val_place: str | None = None
    val_fraction: float | None = None
    image_column: str | None = None
    label_column: str | None = None
    reading: Reading = USUAL


class ClassFolders(FolderImages):
    """Images in one folder per class; classes are the folders' names in alphabetical order.

    Raises `DataError` for a folder without class folders, or a class without images.
    """

    def __init__(self, root: Path) -> None:
        self.classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        if not self.classes:
            raise DataError(f"{root}: no class folders; images go into {root}/CLASS/IMAGE.jpg")
        super().__init__(root, self.classes)
        for name, count in zip(self.classes, self.listing.counts, strict=True):
            if not count:
                kinds = ", ".join(sorted(SUFFIXES))
                fault(DataError(f"{root / name}: a class without images ({kinds}); remove it"))


class Part(Images):
    """Some images of a split, in the order of the split."""

    def __init__(self, whole: Labelled, rows: Sequence[int] | Rows) -> None:
        self.whole, self.rows, self.reading = whole, integers(rows), whole.reading
        self.labels: Sequence[int] = array("q", (whole.labels[row] for row in self.rows))
        self.sizes: Sequence[int] = array("q", (whole.sizes[row] for row in self.rows))

    @property
    def shards(self) -> Sharded | None:
        """Which shard of the whole split each image is in."""
        return self.whole.shards.only(self.rows) if self.whole.shards else None

    def where(self, index: int) -> str:
        """Name the place of an image in the whole split."""
        return self.whole.where(self.rows[index])

    def key(self, index: int) -> str:
        """Return an image's name in the whole split."""
        return self.whole.key(self.rows[index])

    def content(self, index: int) -> bytes:
        """Return what an image is stored as."""
        return self.whole.content(self.rows[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.whole.open(self.rows[index])


@dataclass(frozen=True)
class ClassData:
    """A data set of named classes; `minival` is empty when every image is trained on."""

    train: Labelled
    minival: Labelled
    val: Labelled
    classes: tuple[str, ...]


def open_class_data(source: ImageSource, minival: float | None, *, chooses: bool = False) -> ClassData:
    """Open a data set for training: validation split, minival, and the rest to train on.

    `minival` is the share of the training images that shows a training's course and, if it `chooses`, decides which
    checkpoint is kept. None means the paper's last 1 %, but at least 50 images (500 to choose by), and at most a tenth.
    Raises `DataError`, naming files, when the splits do not agree.
    """
    train, classes = open_split(source, "train")
    validation = open_split(source, "val") if has_split(source, "val") else None
    if validation is None:
        if not source.val_fraction:
            raise DataError(
                f"--data {source.place}: no validation images; put them beside (train/CLASS, val/CLASS), "
                "name them with --val-data, or set some apart with --val-fraction 0.2"
            )
        train, val = hold_out(train, source.val_fraction)
    else:
        val, val_classes = validation
        check_classes(source, classes, val_classes)
    count = minival_size(len(train.labels), minival, chooses)
    order = hash_order(train)
    cut = len(order) - count
    return ClassData(Part(train, np.sort(order[:cut])), Part(train, np.sort(order[cut:])), val, classes)


def minival_size(images: int, share: float | None, chooses: bool = False) -> int:
    """Return how many of `images` are set apart: a share of them, or, for None, what `open_class_data` says."""
    if share is None:
        # big_vision's train[99%:] of 1,281,167 images are 12,812: the cut is rounded down.
        last = images - math.floor(images * (1 - MINIVAL_SHARE))
        least = MINIVAL_CHOOSES if chooses else MINIVAL_WATCHES
        return max(last, min(least, int(images * MINIVAL_MOST_SHARE)))
    return images - math.floor(images * (1 - share))


def hash_order(split: Labelled) -> Sequence[int]:
    """Order images by a hash of their names: a shuffle that depends on neither the machine nor the other images."""
    digests = bytearray()
    for index in range(len(split.labels)):
        digests += hashlib.sha256(os.fsencode(split.key(index))).digest()
    parts = np.frombuffer(digests, ">u8").reshape(-1, 4)
    return integers(np.lexsort(parts.T[::-1]))  # by the first part, then by the second


def hold_out(split: Labelled, fraction: float) -> tuple[Labelled, Labelled]:
    """Set the last `fraction` of every class apart, in the order of the names' hashes; returns (rest, part)."""
    labels, order = np.asarray(split.labels), np.asarray(hash_order(split))
    order = order[np.argsort(labels[order], kind="stable")]
    apart, end = np.zeros(len(labels), dtype=bool), 0
    for images in np.unique(labels, return_counts=True)[1].tolist():
        end += images
        apart[order[end - min(images - 1, max(1, round(fraction * images))) : end]] = True
    if apart.all() or not apart.any():
        raise DataError(f"{len(labels)} images are too few to set {fraction:g} of each class apart")
    return Part(split, np.flatnonzero(~apart)), Part(split, np.flatnonzero(apart))


def open_tuning_data(source: ImageSource) -> ClassData:
    """Open a data set with a test split: `minival` is the whole validation split, and `val` the test split.

    Raises `DataError` when one of the three is missing, or their classes differ.
    """
    splits = {split: open_split(source, split) for split in own_splits(source)}
    missing = [split for split in ("val", "test") if split not in splits]
    if missing:
        raise DataError(
            f"--data {source.place}: no {' and no '.join(missing)} images; a sweep chooses on val and reports test, so "
            "it needs train/CLASS, val/CLASS and test/CLASS, or the splits train, validation and test of hf:OWNER/NAME"
        )
    (train, classes), (val, val_classes), (test, test_classes) = splits.values()
    check_classes(source, classes, val_classes)
    check_classes(source, classes, test_classes)
    return ClassData(train, val, test, classes)


def own_splits(source: ImageSource) -> list[str]:
    """Return which of ``train``, ``val`` and ``test`` a data set has itself, without substitutes."""
    own = [split for split in SPLITS if has_split(source, split)]
    if is_hub(source.place) and "val" in own and hub_split(source.place, "val") == "test":
        own.remove("val")
    return own


def has_split(source: ImageSource, split: str) -> bool:
    """Tell whether a data set has images of its own for ``train``, ``val`` or ``test``."""
    if split == "val" and source.val_place:
        return True
    if source.place in DEMO:
        return split in DEMO[source.place][1]
    if split == "train":
        return True
    if is_hub(source.place):
        return hub_split(source.place, split) is not None
    if is_shards(source.place):
        return False
    root = folder_of(source.place)
    if isinstance(root, RemotePath) or is_pack(root):
        return split in read_manifest(root)["splits"]
    if find_cifar(root):
        return split == "val"
    return (root / split).is_dir()


def open_split(source: ImageSource, split: str, *, unlabelled: bool = False) -> tuple[Labelled, tuple[str, ...]]:
    """Open a split of a data set; returns it with its class names.

    Raises `DataError`, also for fewer than two classes, for more than a network can have, and for withheld labels (-1,
    as in the test split of many hub data sets); `unlabelled` allows these, to store the images.
    """
    place = source.val_place if split == "val" and source.val_place else source.place
    opened, classes = _open(source, place, split)
    opened.reading = source.reading
    if not unlabelled:
        _check_labels(place, split, opened.labels, classes)
    return opened, classes


def _check_labels(place: str, split: str, labels: Sequence[int], classes: Sequence[str]) -> None:
    if min(labels, default=0) < 0:
        fault(
            DataError(
                f"--data {place}: its {split} images have the label -1, which means no label; choose another split"
            )
        )
    if len(classes) < 2:
        only = f"one class ({classes[0]})" if classes else "no classes"
        raise DataError(
            f"--data {place}: {only}, and a classifier needs two at least; images go into one folder per "
            "class: name the folder that holds these"
        )
    if len(classes) > MOST_CLASSES:
        raise DataError(f"--data {place}: {len(classes)} classes; a network has at most {MOST_CLASSES}")


def _open(source: ImageSource, place: str, split: str) -> tuple[Labelled, tuple[str, ...]]:
    if place in DEMO:
        task, splits = DEMO[place]
        return SceneSplit(task, *splits[split]), tuple(LABELS[task])
    if place.startswith("demo:"):
        told = ", ".join(f"{name} ({len(LABELS[task])} classes)" for name, (task, _) in DEMO.items())
        raise DataError(f"--data {place}: no such demo; there are {told}")
    if is_shards(place):
        shards = Shards(place.removeprefix("wds:"))
        return shards, shards.classes
    if is_hub(place):
        own = hub_split(place, split)
        name, config = hub_name(place)
        hub = HubSplit(name, config, own or split, source.image_column, source.label_column, alone=True)
        return hub, hub.classes or number_names(hub, place)
    root = folder_of(place)
    if isinstance(root, Path) and not root.is_dir():
        raise DataError(
            f"--data {place}: no such folder; it holds train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg. "
            "'demo' is the built-in data, hf:OWNER/NAME a hub data set, wds:PATTERN webdataset shards"
        )
    if isinstance(root, RemotePath) or is_pack(root):
        named = read_manifest(root)["splits"]
        alone = source.val_place is not None and split == "val" and len(named) == 1
        packed = Packed(root, next(iter(named)) if alone else split)
        return packed, packed.classes
    if cifar := find_cifar(root):
        images = Cifar(*cifar, split)
        return images, images.classes
    inner = root / split
    folders = ClassFolders(inner if inner.is_dir() else root)
    return folders, folders.classes


def hub_name(place: str) -> tuple[str, str]:
    """Split ``hf:NAME[:CONFIGURATION]`` into its two parts."""
    name, _, config = place.removeprefix("hf:").partition(":")
    return name, config or "default"


def hub_split(place: str, split: str) -> str | None:
    """Return the name of a hub data set's ``train`` or ``val`` split, or None when it has none."""
    from dpn_cli.data.labelled import load_hub

    splits = load_hub(*hub_name(place), True)
    # Sets without a validation split are commonly scored on their test split.
    names = {"train": ("train",), "val": ("validation", "val", "valid", "test"), "test": ("test",)}
    return next((name for name in names[split] if name in splits), None)


def check_classes(source: ImageSource, train: Sequence[str], val: Sequence[str]) -> None:
    """Raise `DataError` when two splits have different classes."""
    if tuple(train) == tuple(val):
        return
    missing, extra = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    fault(
        DataError(
            f"--data {source.place}: training and validation have different classes: only in training: "
            f"{', '.join(missing[:5]) or 'none'}; only in validation: {', '.join(extra[:5]) or 'none'}"
        )
    )
