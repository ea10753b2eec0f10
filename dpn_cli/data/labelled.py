"""Splits of labelled images: a list file beside images, a hub data set, or the built-in scenes."""

from __future__ import annotations

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from dpn_cli.data.decode import FAILURES, USUAL, Pixels, Reading, decode, file_size, inside, open_image, unreadable
from dpn_cli.data.image_errors import fault
from dpn_cli.data.remote import RemotePath
from dpn_cli.data.shard_sampler import Sharded
from dpn_cli.data.sources import synthetic
from dpn_cli.errors import DataError, ImageError
from dpn_cli.weights.hub import offline

# Most classes of a network; ImageNet-21k has 21,843. A larger class number is a mistake in the data.
MOST_CLASSES = 2**15


class Labelled(Protocol):
    """Labelled images, decoded one at a time with the options in `reading`."""

    reading: Reading

    @property
    def labels(self) -> Sequence[int]:
        """The class of every image."""

    @property
    def sizes(self) -> Sequence[int]:
        """The encoded size of every image in bytes."""

    @property
    def shards(self) -> Sharded | None:
        """Which file each image is in, where files hold many images; None for images in files of their own."""

    def where(self, index: int) -> str:
        """Name the place of an image for messages: file and line, or data set and row."""

    def key(self, index: int) -> str:
        """Return the name of an image inside the data set, whatever the set's place; its number if it has none."""

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet. Raises `DataError` with its place when it is not an image."""

    def content(self, index: int) -> bytes:
        """Return an image's stored bytes; equal bytes are the same image. Raises `DataError` as `open` does."""

    def pixels(self, index: int) -> Pixels:
        """Decode an image to (height, width, 3). Raises `DataError` with its place when it is unreadable."""


def fingerprint(split: Labelled) -> str:
    """Return a hash of a split's order, labels and encoded sizes in bytes, which does not depend on its place.

    It distinguishes copies of a data set without reading the images: re-encoded images have other sizes.
    """
    rows = zip(split.labels, split.sizes, strict=True)
    return digest_of_lines(f"{label} {size}" for label, size in rows)[:16]


def digest_of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines joined by line feeds, as hex; they are in memory one at a time."""
    digest, between = hashlib.sha256(), b""
    for line in lines:
        digest.update(between + os.fsencode(line))
        between = b"\n"
    return digest.hexdigest()


def number_names(split: Labelled, place: str) -> tuple[str, ...]:
    """Return the class numbers 0, 1, ... of a split as names, for data sets without class names.

    Raises `DataError`, naming the image, for a class number that is too large.
    """
    largest = max(split.labels)
    if largest >= MOST_CLASSES:
        where = split.where(list(split.labels).index(largest))
        raise DataError(f"--data {place}: {where} has the class number {largest}; they go from 0 to {MOST_CLASSES - 1}")
    return tuple(map(str, range(1 + largest)))


def behind_url(split: Labelled) -> bool:
    """Tell whether a split's images are in shards that have to be fetched."""
    return split.shards is not None and any(isinstance(path, RemotePath) for path in split.shards.paths)


def rows_to_check(split: Labelled, most: int) -> list[int]:
    """Return the images to decode before long work: about `most` of them, and all empty or missing files.

    Of shards behind a URL they are the first ones, which are in one shard or two: others would have to be fetched.
    """
    count = len(split.labels)
    spread = range(min(most, count)) if behind_url(split) else range(0, count, max(1, count // most))
    return sorted({*spread, *(row for row, size in enumerate(split.sizes) if not size)})


class Images(ABC):
    """Base of the kinds of labelled images: decodes opened images with the options in `reading`."""

    reading: Reading = USUAL

    @property
    def shards(self) -> Sharded | None:
        """Which file each image is in; None for images in files of their own."""
        return None

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Name the place of an image for messages."""

    def key(self, index: int) -> str:
        """Return the name of an image inside the data set; its number if it has none."""
        return str(index)

    def content(self, index: int) -> bytes:
        """Return the bytes of an image's file, or its pixels when there is no file or opening decodes it."""
        with self.open(index) as image:
            return content_of(image, self.where(index), image.tobytes)

    def pixels(self, index: int) -> Pixels:
        """Decode an image to (height, width, 3). Raises `DataError` with its place when it is unreadable."""
        return decode(self.open(index), self.where(index), self.reading.decoder)


def content_of(image: Image.Image, where: str, other: Callable[[], bytes]) -> bytes:
    """Return the bytes of an opened image's file, and what `other` returns when it has none; it can still be decoded.

    Raises `ImageError` when the file is damaged.
    """
    try:
        if (file := getattr(image, "fp", None)) is None:
            return other()
        file.seek(0)
        return bytes(file.read())
    except FAILURES as error:
        raise unreadable(where, error) from error


class FileList(Images):
    """``<path> <label>`` per line, paths relative to `root`: the layout of the VTAB-1k folders.

    Raises `DataError` naming file and line for a missing list, a malformed line or a missing image.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.list = root / f"{split}.txt"
        if not self.list.is_file():
            raise DataError(
                f"{self.list}: missing; a task's folder holds train800.txt, val200.txt and test.txt with "
                "one '<image path> <label>' per line, and the images"
            )
        self.paths: list[Path] = []
        self.labels: list[int] = []
        self.sizes: list[int] = []
        self.lines: list[int] = []
        for number, line in enumerate(self.list.read_text("utf-8", "surrogateescape").splitlines(), 1):
            name, _, label = line.strip().rpartition(" ")
            if not name or not label.lstrip("-").isdecimal():
                fault(DataError(f"{self.list}, line {number}: {line[:80]!r} is not '<image path> <label>'"))
                continue
            try:
                path = inside(root, name, f"{self.list}, line {number}")
                size = path.stat().st_size
            except DataError as error:
                fault(error)
                continue
            except OSError:
                fault(DataError(f"{root / name} ({self.list.name}, line {number}): no such image"))
                continue
            self.paths.append(path)
            self.labels.append(int(label))
            self.sizes.append(size)
            self.lines.append(number)

    def where(self, index: int) -> str:
        """Name an image's file and its line in the list."""
        return f"{self.paths[index]} ({self.list.name}, line {self.lines[index]})"

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return open_image(self.paths[index], self.where(index), self.reading, self.sizes[index])


class HubImages(Images):
    """The image column of a split of a Hugging Face data set (hub name or local folder).

    Raises `DataError` when the data set cannot be loaded, has no such split, or does not have exactly one image column.
    """

    def __init__(self, name: str, config: str, split: str, image: str | None, alone: bool) -> None:
        self.place = f"hf:{name} ({config}), split {split}"
        splits = load_hub(name, config, alone)
        if split not in splits:
            raise DataError(f"{self.place}: missing; the data set has {', '.join(sorted(splits))}")
        rows = splits[split]
        self.image = self.column(rows, image, "image", ("Image",))
        import datasets
        import pyarrow.compute

        self.rows = rows
        for name, feature in rows.features.items():  # all image columns: a row is read with all of them
            if name == self.image or isinstance(feature, datasets.Image):
                self.rows = self.rows.cast_column(name, datasets.Image(decode=False))
        stored = self.rows.data.column(self.image)
        sizes = pyarrow.compute.binary_length(pyarrow.compute.struct_field(stored, "bytes")).to_pylist()
        files = pyarrow.compute.struct_field(stored, "path").to_pylist()
        self.sizes: Sequence[int] = [
            file_size(Path(file or "")) if size is None else size for size, file in zip(sizes, files, strict=True)
        ]
        self.files: Sequence[str | None] = [  # for images that are not stored in the data set itself
            file if size is None else None for size, file in zip(sizes, files, strict=True)
        ]

    def column(self, rows: Any, named: str | None, kind: str, types: tuple[str, ...]) -> str:
        """Return the named column, or the only one of a kind. Raises `DataError` naming the columns."""
        if named is not None and named in rows.column_names:
            return named
        fitting = [name for name, feature in rows.features.items() if type(feature).__name__ in types]
        if not fitting and kind in rows.column_names:
            fitting = [kind]
        if named is not None or len(fitting) != 1:
            raise DataError(
                f"{self.place}: which column holds the {kind}? The columns are "
                f"{', '.join(rows.column_names)}; name one with --set data.{kind}_column=NAME"
            )
        return str(fitting[0])

    def where(self, index: int) -> str:
        """Name the data set and the row."""
        return f"{self.place}, row {index}"

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        where = self.where(index)
        return open_image(stored_file(self.rows[index][self.image], where), where, self.reading, self.sizes[index])


def stored_file(stored: Any, where: str) -> Path | io.BytesIO:
    """Return the image in a row of a hub data set, stored as bytes or a file name. Raises `ImageError`."""
    if stored is None or (stored["bytes"] is None and stored["path"] is None):
        raise ImageError(f"{where}: empty; every row needs its image")
    return Path(stored["path"]) if stored["bytes"] is None else io.BytesIO(stored["bytes"])


class HubSplit(HubImages):
    """A split of a Hugging Face data set with an image and a label column.

    Raises `DataError` as `HubImages` does, and for labels that are not class numbers.
    """

    def __init__(self, name: str, config: str, split: str, image: str | None, label: str | None, alone: bool) -> None:
        super().__init__(name, config, split, image, alone)
        self.label = self.column(self.rows, label, "label", ("ClassLabel",))
        self.classes: tuple[str, ...] = tuple(getattr(self.rows.features[self.label], "names", None) or ())
        self.labels: Sequence[int] = [self._class(index, value) for index, value in enumerate(self.rows[self.label])]

    def _class(self, index: int, value: object) -> int:
        if not isinstance(value, int):
            raise DataError(
                f"{self.where(index)}: label {value!r} is not a class number; name another column with "
                "--set data.label_column=NAME"
            )
        return value


@cache
def load_hub(name: str, config: str, alone: bool) -> Any:
    """Return the splits of a hub data set's configuration; with `alone`, a single one may have another name.

    Raises `DataError` when it cannot be loaded or has no such configuration.
    """
    offline()  # before the import, which reads it
    import datasets

    try:
        configs = datasets.get_dataset_config_names(name)
        chosen = config if config in configs else configs[0] if alone and len(configs) == 1 else None
        if chosen is not None:
            return datasets.load_dataset(name, chosen)
    except (OSError, ValueError, RuntimeError, IndexError) as error:  # the latter for an empty name
        raise DataError(
            f"--data hf:{name}: not loaded ({str(error).splitlines()[0][:160]}). On a machine with a "
            f"network: 'hf download --repo-type dataset {name}', then copy the hub cache here, or pass "
            "a local folder of parquet files as hf:FOLDER"
        ) from error
    raise DataError(
        f"--data hf:{name}: no configuration {config!r}; it has {', '.join(configs)}. "
        "VTAB needs one per task (--tasks chooses); elsewhere write hf:NAME:CONFIGURATION"
    )


class SceneSplit(Images):
    """The built-in scenes with the labels of one demo task; scene numbers `start` up to `stop`."""

    def __init__(self, task: str, start: int, stop: int) -> None:
        self.task, self.start = task, start
        self.labels: Sequence[int] = [synthetic.label(synthetic.demo_scene(i), task) for i in range(start, stop)]
        self.sizes: Sequence[int] = [3 * synthetic.SCENE_SIZE**2] * len(self.labels)  # scenes are not encoded

    def where(self, index: int) -> str:
        """Name the scene's number."""
        return f"demo scene {self.start + index}"

    def content(self, index: int) -> bytes:
        """Return the scene's number, which decides its pixels."""
        return self.where(index).encode()

    def open(self, index: int) -> Image.Image:
        """Return the image of a scene, 64x64."""
        return Image.fromarray(_scene_pixels(self.start + index))


@cache
def _scene_pixels(number: int) -> Pixels:
    # All demo tasks look at the same scenes: 12 kB each, drawn once per process.
    image, _ = synthetic.render(synthetic.demo_scene(number))
    return image
