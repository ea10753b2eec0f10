"""Training, validation and test images of a data set with named classes."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpn_cli.data.compact import pack_integers
from dpn_cli.data.image_source import ImageSource, check_classes, find_splits, has_split, open_split
from dpn_cli.data.sources.base import ImageSubset, LabelledImages
from dpn_cli.errors import DataError

# The share of the training images in minival, and its limit when minival is too small: 50 images show a training's
# course, but an accuracy on them is uncertain by up to 14 points (95 %), on 500 by up to 4.
MINIVAL_SHARE, MINIVAL_MOST_SHARE = 0.01, 0.1
MINIVAL_WATCHES, MINIVAL_CHOOSES = 50, 500


@dataclass(frozen=True)
class ClassData:
    """A data set of named classes; `minival` is empty when every image is trained on."""

    train: LabelledImages
    minival: LabelledImages
    val: LabelledImages
    classes: tuple[str, ...]


def open_class_data(source: ImageSource, minival: float | None, *, chooses: bool = False) -> ClassData:
    """Open a data set for training: validation split, minival, and the rest to train on.

    `minival` is the share of the training images that shows a training's course and, if it `chooses`, decides which
    checkpoint is kept. None means the paper's last 1 %, but at least 50 images (500 to choose by), and at most a tenth.
    Raises `DataError`, naming files, when the splits do not agree.
    """
    train, classes = open_split(source, "train")
    validation = open_split(source, "val") if has_validation(source) else None
    if validation is None:
        if not source.val_fraction:
            raise DataError(
                f"--data {source.location}: no validation images; put them next to (train/CLASS, val/CLASS), "
                "name them with --val-data, or set some apart with --val-fraction 0.2"
            )
        train, val = hold_out(train, source.val_fraction)
    else:
        val, val_classes = validation
        check_classes(source, classes, val_classes)
    count = minival_size(len(train.labels), minival, chooses)
    order = hash_order(train)
    cut = len(order) - count
    return ClassData(ImageSubset(train, np.sort(order[:cut])), ImageSubset(train, np.sort(order[cut:])), val, classes)


def has_validation(source: ImageSource) -> bool:
    """Return whether a data set has validation images; a test split counts unless a fraction is to be held out."""
    return "val" in find_splits(source) or (has_split(source, "val") and not source.val_fraction)


def minival_size(images: int, share: float | None, chooses: bool = False) -> int:
    """Return how many of `images` are set apart: a share of them, or, for None, what `open_class_data` says."""
    if share is None:
        # big_vision's train[99%:] of 1,281,167 images are 12,812: the cut is rounded down.
        last = images - math.floor(images * (1 - MINIVAL_SHARE))
        minimum = MINIVAL_CHOOSES if chooses else MINIVAL_WATCHES
        return max(last, min(minimum, int(images * MINIVAL_MOST_SHARE)))
    return images - math.floor(images * (1 - share))


def hash_order(split: LabelledImages) -> Sequence[int]:
    """Order images by a hash of their names: a shuffle that depends on neither the machine nor the other images."""
    digests = bytearray()
    for index in range(len(split.labels)):
        digests += hashlib.sha256(os.fsencode(split.key(index))).digest()
    parts = np.frombuffer(digests, ">u8").reshape(-1, 4)
    return pack_integers(np.lexsort(parts.T[::-1]))  # by the first part, then by the second


def hold_out(split: LabelledImages, fraction: float) -> tuple[LabelledImages, LabelledImages]:
    """Set the last `fraction` of every class apart, in the order of the names' hashes; returns (rest, part)."""
    labels, order = np.asarray(split.labels), np.asarray(hash_order(split))
    order = order[np.argsort(labels[order], kind="stable")]
    held_out, end = np.zeros(len(labels), dtype=bool), 0
    for images in np.unique(labels, return_counts=True)[1].tolist():
        end += images
        held_out[order[end - min(images - 1, max(1, round(fraction * images))) : end]] = True
    if held_out.all() or not held_out.any():
        raise DataError(f"{len(labels)} images are too few to set {fraction:g} of each class apart")
    return ImageSubset(split, np.flatnonzero(~held_out)), ImageSubset(split, np.flatnonzero(held_out))


def open_tuning_data(source: ImageSource) -> ClassData:
    """Open a data set with a test split: `minival` is the whole validation split, and `val` the test split.

    Raises `DataError` when one of the three is missing, or their classes differ.
    """
    splits = {split: open_split(source, split) for split in find_splits(source)}
    missing = [split for split in ("val", "test") if split not in splits]
    if missing:
        raise DataError(
            f"--data {source.location}: no {' and no '.join(missing)} images; a sweep chooses on val and reports "
            "test, so "
            "it needs train/CLASS, val/CLASS and test/CLASS, or the splits train, validation and test of hf:OWNER/NAME"
        )
    (train, classes), (val, val_classes), (test, test_classes) = splits.values()
    check_classes(source, classes, val_classes)
    check_classes(source, classes, test_classes)
    return ClassData(train, val, test, classes)
