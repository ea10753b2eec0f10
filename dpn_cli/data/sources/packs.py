"""Packed data sets: a folder of webdataset shards, written once, with an index and a digest of each.

``manifest.json`` says what was packed and lists the shards; ``SPLIT/000000.tar`` holds images with a ``.cls`` next to
each, shuffled by the images' names; ``SPLIT/000000.npz`` says where in it each image lies.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dpn_cli.data.compact import pack_integers
from dpn_cli.data.decode import open_image
from dpn_cli.data.remote import RemotePath, map_in_parallel
from dpn_cli.data.sources.base import Images, Shard, ShardIndex
from dpn_cli.errors import DataError

MANIFEST, FORMAT = "manifest.json", "dpn-pack-1"
SHA256 = re.compile("[0-9a-f]{64}")
Json = dict[str, Any]


def read_manifest(root: Path | RemotePath) -> Json:
    """Return a pack's manifest. Raises `DataError` when it is damaged, `StoreError` when it cannot be fetched."""
    try:
        manifest: Json = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        shards = [shard for split in manifest["splits"].values() for shard in split.values()]
        if not all(isinstance(shard[key], int) for shard in shards for key in ("bytes", "images")):
            raise TypeError("bytes and images are numbers")
        if not all(Path(name).name == name for split in manifest["splits"].values() for name in split):
            raise ValueError("shards are files of the pack")
        if not all(SHA256.fullmatch(shard[key]) for shard in shards for key in ("sha256", "index_sha256")):
            raise ValueError("sha256 and index_sha256 are 64 digits")
        if not isinstance(manifest["classes"], list) or not isinstance(manifest["complete"], bool):
            raise TypeError("classes are a list, complete is true or false")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{root / MANIFEST}: a damaged manifest ({error}); delete the pack and make it again"
        ) from error
    return manifest


def is_pack(root: Path) -> bool:
    """Return whether a folder is a packed data set, by its manifest's first line."""
    try:
        with (root / MANIFEST).open(encoding="utf-8") as file:
            return FORMAT in file.read(100)
    except (OSError, ValueError):
        return False


class PackedImages(Images):
    """One split of a packed data set, read at random; every image's checksum is compared when it is read.

    Shards behind a URL are fetched when they are first read, and must have the manifest's digests. Raises `DataError`
    for a pack that is not complete, a missing shard or one of another size, and a damaged index.
    """

    def __init__(self, root: Path | RemotePath, split: str) -> None:
        manifest = read_manifest(root)
        if split not in manifest["splits"]:
            raise DataError(f"--data {root}: a pack of {', '.join(manifest['splits'])}, without {split}")
        advice = f"pack the data into {root} again: intact shards are kept"
        if not manifest["complete"]:
            raise DataError(f"--data {root}: the packing has not finished; {advice}")
        shards: dict[str, Json] = manifest["splits"][split]
        self.classes: tuple[str, ...] = tuple(manifest["classes"])
        self.paths = [
            _with_checksum(root / split / f"{shard}.tar", entry["sha256"], entry["bytes"])
            for shard, entry in shards.items()
        ]
        lists = [
            _with_checksum(root / split / f"{shard}.npz", entry["index_sha256"]) for shard, entry in shards.items()
        ]
        for _ in map_in_parallel(RemotePath.fetch, [path for path in lists if isinstance(path, RemotePath)]):
            pass
        parts: dict[str, list[Any]] = {name: [] for name in ("keys", "labels", "crc32", "offsets", "sizes", "shard")}
        for number, (path, listed, entry) in enumerate(zip(self.paths, lists, shards.values(), strict=True)):
            if isinstance(path, Path):
                size = path.stat().st_size if path.is_file() else None
                if size != entry["bytes"]:
                    damage = "missing" if size is None else f"{size} bytes instead of {entry['bytes']}"
                    raise DataError(f"{path}: a damaged pack ({damage}); {advice}")
            try:
                with listed.open("rb") as file, np.load(file, allow_pickle=False) as index:
                    for name, arrays in parts.items():
                        arrays.append(np.full(entry["images"], number) if name == "shard" else index[name])
            except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
                raise DataError(f"{listed}: a damaged pack ({error}); {advice}") from error
        arrays_by_name: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        self.labels: Sequence[int] = pack_integers(arrays_by_name["labels"])
        self.sizes: Sequence[int] = pack_integers(arrays_by_name["sizes"])
        self.keys, self.crc32 = arrays_by_name["keys"], arrays_by_name["crc32"]
        self.shard, self.offsets = arrays_by_name["shard"], arrays_by_name["offsets"]

    @property
    def shards(self) -> ShardIndex:
        """Return the shard of each image."""
        return ShardIndex(self.paths, self.shard)

    def locate(self, index: int) -> str:
        """Name an image's shard, and its name before it was packed."""
        return f"{self.paths[self.shard[index]]} ({self.key(index)})"

    def key(self, index: int) -> str:
        """Return an image's name in the data set that was packed."""
        return os.fsdecode(bytes(self.keys[index]))

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet. Raises `DataError` when its bytes have changed since it was packed."""
        path = self.paths[self.shard[index]]
        content = self._content(path, index)
        if zlib.crc32(content) != self.crc32[index] and isinstance(path, RemotePath):
            path.forget()
            content = self._content(path, index)
        if zlib.crc32(content) != self.crc32[index]:
            raise DataError(f"{self.locate(index)}: damaged since it was packed; pack the data again: the rest is kept")
        return open_image(io.BytesIO(content), self.locate(index), self.reading)

    def _content(self, path: Shard, index: int) -> bytes:
        with path.open("rb") as file:
            file.seek(int(self.offsets[index]))
            return file.read(self.sizes[index])


def _with_checksum(path: Shard, sha256: str, size: int | None = None) -> Shard:
    """Return a file of a pack; one behind a URL must have the digest, and the size."""
    return replace(path, sha256=sha256, size=size) if isinstance(path, RemotePath) else path
