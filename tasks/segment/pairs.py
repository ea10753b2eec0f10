"""Images with their masks: a folder in ADE20K's layout, a hub data set, or the built-in scenes."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from dpn_cli.config.paths import MASK_FOLDERS
from dpn_cli.config.urls import is_hub
from dpn_cli.data.decode import SUFFIXES, Pixels, ReadOptions, decode, file_size, open_image
from dpn_cli.data.file_index import find_files
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.resize import Size
from dpn_cli.data.sources import synthetic
from dpn_cli.data.sources.hub import find_hub_split, get_image_file, load_hub, parse_hub_source
from dpn_cli.errors import DataError
from tasks.segment.config import MaskData
from tasks.segment.labels import RawMask, read_mask

SPLITS = {"train": "training", "val": "validation"}
DEMO_SPLITS = {"train": (0, 1000), "val": (1000, 1200)}
MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp")
# Usual names of the mask column of hub data sets.
MASK_COLUMNS = ("annotation", "mask", "label", "labels", "segmentation", "segmentation_mask", "semantic_segmentation")
# An image that is read at a reduced size would not fit its mask.
WHOLE = ReadOptions(shrink=False)


class Pairs(ABC):
    """A split of images and masks, which are opened on demand with the options in `reading`.

    `names` identify the pairs, in alphabetical order or a hub data set's own; `sizes` are the encoded bytes of
    image and mask.
    """

    names: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    reading: ReadOptions = WHOLE

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def locate(self, index: int) -> str:
        """Name the location of an image for messages."""

    @abstractmethod
    def locate_mask(self, index: int) -> str:
        """Name the location of a mask for messages."""

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet. Raises `DataError` with its location when it is not an image."""

    @abstractmethod
    def open_mask(self, index: int) -> Image.Image:
        """Open a mask, not decoded yet. Raises `DataError` with its location when it is not an image."""

    @property
    def mask_reading(self) -> ReadOptions:
        """The options for masks, whose values are no colours: they are never turned."""
        return replace(self.reading, exif=False)

    def load(self, index: int) -> tuple[Pixels, RawMask]:
        """Decode a pair to pixels (h, w, 3) and raw mask (h, w).

        Raises `DataError` with its location when one is unreadable, or they differ in size.
        """
        pixels = decode(self.open(index), self.locate(index), self.reading.decoder)
        return pixels, self.load_mask(index, (pixels.shape[0], pixels.shape[1]))

    def load_mask(self, index: int, size: Size) -> RawMask:
        """Decode a mask to its raw values. Raises `DataError` when it is unreadable or not of its image's size."""
        mask = read_mask(self.open_mask(index), self.locate_mask(index))
        if mask.shape != size:
            remedy = "a mask has one value for every pixel of its image"
            if mask.shape == size[::-1]:
                state, flag = ("as stored", "--no-exif") if self.reading.exif else ("upright", "--exif")
                remedy += f"; if it was drawn for the image {state}, add {flag}"
            raise DataError(
                f"{self.locate_mask(index)}: the mask has {mask.shape[1]}x{mask.shape[0]} pixels, its image "
                f"{size[1]}x{size[0]}; {remedy}"
            )
        return mask


class FolderPairs(Pairs):
    """``images/SPLIT/NAME.jpg`` with ``annotations/SPLIT/NAME.png``, folders inside them included.

    Raises `DataError` for a missing folder, an image without annotation, an annotation without image, and two of one
    name.
    """

    def __init__(self, root: Path, split: str) -> None:
        folders = root / "images" / split, root / "annotations" / split
        for folder in folders:
            if not folder.is_dir():
                raise DataError(
                    f"{folder}: missing; a data set holds images/training/NAME.jpg with "
                    "annotations/training/NAME.png, and the same for validation"
                )
        images, masks = (
            _files(folder, kinds) for folder, kinds in zip(folders, (SUFFIXES, MASK_SUFFIXES), strict=True)
        )
        for files, partners, kind in ((images, masks, "annotation"), (masks, images, "image")):
            unpaired = [name for name in files if name not in partners]
            folder = folders[1] if kind == "annotation" else folders[0]
            for name in unpaired:
                report_error(
                    DataError(
                        f"{files[name]}: no {kind} of that name in {folder} "
                        f"({len(unpaired)} of {len(files)} have none); every image needs its mask"
                    )
                )
        if not images:
            raise DataError(f"{folders[0]}: no image in it ({', '.join(sorted(SUFFIXES))})")
        self.names = [name for name in images if name in masks]
        self.images, self.masks = [images[name] for name in self.names], [masks[name] for name in self.names]
        self.sizes = [(file_size(a), file_size(b)) for a, b in zip(self.images, self.masks, strict=True)]

    def locate(self, index: int) -> str:
        """Name an image's file."""
        return str(self.images[index])

    def locate_mask(self, index: int) -> str:
        """Name a mask's file."""
        return str(self.masks[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return open_image(self.images[index], self.locate(index), self.reading, self.sizes[index][0])

    def open_mask(self, index: int) -> Image.Image:
        """Open a mask, not decoded yet."""
        return open_image(self.masks[index], self.locate_mask(index), self.mask_reading, self.sizes[index][1])


def _files(folder: Path, kinds: Collection[str]) -> dict[str, Path]:
    """Return files of some kinds by their name without ending, in alphabetical order.

    Raises `DataError` when two differ only in the ending.
    """
    files: dict[str, Path] = {}
    for path, _ in find_files(folder, kinds):
        if path.name[0] == ".":
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in files:
            raise DataError(f"{files[name]} and {path.name}: two files of one name, and it pairs images with masks")
        files[name] = path
    return files


class HubPairs(Pairs):
    """A split of a Hugging Face data set (hub name or local folder) with a column of images and one of masks.

    Raises `DataError` when it cannot be loaded, or its columns of images and masks are ambiguous.
    """

    def __init__(self, location: str, split: str, image: str | None, mask: str | None) -> None:
        import datasets

        hub_split = find_hub_split(location, split)
        rows = load_hub(*parse_hub_source(location), True)
        if hub_split is None:
            raise DataError(f"--data {location}: no {split} split; the data set has {', '.join(sorted(rows))}")
        rows = rows[hub_split]
        self.location = f"{location}, split {hub_split}"
        images = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
        mask = mask or next((name for name in MASK_COLUMNS if name in images), None)
        image_columns = [name for name in images if name != mask]
        image = image or (
            "image" if "image" in image_columns else image_columns[0] if len(image_columns) == 1 else None
        )
        if image not in images or mask not in images:
            raise DataError(
                f"{self.location}: which columns hold images and masks? The columns of images are "
                f"{', '.join(images) or 'none'}; name them with --image-column and --mask-column"
            )
        self.columns = str(image), str(mask)
        for name in self.columns:
            rows = rows.cast_column(name, datasets.Image(decode=False))
        self.rows = rows
        self.names = [f"row {index}" for index in range(len(rows))]
        lengths = [self._lengths(name) for name in self.columns]
        self.sizes = list(zip(*lengths, strict=True))

    def _lengths(self, column: str) -> list[int]:
        import pyarrow.compute

        encoded = pyarrow.compute.struct_field(self.rows.data.column(column), "bytes")
        return list(pyarrow.compute.binary_length(encoded).fill_null(0).to_pylist())

    def _open(self, index: int, column: int, location: str, reading: ReadOptions) -> Image.Image:
        return open_image(get_image_file(self.rows[index][self.columns[column]], location), location, reading)

    def locate(self, index: int) -> str:
        """Name data set, split and row."""
        return f"{self.location}, row {index}"

    def locate_mask(self, index: int) -> str:
        """Name data set, split, row and column."""
        return f"{self.locate(index)}, column {self.columns[1]}"

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self._open(index, 0, self.locate(index), self.reading)

    def open_mask(self, index: int) -> Image.Image:
        """Open a mask, not decoded yet."""
        return self._open(index, 1, self.locate_mask(index), self.mask_reading)


class ScenePairs(Pairs):
    """The built-in scenes with their masks, 64x64; scene numbers `start` up to `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.names = [f"scene {number:04d}" for number in range(start, stop)]
        self.sizes = [(3 * synthetic.SCENE_SIZE**2, synthetic.SCENE_SIZE**2)] * len(
            self.names
        )  # scenes are not encoded

    def locate(self, index: int) -> str:
        """Name the scene's number."""
        return f"demo {self.names[index]}"

    def locate_mask(self, index: int) -> str:
        """Name the scene's number."""
        return f"mask of demo {self.names[index]}"

    def open(self, index: int) -> Image.Image:
        """Return the image of a scene."""
        return Image.fromarray(_scene(self.start + index)[0])

    def open_mask(self, index: int) -> Image.Image:
        """Return the mask of a scene."""
        return Image.fromarray(_scene(self.start + index)[1])


@cache
def _scene(number: int) -> tuple[Pixels, Pixels]:
    return synthetic.render(synthetic.demo_scene(number))  # 16 kB each, drawn once per process


class PairsSubset(Pairs):
    """Some rows of a split."""

    def __init__(self, pairs: Pairs, rows: Sequence[int]) -> None:
        self.pairs, self.rows, self.reading = pairs, list(rows), pairs.reading
        self.names = [pairs.names[row] for row in self.rows]
        self.sizes = [pairs.sizes[row] for row in self.rows]

    def locate(self, index: int) -> str:
        """Name the location of an image in the full split."""
        return self.pairs.locate(self.rows[index])

    def locate_mask(self, index: int) -> str:
        """Name the location of a mask in the full split."""
        return self.pairs.locate_mask(self.rows[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.pairs.open(self.rows[index])

    def open_mask(self, index: int) -> Image.Image:
        """Open a mask, not decoded yet."""
        return self.pairs.open_mask(self.rows[index])


def open_pairs(data: MaskData, split: str) -> Pairs:
    """Open ``train`` or ``val`` of a config's data set. Raises `DataError`."""
    pairs = _open_pairs(data, split)
    pairs.reading = ReadOptions(data.decode, data.max_pixels, shrink=False, exif=data.exif)
    return pairs


def _open_pairs(data: MaskData, split: str) -> Pairs:
    source = data.source or "demo"
    if source == "demo":
        return ScenePairs(*DEMO_SPLITS[split])
    if is_hub(source):
        return HubPairs(source, split, data.image_column, data.mask_column)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise DataError(f"--data {source}: {MASK_FOLDERS}")
    return FolderPairs(root, SPLITS[split])


def take(pairs: Pairs, fraction: float) -> Pairs:
    """Return a fraction of a split, rounded down: the first pairs of a fixed shuffle, so subsets are nested.

    App. G does not say which images; the shuffle is NumPy's legacy generator with seed 0, the same on every machine.
    """
    if fraction == 1:
        return pairs
    order = np.random.RandomState(0).permutation(len(pairs))
    return PairsSubset(pairs, sorted(order[: math.floor(fraction * len(pairs) + 1e-9)].tolist()))


def list_digest(pairs: Pairs) -> str:
    """Return a hash of the names in a split, which does not depend on its folder."""
    return hashlib.sha256(os.fsencode("\n".join(pairs.names))).hexdigest()[:16]


def fingerprint(pairs: Pairs) -> str:
    """Return a hash of the names and encoded sizes of a split, which distinguishes copies of a data set."""
    lines = (f"{name} {image} {mask}" for name, (image, mask) in zip(pairs.names, pairs.sizes, strict=True))
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:16]
