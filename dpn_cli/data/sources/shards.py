"""webdataset shards: tar files of images with other files of the same name, read at random, here or behind URLs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from dpn_cli.config.urls import is_url
from dpn_cli.data import remote
from dpn_cli.data.compact import PackedStrings
from dpn_cli.data.decode import SUFFIXES, open_image
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.remote import RemotePath
from dpn_cli.data.sources.base import Images, Shard, ShardIndex, number_classes
from dpn_cli.errors import DataError
from dpn_cli.run.files import read_named, read_object, replace_text

# Most bytes of a label or a caption next to an image.
MAX_TEXT_BYTES = 2**20


def expand_pattern(pattern: str) -> list[Shard]:
    """Return the files of ``shards/train-{000..009}.tar``, ``{a,b}.tar`` or ``*.tar``, in a folder or behind a URL.

    Raises `DataError` when no file matches, when one that the pattern names is missing, or when one is not a file, and
    `StoreError` for a URL that cannot be read.
    """
    if is_url(pattern):
        files = [file for part in _expand_braces(pattern) for file in remote.glob_files(part)]
        if not files:
            raise DataError(f"--data {pattern}: no such file")
        return list(remote.map_in_parallel(RemotePath.described, files))
    return [file for part in _expand_braces(pattern) for file in _glob_files(part)]


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield the patterns that one with braces stands for; neither Python nor any dependency of dpn expands them."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if not braces:
        yield pattern
        return
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    words = (
        (f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), int(ends[2]) + 1))
        if ends
        else braces[1].split(",")
    )
    for word in words:
        yield from _expand_braces(pattern[: braces.start()] + word + pattern[braces.end() :])


def _glob_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if not path.name:
        raise DataError(f"--data wds:{pattern}: which files? Write wds:shards/train-{{0000..1023}}.tar, or wds:*.tar")
    try:
        files = sorted(path.parent.glob(path.name))
    except ValueError as error:
        raise DataError(f"--data wds:{pattern}: not a pattern of file names ({error})") from error
    if not files:
        raise DataError(f"--data wds:{pattern}: no such file")
    for shard in files:
        if not shard.is_file():
            raise DataError(f"--data wds:{pattern}: {shard} is not a file")
    return files


@dataclass(frozen=True)
class ShardMember:
    """An image in a shard: its name, the offset of its bytes, and the files of the same name by ending."""

    name: str
    offset: int
    size: int
    sidecars: dict[str, bytes]


class ShardImages(Images):
    """The images of uncompressed tar files, read in any order; an index of the files is made once.

    `take` receives the files next to each image. Raises `DataError` for a shard that is not a tar file.
    """

    def __init__(self, pattern: str, endings: tuple[str, ...]) -> None:
        self.paths: list[Shard] = []
        self.names = PackedStrings()
        self.shard, self.offsets, sizes = array("q"), array("q"), array("q")
        self.sizes: Sequence[int] = sizes
        for shard, (path, images) in enumerate(index_shards(expand_pattern(pattern), endings)):
            self.paths.append(path)
            for member in images:
                if self.take(path, member):
                    self.names.append(f"{path.name}/{member.name}")
                    self.shard.append(shard)
                    self.offsets.append(member.offset)
                    sizes.append(member.size)

    @property
    def shards(self) -> ShardIndex:
        """Return the shard of each image."""
        return ShardIndex(self.paths, np.asarray(self.shard))

    @abstractmethod
    def take(self, path: Shard, member: ShardMember) -> bool:
        """Note what belongs to an image of shard `path`; False leaves the image out."""

    def locate(self, index: int) -> str:
        """Name an image's shard and its name in it."""
        path = self.paths[self.shard[index]]
        return f"{path}{self.names[index].removeprefix(path.name)}"

    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""
        return self.names[index]

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        with self.paths[self.shard[index]].open("rb") as file:
            file.seek(self.offsets[index])
            return open_image(io.BytesIO(file.read(self.sizes[index])), self.locate(index), self.reading)


class LabelledShardImages(ShardImages):
    """The images of uncompressed tar files, each with a ``.cls`` (a class number) of the same name.

    Class names are those in a ``classnames.txt`` next to the shards, else the numbers. Raises `DataError` for a shard
    that is not a tar file, an image without a label, or a label that is not a number.
    """

    def __init__(self, pattern: str) -> None:
        labels: list[int] = []
        self.labels: Sequence[int] = labels
        self._append = labels.append
        super().__init__(pattern, ("cls",))
        if not labels:
            raise DataError(f"--data wds:{pattern}: no image with a .cls next to it")
        names = self.paths[0].parent / "classnames.txt"
        content = _read_sidecar(names)
        if content is None:
            self.classes = number_classes(self, f"wds:{pattern}")
            return
        self.classes = tuple(content.decode("utf-8", "surrogateescape").splitlines())
        if len(self.classes) <= max(labels):
            problem = f"{len(self.classes)} names, and the shards have the classes 0 to {max(labels)}"
            report_error(DataError(f"{names}: {problem}"))

    def take(self, path: Shard, member: ShardMember) -> bool:
        """Note an image's class."""
        try:
            label = int(member.sidecars.get("cls", b"-1"))
        except ValueError as error:
            report_error(DataError(f"{path}: {member.name}: its .cls is not a number ({error})"))
            return False
        if label < 0:
            key = PurePosixPath(member.name).with_suffix("")
            report_error(DataError(f"{path}: {member.name} has no {key}.cls with a class number"))
            return False
        self._append(label)
        return True


def _read_sidecar(path: Shard) -> bytes | None:
    """Return the content of a file next to shards; None where there is none."""
    if isinstance(path, RemotePath):
        with contextlib.suppress(remote.MissingError):
            return path.read_bytes()
    elif os.path.lexists(path):
        return read_named(path, str(path), "it names the shards' classes, a name a line")
    return None


def index_shards(paths: Sequence[Shard], endings: tuple[str, ...]) -> Iterator[tuple[Shard, Iterable[ShardMember]]]:
    """Yield shards with their images; those behind URLs are fetched several at once, and come with a digest."""
    local_paths = [path for path in paths if isinstance(path, Path)]
    yield from ((path, iter_images(path, endings)) for path in local_paths)
    remote_paths = [path for path in paths if isinstance(path, RemotePath)]
    yield from remote.map_in_parallel(partial(_index_remote_shard, endings=endings), remote_paths)


def _index_remote_shard(path: RemotePath, endings: tuple[str, ...]) -> tuple[RemotePath, list[ShardMember]]:
    """Return a shard behind a URL, with the digest of its first copy, and its images.

    The list is kept in the cache, so that a shard is not fetched again for what is in it.
    """
    saved_index = path.cached.with_name(f"{path.cached.stem}-{'-'.join(endings)}.json")
    if (saved := read_object(saved_index)) is None:
        with path.open() as file:
            digest, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        images = [
            [one.name, one.offset, one.size, {ending: text.decode("latin-1") for ending, text in one.sidecars.items()}]
            for one in iter_images(path, endings)
        ]
        saved = {"sha256": digest, "size": size, "images": images}
        replace_text(saved_index, json.dumps(saved))
        remote.make_room(saved_index)
    remote.mark_used(saved_index)
    index = (
        ShardMember(name, offset, size, {ending: text.encode("latin-1") for ending, text in sidecars.items()})
        for name, offset, size, sidecars in saved["images"]
    )
    return replace(path, sha256=saved["sha256"], size=saved.get("size")), list(index)


def iter_images(path: Shard, endings: tuple[str, ...]) -> Iterator[ShardMember]:
    """Yield every image of a shard in its order, with the files next to it that have one of the endings."""
    images: dict[str, tuple[str, int, int]] = {}
    sidecars: dict[str, dict[str, bytes]] = {}
    try:
        with path.open("rb") as shard_file, tarfile.open(fileobj=shard_file, mode="r:") as archive:
            for member in archive:
                if member.issparse():  # whose size is whatever its header says
                    raise ValueError(f"{member.name} is stored with holes")
                stem, _, ending = PurePosixPath(member.name).name.partition(".")
                key = str(PurePosixPath(member.name).with_name(stem))
                if f".{ending.lower()}" in SUFFIXES:
                    images[key] = member.name, member.offset_data, member.size
                elif ending in endings and (file := archive.extractfile(member)):
                    if member.size > MAX_TEXT_BYTES:
                        raise ValueError(f"{member.name} has {member.size} bytes, too many for a label or a caption")
                    sidecars.setdefault(key, {})[ending] = file.read()
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not an uncompressed tar file of images ({' '.join(str(error).split())[:120]})"
        ) from error
    for key, (name, offset, size) in images.items():
        yield ShardMember(name, offset, size, sidecars.get(key, {}))


class UnlabelledShardImages(ShardImages):
    """All images of webdataset shards; every label is zero."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern, ())
        self.labels: Sequence[int] = [0] * len(self.sizes)

    def take(self, path: Shard, member: ShardMember) -> bool:
        """Take every image."""
        return True
