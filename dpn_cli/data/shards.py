"""webdataset shards: tar files of pictures with a label beside each, read at random."""

from __future__ import annotations

import io
import itertools
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from PIL import Image

from dpn_cli.data.images import SUFFIXES
from dpn_cli.data.labelled import Images, open_image
from dpn_cli.errors import DataError


def expand(pattern: str) -> list[Path]:
    """Return the files of ``shards/train-{000..009}.tar``, ``{a,b}.tar`` or ``*.tar``.

    Raises `DataError` when none of them is there, or one that the pattern names is missing.
    """
    if braces := re.search(r"\{([^{}]*)\}", pattern):
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
        words = (
            [f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), int(ends[2]) + 1)]
            if ends
            else braces[1].split(",")
        )
        parts = (expand(pattern[: braces.start()] + word + pattern[braces.end() :]) for word in words)
        return list(itertools.chain.from_iterable(parts))
    path = Path(pattern).expanduser()
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise DataError(f"--data wds:{pattern}: no such file")
    return found


class Shards(Images):
    """The pictures of uncompressed tar files, each with a ``.cls`` (a class number) of the same name.

    An index of the files is made once; pictures are then read in any order. Class names are those in a
    ``classnames.txt`` beside the shards, else the numbers. Raises `DataError` for a shard that is no tar file, a
    picture without a label or a label that is no number.
    """

    def __init__(self, pattern: str) -> None:
        self.paths = expand(pattern)
        self.names: list[str] = []
        self.places: list[tuple[int, int, int]] = []  # shard, offset, bytes
        labels = []
        for shard, path in enumerate(self.paths):
            for name, offset, size, label in members(path):
                self.names.append(f"{path.name}/{name}")
                self.places.append((shard, offset, size))
                labels.append(label)
        if not labels:
            raise DataError(f"--data wds:{pattern}: no picture with a .cls beside it")
        self.labels: Sequence[int] = labels
        self.sizes: Sequence[int] = [size for _, _, size in self.places]
        listed = self.paths[0].parent / "classnames.txt"
        count = 1 + max(labels)
        names = listed.read_text("utf-8").splitlines() if listed.is_file() else [str(i) for i in range(count)]
        if len(names) < count:
            raise DataError(f"{listed}: {len(names)} names, and the shards have the classes 0 to {count - 1}")
        self.classes = tuple(names)

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
            return open_image(io.BytesIO(file.read(size)), self.where(index))


def members(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, offset, size and label of every picture of a shard, in its order."""
    pictures: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                stem, _, ending = PurePosixPath(member.name).name.partition(".")
                key = str(PurePosixPath(member.name).with_name(stem))
                if f".{ending.lower()}" in SUFFIXES:
                    pictures[key] = member.name, member.offset_data, member.size
                elif ending == "cls":
                    file = archive.extractfile(member)
                    labels[key] = int(file.read()) if file else -1
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not an uncompressed tar file of pictures and .cls numbers ({' '.join(str(error).split())[:120]})"
        ) from error
    for key, (name, offset, size) in pictures.items():
        if labels.get(key, -1) < 0:
            raise DataError(f"{path}: {name} has no {key}.cls with a class number")
        yield name, offset, size, labels[key]
