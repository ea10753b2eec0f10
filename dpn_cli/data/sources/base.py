"""Base types of labelled images, whatever they are stored in."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL import Image

from dpn_cli.data.compact import Rows, pack_integers
from dpn_cli.data.decode import (
    DECODE_ERRORS,
    DEFAULT_READ_OPTIONS,
    STORED,
    Pixels,
    ReadOptions,
    decode,
    unreadable_error,
)
from dpn_cli.data.remote import RemotePath
from dpn_cli.errors import DataError

Shard = Path | RemotePath
# Names of a split in data sets, the first one that is there counts. Sets without a validation split are commonly scored
# on their test split.
SPLIT_NAMES = {"train": ("train",), "val": ("val", "validation", "valid", "test"), "test": ("test",)}
# Most classes of a network; ImageNet-21k has 21,843. A larger class number is a mistake in the data.
MAX_CLASSES = 2**15


@dataclass(frozen=True)
class ShardIndex:
    """Files that hold many images each: image i lies in ``paths[of[i]]``."""

    paths: Sequence[Shard]
    of: Rows

    def only(self, rows: Sequence[int]) -> ShardIndex:
        """Return the files of some of the images, in their order."""
        return ShardIndex(self.paths, self.of[rows])


class LabelledImages(Protocol):
    """Labelled images, decoded one at a time with the options in `reading`."""

    reading: ReadOptions

    @property
    def labels(self) -> Sequence[int]:
        """The class of every image."""

    @property
    def sizes(self) -> Sequence[int]:
        """The encoded size of every image in bytes."""

    @property
    def shards(self) -> ShardIndex | None:
        """Return the file of each image, where files hold many; None for images in files of their own."""

    def locate(self, index: int) -> str:
        """Name the location of an image for messages: file and line, or data set and row."""

    def key(self, index: int) -> str:
        """Return the name of an image inside the data set, whatever the set's location; its number if it has none."""

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet. Raises `DataError` with its location when it is not an image."""

    def content(self, index: int) -> bytes:
        """Return an image's stored bytes; equal bytes are the same image. Raises `DataError` as `open` does."""

    def pixels(self, index: int) -> Pixels:
        """Decode an image to (height, width, 3). Raises `DataError` with its location when it is unreadable."""


class Images(ABC):
    """Base of the kinds of labelled images: decodes opened images with the options in `reading`."""

    reading: ReadOptions = DEFAULT_READ_OPTIONS

    @property
    def shards(self) -> ShardIndex | None:
        """Return the file of each image; None for images in files of their own."""
        return None

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""

    @abstractmethod
    def locate(self, index: int) -> str:
        """Name the location of an image for messages."""

    def key(self, index: int) -> str:
        """Return the name of an image inside the data set; its number if it has none."""
        return str(index)

    def content(self, index: int) -> bytes:
        """Return the bytes of an image's file, or its pixels when there is no file or opening decodes it."""
        with self.open(index) as image:
            return read_image_bytes(image, self.locate(index), image.tobytes)

    def pixels(self, index: int) -> Pixels:
        """Decode an image to (height, width, 3). Raises `DataError` with its location when it is unreadable."""
        return decode(self.open(index), self.locate(index), self.reading.decoder)


class ImageSubset(Images):
    """Some images of a split, in the order of the split."""

    def __init__(self, split: LabelledImages, rows: Sequence[int] | Rows) -> None:
        self.whole, self.rows, self.reading = split, pack_integers(rows), split.reading
        self.labels: Sequence[int] = array("q", (split.labels[row] for row in self.rows))
        self.sizes: Sequence[int] = array("q", (split.sizes[row] for row in self.rows))

    @property
    def shards(self) -> ShardIndex | None:
        """Return the shard of the whole split that each image is in."""
        return self.whole.shards.only(self.rows) if self.whole.shards else None

    def locate(self, index: int) -> str:
        """Name the location of an image in the whole split."""
        return self.whole.locate(self.rows[index])

    def key(self, index: int) -> str:
        """Return an image's name in the whole split."""
        return self.whole.key(self.rows[index])

    def content(self, index: int) -> bytes:
        """Return what an image is stored as."""
        return self.whole.content(self.rows[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.whole.open(self.rows[index])


def read_image_bytes(image: Image.Image, location: str, other: Callable[[], bytes]) -> bytes:
    """Return the bytes of an opened image's file, and what `other` returns when it has none; it can still be decoded.

    An image that was turned when it was opened is known by its file, too.

    Raises `ImageError` when the file is damaged.
    """
    if (stored := image.info.get(STORED)) is not None:
        return bytes(stored)
    try:
        if (file := getattr(image, "fp", None)) is None:
            return other()
        file.seek(0)
        return bytes(file.read())
    except DECODE_ERRORS as error:
        raise unreadable_error(location, error) from error


def fingerprint(split: LabelledImages) -> str:
    """Return a hash of a split's order, labels and encoded sizes in bytes, which does not depend on its location.

    It distinguishes copies of a data set without reading the images: re-encoded images have other sizes.
    """
    rows = zip(split.labels, split.sizes, strict=True)
    return hash_lines(f"{label} {size}" for label, size in rows)[:16]


def hash_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines joined by line feeds, as hex; they are in memory one at a time."""
    digest, separator = hashlib.sha256(), b""
    for line in lines:
        digest.update(separator + os.fsencode(line))
        separator = b"\n"
    return digest.hexdigest()


def number_classes(split: LabelledImages, location: str) -> tuple[str, ...]:
    """Return the class numbers 0, 1, ... of a split as names, for data sets without class names.

    Raises `DataError`, naming the image, for a class number that is too large.
    """
    largest = max(split.labels)
    if largest >= MAX_CLASSES:
        image = split.locate(list(split.labels).index(largest))
        raise DataError(
            f"--data {location}: {image} has the class number {largest}; they go from 0 to {MAX_CLASSES - 1}"
        )
    return tuple(map(str, range(1 + largest)))


def find_split_name(split: str, names: Collection[str]) -> str | None:
    """Return the one of `names` that is a data set's ``train``, ``val`` or ``test`` split; None if there is none."""
    return next((name for name in SPLIT_NAMES[split] if name in names), None)


def is_remote(split: LabelledImages) -> bool:
    """Return whether a split's images are in shards that have to be fetched."""
    return split.shards is not None and any(isinstance(path, RemotePath) for path in split.shards.paths)


def sample_rows_to_check(split: LabelledImages, most: int) -> list[int]:
    """Return the images to decode before long work: about `most` of them, and all empty or missing files.

    Of shards behind a URL they are the first ones, which are in one shard or two: others would have to be fetched.
    """
    count = len(split.labels)
    candidates = range(min(most, count)) if is_remote(split) else range(0, count, max(1, count // most))
    return sorted({*candidates, *(row for row, size in enumerate(split.sizes) if not size)})
