"""Encode images into the shards of a cache: all of a new shard, the changed ones of an existing shard."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dpn_cli.data.decode import Pixels, decode
from dpn_cli.data.pixels import PixelSet, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import Images, ShardIndex, read_image_bytes
from dpn_cli.errors import DataError, SaveError
from dpn_cli.run import signals
from dpn_cli.run.arrays import facts_of, save_array
from dpn_cli.run.console import LINE_EVERY, Console
from dpn_cli.run.cores import cores
from dpn_cli.run.files import replace_json
from tasks.lit.captions import CaptionedImages
from tasks.lit.features import ImageEncoder

# Bytes of a content's digest; images that are read between two checks for a stop signal.
DIGEST, FILES_PER_CALL = 16, 256

Json = dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """The file of `count` consecutive rows from `first` on."""

    file: Path
    first: int
    count: int

    def facts(self) -> Json | None:
        """Return ``stamps`` and ``contents`` of the rows, or None before they are saved. Raises `DataError`."""
        facts = facts_of(self.file)
        if facts is not None and not len(facts.get("stamps", ())) == len(facts.get("contents", ())) == self.count:
            raise DataError(f"{self.file}: damaged (its description is of other rows)")
        return facts


Work = Sequence[tuple[Shard, dict[int, str]]]
"""Shards, each with the rows to read and their files' current stamps."""


def content_digest(data: CaptionedImages, row: int) -> str:
    """Return a digest of an encoded image as hex. Raises `DataError` when it cannot be read."""
    return _digest(data.content(row)).hex()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:DIGEST]


def write_cache(data: CaptionedImages, encoder: ImageEncoder, work: Work, batch: int, console: Console) -> None:
    """Encode the rows of new shards, and of other shards the rows whose content has changed.

    Every shard is saved as soon as it is complete. Raises `DataError` for an unreadable image unless they are skipped,
    and for features that are not finite.
    """
    last_message_time, parts = time.monotonic(), list[_Part]()
    for number, (shard, stamps) in enumerate(work):
        rows = _find_changed(data, shard, stamps)
        if rows:
            parts.append(_Part(shard, stamps, rows))
        if time.monotonic() - last_message_time >= LINE_EVERY:
            last_message_time = time.monotonic()
            console.info(f"{number + 1} of {len(work)} shards compared")
    if parts:
        _encode(data, encoder, parts, batch, console)


def _find_changed(data: CaptionedImages, shard: Shard, stamps: dict[int, str]) -> list[int]:
    """Return the rows of a shard to encode; save the current stamps of the others' files."""
    try:
        facts = shard.facts()
    except DataError:
        facts = None
    if facts is None:
        return list(stamps)
    contents = dict(zip(stamps, _contents(data, list(stamps)), strict=True))
    saved = facts["contents"]
    unchanged_rows = [row for row, content in contents.items() if content and content == saved[row - shard.first]]
    for row in unchanged_rows:
        facts["stamps"][row - shard.first] = stamps[row]
    if unchanged_rows:
        with contextlib.suppress(SaveError):  # a read-only cache is compared again the next time
            replace_json(shard.file.with_suffix(".json"), facts)
    return sorted(stamps.keys() - set(unchanged_rows))


def _contents(data: CaptionedImages, rows: Sequence[int]) -> list[str]:
    """Return the digests of some encoded images, "" for one that cannot be read."""

    def digest(row: int) -> str:
        try:
            return content_digest(data, row)
        except DataError:
            return ""

    digests: list[str] = []
    with ThreadPoolExecutor(min(8, len(cores()))) as pool:  # reading and hashing need no interpreter
        for start in range(0, len(rows), FILES_PER_CALL):
            signals.check_here()
            digests += pool.map(digest, rows[start : start + FILES_PER_CALL])
    return digests


class _Part:
    """A shard whose rows are being encoded."""

    def __init__(self, shard: Shard, stamps: dict[int, str], rows: Sequence[int]) -> None:
        self.shard, self.current_stamps, self.rows, self.remaining = shard, stamps, rows, len(rows)
        self.features: npt.NDArray[np.float16] | None = None

    def _open(self, encoder: ImageEncoder) -> npt.NDArray[np.float16]:
        facts = self.shard.facts() if self.remaining < self.shard.count else None
        if facts is None:
            self.stamps, self.contents = [""] * self.shard.count, [""] * self.shard.count
            return np.zeros((self.shard.count, max(1, encoder.views), encoder.width), np.float16)
        self.stamps, self.contents = facts["stamps"], facts["contents"]
        features: npt.NDArray[np.float16] = np.load(self.shard.file)
        return features

    def put(self, row: int, features: Tensor | None, content: str, encoder: ImageEncoder) -> None:
        """Store a row's features (views, d), None for an unreadable image; the last row saves the shard."""
        if self.features is None:
            self.features = self._open(encoder)
        position = row - self.shard.first
        self.features[position] = 0 if features is None else features.numpy()
        self.stamps[position], self.contents[position] = self.current_stamps[row], content
        self.remaining -= 1
        if not self.remaining:
            save_array(self.shard.file, self.features, stamps=self.stamps, contents=self.contents)
            self.features = None


class _Reader(Images):
    """Images as `stream` reads them: pixels of one size and a digest of the encoded image, as one row of bytes.

    Both are of the same open file. The digest is computed first, so that an image that is written to in between counts
    as changed the next time.
    """

    def __init__(self, data: CaptionedImages, size: tuple[int, int]) -> None:
        self.data, self.size = data, size
        self.labels, self.sizes = data.labels, data.sizes

    @property
    def shards(self) -> ShardIndex | None:
        """The shard of each image."""
        return self.data.shards

    def locate(self, index: int) -> str:
        """Name an image's location."""
        return self.data.locate(index)

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.data.open(index)

    def pixels(self, index: int) -> Pixels:
        """Return the row of an image."""
        image, location = self.open(index), self.locate(index)
        digest = _digest(read_image_bytes(image, location, partial(self.data.content, index)))
        pixels = decode(image, location, self.data.reading.decoder)
        return np.concatenate([resize(pixels, self.size).numpy().ravel(), np.frombuffer(digest, np.uint8)])

    def row(self, pixels: Pixels) -> Tensor:
        """Return a row as a tensor; of other pixels, one of the same length."""
        return torch.from_numpy(np.resize(pixels, 3 * math.prod(self.size) + DIGEST))

    def split(self, read: PixelSet) -> tuple[Tensor, list[str]]:
        """Split a batch into images (b, 3, h, w) and digests."""
        images = read.images[:, :-DIGEST].view(-1, 3, *self.size)
        return images, [bytes(row.tolist()).hex() for row in read.images[:, -DIGEST:]]


def _encode(data: CaptionedImages, encoder: ImageEncoder, parts: Sequence[_Part], batch: int, console: Console) -> None:
    """Encode the rows of several shards in one stream of images."""
    owners = [part for part in parts for _ in part.rows]
    pending = [row for part in parts for row in part.rows]
    reader, last_shown = _Reader(data, encoder.read_size), time.monotonic()
    options: Json = {"workers": encoder.workers, "skip_bad": encoder.skip_bad}
    with stream(reader, reader.row, batch, rows=pending, **options) as stretches:
        for start, stretch in zip(range(0, len(pending), batch), stretches, strict=True):
            signals.check_here()
            encoded = _features(reader, stretch, encoder)
            end = min(start + batch, len(pending))
            for part, row in zip(owners[start:end], pending[start:end], strict=True):
                features, content = encoded.get(row, (None, ""))
                part.put(row, features, content, encoder)
            if time.monotonic() - last_shown >= LINE_EVERY:
                last_shown = time.monotonic()
                console.info(f"{end} of {len(pending)} images encoded")


def _features(reader: _Reader, stretch: PixelSet, encoder: ImageEncoder) -> dict[int, tuple[Tensor, str]]:
    """Return features (views, d) and digest of every image that could be read, by its row."""
    if not len(stretch.images):
        return {}
    images, contents = reader.split(stretch)
    rows = stretch.labels.tolist()
    features = encoder.encode_views(images, rows).half()
    if not features.isfinite().all():
        raise DataError("the image tower's features are not finite: its weights are damaged")
    return dict(zip(rows, zip(features, contents, strict=True), strict=True))
