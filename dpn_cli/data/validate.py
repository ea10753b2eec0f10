"""Every image of a split decoded once: what is unreadable, what is there twice, and how it is stored.

Two images are the same when their decoded pixels are, however the files differ; `hash_pixels` tells by 64 bits, with
which two unequal ones among a million agree once in 40 million data sets.
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
from dpn_cli.run.console import Done, uncounted

# Images that a process decodes before it hands over what it has seen.
CHUNK_IMAGES = 64


@dataclass(frozen=True)
class ImageRecord:
    """Facts about one image: digest, sides in pixels, and storage.

    `counts` are what else was counted in it, `wrong` what else is wrong with it.
    """

    digest: int
    width: int
    height: int
    stored: str
    counts: Mapping[int, int] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


InspectImage = Callable[[int], ImageRecord]


def inspect_image(split: LabelledImages, row: int) -> ImageRecord:
    """Decode an image of a split as a training does. Raises `DataError` when it is unreadable."""
    image = split.open(row)
    stored = describe_format(image)
    return describe_pixels(decode(image, split.where(row), split.reading.decoder), stored)


def describe_pixels(
    pixels: Pixels, stored: str, counts: Mapping[int, int] | None = None, wrong: Sequence[str] = ()
) -> ImageRecord:
    """Describe the pixels (h, w, 3) of an image."""
    height, width, _ = pixels.shape
    return ImageRecord(hash_pixels(pixels), width, height, stored, counts or {}, tuple(wrong))


def hash_pixels(pixels: Pixels) -> int:
    """Return 64 bits that tell images apart by their pixels and sides."""
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
    def __init__(self, see: InspectImage, count: int) -> None:
        self.see, self.count = see, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> ImageRecord | DataError:
        try:
            return self.see(row)
        except DataError as error:
            return error  # raised in a worker, it would come back wrapped in the worker's traceback


@dataclass
class SplitInspection:
    """Facts about a split by row: digests (n,), sides (n, 2) as width and height; zeros where unreadable.

    Args:
        name: the split's name.
        where: names the place of a row.
        side: the splits of one side may share images.
        unreadable: why rows cannot be decoded.
        wrong: what is wrong with images that can.
        stored: how many images are stored in which way.
        counts: the sums of what was counted in the images.
        holding: in how many images there is any of it.
    """

    name: str
    where: Callable[[int], str]
    digests: npt.NDArray[np.uint64]
    sides: npt.NDArray[np.int32]
    side: str = ""
    unreadable: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stored: Counter[str] = field(default_factory=Counter)
    counts: Counter[int] = field(default_factory=Counter)
    holding: Counter[int] = field(default_factory=Counter)

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
    where: Callable[[int], str],
    see: InspectImage,
    count: int,
    *,
    workers: int | Literal["auto"] = "auto",
    done: Done = uncounted,
) -> SplitInspection:
    """Look at `count` rows of a split with `see`, in processes where that pays; `done` is told how many are done.

    Raises `StoppedError` when a signal asks to stop, `WorkerError` when a process dies.
    """
    examined = SplitInspection(name, where, np.zeros(count, np.uint64), np.zeros((count, 2), np.int32))
    row = 0
    rows = _InspectedRows(see, count)
    with open_loader(rows, count_readers(workers, count), batch_size=CHUNK_IMAGES, collate_fn=list) as parts:
        for part in parts:
            signals.check_here()
            for one in part:
                _add_record(examined, row, one)
                row += 1
            done(len(part))
    return examined


def _add_record(examined: SplitInspection, row: int, one: ImageRecord | DataError) -> None:
    if isinstance(one, DataError):
        examined.unreadable[row] = str(one)
        return
    examined.digests[row], examined.sides[row] = one.digest, (one.width, one.height)
    examined.stored[one.stored] += 1
    examined.wrong += one.wrong
    examined.counts.update(one.counts)
    examined.holding.update(one.counts.keys())


RowLocation = tuple[SplitInspection, int]


def find_duplicates(parts: Sequence[SplitInspection]) -> Iterator[list[RowLocation]]:
    """Yield the places of each image that is there more than once in some splits, in their order."""
    if not parts:
        return
    rows = [part.readable for part in parts]
    digests = np.concatenate([part.digests[chosen] for part, chosen in zip(parts, rows, strict=True)])
    which = np.concatenate([np.full(len(chosen), number) for number, chosen in enumerate(rows)])
    row = np.concatenate(rows)
    order = np.argsort(digests, kind="stable")  # equal digests lie beside each other
    ends = np.append(np.flatnonzero(np.diff(digests[order])) + 1, len(order))
    lengths = np.diff(ends, prepend=0)
    runs = [order[end - length : end] for end, length in zip(ends[lengths > 1], lengths[lengths > 1], strict=True)]
    for run in sorted(runs, key=lambda run: int(run[0])):
        yield [(parts[which[place]], int(row[place])) for place in run]
