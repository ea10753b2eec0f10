"""Images in files of their own: folders, one folder per class, and lists of files."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dpn_cli.data.decode import DEFAULT_READ_OPTIONS, SUFFIXES, ReadOptions, open_image, resolve_below
from dpn_cli.data.file_index import find_files, index_files
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.sources.base import Images
from dpn_cli.errors import DataError


class FolderImages(Images):
    """The images in and below some folders of `root`, named as `index_files` does; the label is the folder's number."""

    def __init__(
        self, root: Path, subfolders: Sequence[str] = ("",), reading: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> None:
        self.root, self.reading, self.listing = root, reading, index_files(root, subfolders)
        self.sizes: Sequence[int] = self.listing.sizes
        folder_numbers = np.repeat(np.arange(len(subfolders), dtype=np.int32), self.listing.counts)
        self.labels: Sequence[int] = array("i", folder_numbers.tobytes())

    def path(self, index: int) -> Path:
        """Return an image's file."""
        return self.root / self.listing.names[index]

    def locate(self, index: int) -> str:
        """Name an image's file."""
        return str(self.path(index))

    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""
        return self.listing.names[index]

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        try:
            return open_image(self.path(index), self.locate(index), self.reading, self.sizes[index])
        except DataError:
            self.listing.forget()  # what is mended has another size, at the same date of its folder
            raise


class ClassFolders(FolderImages):
    """Images in one folder per class; classes are the folders' names in alphabetical order.

    Raises `DataError` for a folder without class folders, or a class without images.
    """

    def __init__(self, root: Path) -> None:
        self.classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        if not self.classes:
            raise DataError(f"{root}: no class folders; images go into {root}/CLASS/IMAGE.jpg")
        super().__init__(root, self.classes)
        for name, count in zip(self.classes, self.listing.counts, strict=True):
            if not count:
                kinds = ", ".join(sorted(SUFFIXES))
                report_error(DataError(f"{root / name}: a class without images ({kinds}); remove it"))


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
                report_error(DataError(f"{self.list}, line {number}: {line[:80]!r} is not '<image path> <label>'"))
                continue
            try:
                path = resolve_below(root, name, f"{self.list}, line {number}")
                size = path.stat().st_size
            except DataError as error:
                report_error(error)
                continue
            except OSError:
                report_error(DataError(f"{root / name} ({self.list.name}, line {number}): no such image"))
                continue
            self.paths.append(path)
            self.labels.append(int(label))
            self.sizes.append(size)
            self.lines.append(number)

    def locate(self, index: int) -> str:
        """Name an image's file and its line in the list."""
        return f"{self.paths[index]} ({self.list.name}, line {self.lines[index]})"

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return open_image(self.paths[index], self.locate(index), self.reading, self.sizes[index])


def find_image_files(paths: Sequence[Path]) -> list[Path]:
    """Return the images among files and folders. Raises `DataError` for a missing one or a folder without any."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            files = [entry for entry, _ in find_files(path)]
            if not files:
                raise DataError(f"{path}: no image in this folder ({', '.join(sorted(SUFFIXES))})")
            images += files
        elif path.exists() or path.is_symlink():
            images.append(path)
        else:
            raise DataError(f"{path}: no such image")
    return images
