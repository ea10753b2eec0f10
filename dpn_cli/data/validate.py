"""Inspection of every image of a split: unreadable ones, duplicates, sizes and formats.

Two images are the same when their decoded pixels are, however the files differ. `hash_pixels` compares 64 bits: two
unequal images among a million agree once in 40 million data sets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from dpn_cli.data.decode import Pixels, decode
from dpn_cli.data.pixels import count_readers
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.thread_loader import ThreadedDataset
from dpn_cli.data.workers import open_loader
from dpn_cli.errors import DataError
from dpn_cli.run import signals
from dpn_cli.run.console import OnProgress, ignore_progress

# Images that a process decodes before it hands over their records.
CHUNK_IMAGES = 64


@dataclass(frozen=True)
class ImageRecord:
    """Facts about one image: digest, sides in pixels, format, pixels by label, and problems other than decoding."""

    digest: int
    width: int
    height: int
    format: str
    counts: Mapping[int, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


InspectImage = Callable[[int], ImageRecord]
RowLocator = Callable[[int], str]


def inspect_image(split: LabelledImages, row: int) -> ImageRecord:
    """Decode an image of a split as a training does. Raises `DataError` when it is unreadable."""
    image = split.open(row)
    image_format = describe_format(image)
    return describe_pixels(decode(image, split.locate(row), split.reading.decoder), image_format)


def describe_pixels(
    pixels: Pixels, image_format: str, counts: Mapping[int, int] | None = None, problems: Sequence[str] = ()
) -> ImageRecord:
    """Describe the pixels (h, w, 3) of an image."""
    height, width, _ = pixels.shape
    return ImageRecord(hash_pixels(pixels), width, height, image_format, counts or {}, tuple(problems))


def hash_pixels(pixels: Pixels) -> int:
    """Return 64 bits of a hash over an image's pixels and sides."""
    digest = hashlib.sha256(repr(pixels.shape).encode())  # faster than BLAKE2 where the processor has instructions
    digest.update(np.ascontiguousarray(pixels).data)
    return int.from_bytes(digest.digest()[:8], "little")


def describe_format(image: Image.Image) -> str:
    """Name the format of an opened image, of a JPEG with its quality where libjpeg's usual tables were used."""
    if not isinstance(image, JpegImageFile):
        return image.format or "not encoded"
    quality = _qualities().get(tuple(image.quantization.get(0, ())))
    return "JPEG" if quality is None else f"JPEG {quality}"


@cache
def _qualities() -> dict[tuple[int, ...], int]:
    """Return the qualities of JPEGs by their table of luminance, as libjpeg makes them."""
    tables = {}
    for quality in range(100, 0, -1):
        buffer = BytesIO()
        Image.new("L", (8, 8)).save(buffer, "JPEG", quality=quality)
        with Image.open(buffer) as image:
            assert isinstance(image, JpegImageFile)
            tables[tuple(image.quantization[0])] = quality
    return tables


class _InspectedRows(ThreadedDataset["ImageRecord | DataError"]):
    def __init__(self, inspect: InspectImage, count: int) -> None:
        self.inspect, self.count = inspect, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> ImageRecord | DataError:
        try:
            return self.inspect(row)
        except DataError as error:
            return error  # raised in a worker, it would come back wrapped in the worker's traceback


@dataclass
class SplitInspection:
    """Facts about a split by row: digests (n,), sides (n, 2) as width and height; zeros where unreadable.

    Args:
        name: the split's name.
        locate: names the file of a row.
        side: the splits of one side may share images.
        unreadable: reasons by row.
        problems: those of readable images.
        formats: images by format.
        counts: pixels by label.
        images_with: images by label that they contain.
    """

    name: str
    locate: RowLocator
    digests: npt.NDArray[np.uint64]
    sides: npt.NDArray[np.int32]
    side: str = ""
    unreadable: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    counts: Counter[int] = field(default_factory=Counter)
    images_with: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.side = self.side or self.name

    @property
    def readable(self) -> npt.NDArray[np.int64]:
        """The rows that can be decoded."""
        mask = np.ones(len(self.digests), bool)
        mask[list(self.unreadable)] = False
        return np.flatnonzero(mask)


def inspect_split(
    name: str,
    locate: RowLocator,
    inspect: InspectImage,
    count: int,
    *,
    workers: int | Literal["auto"] = "auto",
    on_progress: OnProgress = ignore_progress,
) -> SplitInspection:
    """Inspect `count` rows of a split, in worker processes if that is faster.

    Raises `StoppedError` when a signal asks to stop, `WorkerError` when a process dies.
    """
    inspection = SplitInspection(name, locate, np.zeros(count, np.uint64), np.zeros((count, 2), np.int32))
    row = 0
    rows = _InspectedRows(inspect, count)
    with open_loader(rows, count_readers(workers, count), batch_size=CHUNK_IMAGES, collate_fn=list) as chunks:
        for chunk in chunks:
            signals.check_here()
            for record in chunk:
                _add_record(inspection, row, record)
                row += 1
            on_progress(len(chunk))
    return inspection


def _add_record(inspection: SplitInspection, row: int, record: ImageRecord | DataError) -> None:
    if isinstance(record, DataError):
        inspection.unreadable[row] = str(record)
        return
    inspection.digests[row], inspection.sides[row] = record.digest, (record.width, record.height)
    inspection.formats[record.format] += 1
    inspection.problems += record.problems
    inspection.counts.update(record.counts)
    inspection.images_with.update(record.counts.keys())


RowLocation = tuple[SplitInspection, int]


def find_duplicates(splits: Sequence[SplitInspection]) -> Iterator[list[RowLocation]]:
    """Yield the split and row of every copy of each image that occurs more than once, in order."""
    if not splits:
        return
    readable = [split.readable for split in splits]
    digests = np.concatenate([split.digests[rows] for split, rows in zip(splits, readable, strict=True)])
    split_numbers = np.concatenate([np.full(len(rows), number) for number, rows in enumerate(readable)])
    row = np.concatenate(readable)
    order = np.argsort(digests, kind="stable")  # equal digests become neighbours
    ends = np.append(np.flatnonzero(np.diff(digests[order])) + 1, len(order))
    lengths = np.diff(ends, prepend=0)
    runs = [order[end - length : end] for end, length in zip(ends[lengths > 1], lengths[lengths > 1], strict=True)]
    for run in sorted(runs, key=lambda run: int(run[0])):
        yield [(splits[split_numbers[index]], int(row[index])) for index in run]
