"""webdataset shards: tar files of pictures with other files of the same name, read at random."""

from __future__ import annotations

import io
import itertools
import os
import re
import tarfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image

from dpn_cli.data.labelled import Images, number_names
from dpn_cli.data.reading import SUFFIXES, open_image
from dpn_cli.errors import DataError
from dpn_cli.run.files import read_named


def expand(pattern: str) -> list[Path]:
    """Return the files of ``shards/train-{000..009}.tar``, ``{a,b}.tar`` or ``*.tar``.

    Raises `DataError` when no file matches, when one that the pattern names is missing, or when one is not a file.
    """
    # Neither Python nor any dependency of dpn expands braces.
    if braces := re.search(r"\{([^{}]*)\}", pattern):
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
        words = (
            (f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), int(ends[2]) + 1))
            if ends
            else braces[1].split(",")
        )
        parts = (expand(pattern[: braces.start()] + word + pattern[braces.end() :]) for word in words)
        return list(itertools.chain.from_iterable(parts))
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
class Member:
    """A picture in a shard: its name, the place of its bytes, and the files of the same name by ending."""

    name: str
    offset: int
    size: int
    beside: dict[str, bytes]


class ShardPictures(Images):
    """The pictures of uncompressed tar files, read in any order; an index of the files is made once.

    `take` receives the files beside each picture. Raises `DataError` for a shard that is not a tar file.
    """

    def __init__(self, pattern: str, endings: tuple[str, ...]) -> None:
        self.paths = expand(pattern)
        self.names: list[str] = []
        self.places: list[tuple[int, int, int]] = []  # shard, offset, bytes
        for shard, path in enumerate(self.paths):
            for member in members(path, endings):
                if self.take(path, member):
                    self.names.append(f"{path.name}/{member.name}")
                    self.places.append((shard, member.offset, member.size))
        self.sizes: Sequence[int] = [size for _, _, size in self.places]

    @abstractmethod
    def take(self, path: Path, member: Member) -> bool:
        """Note what belongs to a picture of shard `path`; False leaves the picture out."""

    def where(self, index: int) -> str:
        """Name a picture's shard and its name in it."""
        return str(self.paths[self.places[index][0]].parent / self.names[index])

    def key(self, index: int) -> str:
        """Return a picture's name inside the data set."""
        return self.names[index]

    def open(self, index: int) -> Image.Image:
        """Open a picture, not decoded yet."""
        shard, offset, size = self.places[index]
        with self.paths[shard].open("rb") as file:
            file.seek(offset)
            return open_image(io.BytesIO(file.read(size)), self.where(index), self.reading)


class Shards(ShardPictures):
    """The pictures of uncompressed tar files, each with a ``.cls`` (a class number) of the same name.

    Class names are those in a ``classnames.txt`` beside the shards, else the numbers. Raises `DataError` for a shard
    that is not a tar file, a picture without a label, or a label that is not a number.
    """

    def __init__(self, pattern: str) -> None:
        labels: list[int] = []
        self.labels: Sequence[int] = labels
        self._append = labels.append
        super().__init__(pattern, ("cls",))
        if not labels:
            raise DataError(f"--data wds:{pattern}: no picture with a .cls beside it")
        listed = self.paths[0].parent / "classnames.txt"
        if not os.path.lexists(listed):
            self.classes = number_names(self, f"wds:{pattern}")
            return
        content = read_named(listed, str(listed), "it names the shards' classes, a name a line")
        self.classes = tuple(content.decode("utf-8", "surrogateescape").splitlines())
        if len(self.classes) <= max(labels):
            raise DataError(f"{listed}: {len(self.classes)} names, and the shards have the classes 0 to {max(labels)}")

    def take(self, path: Path, member: Member) -> bool:
        """Note a picture's class."""
        try:
            label = int(member.beside.get("cls", b"-1"))
        except ValueError as error:
            raise DataError(f"{path}: {member.name}: its .cls is not a number ({error})") from error
        if label < 0:
            key = PurePosixPath(member.name).with_suffix("")
            raise DataError(f"{path}: {member.name} has no {key}.cls with a class number")
        self._append(label)
        return True


def members(path: Path, endings: tuple[str, ...]) -> Iterator[Member]:
    """Yield every picture of a shard in its order, with the files beside it that have one of the endings."""
    pictures: dict[str, tuple[str, int, int]] = {}
    beside: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                stem, _, ending = PurePosixPath(member.name).name.partition(".")
                key = str(PurePosixPath(member.name).with_name(stem))
                if f".{ending.lower()}" in SUFFIXES:
                    pictures[key] = member.name, member.offset_data, member.size
                elif ending in endings and (file := archive.extractfile(member)):
                    beside.setdefault(key, {})[ending] = file.read()
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not an uncompressed tar file of pictures ({' '.join(str(error).split())[:120]})"
        ) from error
    for key, (name, offset, size) in pictures.items():
        yield Member(name, offset, size, beside.get(key, {}))
