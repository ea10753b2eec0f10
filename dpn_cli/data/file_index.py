"""Lists of the images in folders: a few bytes each, found in one pass, kept for folders of very many."""

from __future__ import annotations

import hashlib
import os
import stat
import time
import zipfile
import zlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpn_cli.config.paths import home
from dpn_cli.data.compact import PackedStrings, pack_integers
from dpn_cli.data.decode import SUFFIXES
from dpn_cli.errors import DataError, SaveError
from dpn_cli.run import signals
from dpn_cli.run.console import LINE_EVERY, print_message
from dpn_cli.run.files import real_path, replace_file

# The list of so many images is kept. Nobody edits images of larger sets one by one; checking each of them takes
# minutes on a disk of the network.
KEPT = 100_000
# A kept list is checked against every folder's dates, and the sizes of this many images.
SAMPLE = 1000
# Nanoseconds within which a folder may be written to twice without another date.
SAME_DATE = 2_000_000_000
# Part of the name of a kept list: lists of another form are not read.
FORM = "2"


@dataclass
class FileIndex:
    """Images below a folder in alphabetical order: names with forward slashes, and sizes in bytes.

    The first `counts[0]` are in the first of the folders that were asked for. `file` is where the list is kept.
    """

    names: PackedStrings = field(default_factory=PackedStrings)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    file: Path | None = None

    def forget(self) -> None:
        """Have the images looked for again the next time."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)


@dataclass
class _FolderStamps:
    """The folders that were walked through, each with dates and number, which change with the names in it."""

    names: PackedStrings = field(default_factory=PackedStrings)
    stamps: array[int] = field(default_factory=lambda: array("q"))

    def add(self, name: str, path: str) -> None:
        """Note a folder, before it is listed."""
        self.names.append(name)
        self.stamps.extend(_stamp(path))


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116  a Path for each of a million images takes most of the time
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def index_files(root: Path, subfolders: Sequence[str] = ("",)) -> FileIndex:
    """List the images in and below some folders of `root`.

    A list of many images is cached below `home`, until one of the folders changes. An image that was overwritten
    is noticed when it is opened, or in a sample. Logs their number every ten seconds. Raises `DataError`
    for a folder that cannot be read, `StoppedError` when a signal asks to stop.
    """
    file = _index_path(root, subfolders)
    if file and (saved_index := _load(file, root, subfolders)) is not None:
        return saved_index
    start_time, last_shown = time.time_ns(), time.monotonic()
    listing, folders = FileIndex(), _FolderStamps()
    for folder in subfolders:
        count_before = len(listing.names)
        for name, size in iter_files(str(root / folder), f"{folder}/" if folder else "", SUFFIXES, folders):
            signals.check_here()
            listing.names.append(name)
            listing.sizes.append(size)
            if time.monotonic() - last_shown >= LINE_EVERY:
                last_shown = time.monotonic()
                print_message(f"{root}: {len(listing.names)} images found")
        listing.counts.append(len(listing.names) - count_before)
    if file and len(listing.names) >= KEPT and max(folders.stamps[::3]) < start_time - SAME_DATE:
        with suppress(SaveError):  # the next run looks for them again
            _save(file, listing, folders, subfolders)
            listing.file = file
    return listing


def _index_path(root: Path, subfolders: Sequence[str]) -> Path | None:
    """Return where a list is kept; None for a user without a home."""
    description = f"{FORM} {'whole' if subfolders == ('',) else 'classes'} {real_path(root)}"
    with suppress(RuntimeError):
        return home() / "cache" / "listings" / f"{hashlib.sha256(os.fsencode(description)).hexdigest()[:24]}.npz"
    return None


def iter_files(
    top: str, prefix: str, suffixes: Collection[str] = SUFFIXES, folders: _FolderStamps | None = None
) -> Iterator[tuple[str, int]]:
    """Yield the images in and below a folder, with sizes in bytes, in the order of the parts of their paths.

    Names begin with `prefix`. A name that is not a regular file (a broken link, a FIFO) counts as an image of zero
    bytes: opening it fails, and it is reported or left out like any other unreadable image. Links to folders are not
    followed, and folders without permission are left out. Raises `DataError` for one that cannot be read. `folders`
    notes those that are walked through.
    """
    if folders is not None:
        folders.add(prefix, top)
    inner, files = set[str](), list[str]()
    try:
        with os.scandir(top) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    inner.add(entry.name)
                elif _suffix(entry.name) in suffixes:
                    files.append(entry.name)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise DataError(f"{top}: not readable ({error.strerror})") from error
    for name in sorted([*files, *inner]):
        path = f"{top}{os.sep}{name}"
        if name in inner:
            yield from iter_files(path, f"{prefix}{name}/", suffixes, folders)
        elif (size := _size(path)) is not None:
            yield prefix + name, size


def _suffix(name: str) -> str:
    """Return a name's ending as `Path.suffix` does, in small letters."""
    dot = name.rfind(".")
    return name[dot:].lower() if 0 < dot < len(name) - 1 else ""


def _size(path: str) -> int | None:
    """Return the size of a file, zero of what is not a regular one; None of a folder."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0
    if stat.S_ISDIR(status.st_mode):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _save(file: Path, listing: FileIndex, folders: _FolderStamps, subfolders: Sequence[str]) -> None:
    arrays = {
        **listing.names.arrays("name"),
        **folders.names.arrays("folder"),
        **PackedStrings(subfolders).arrays("within"),
        "sizes": np.asarray(listing.sizes),
        "counts": np.asarray(listing.counts),
        "stamps": np.asarray(folders.stamps),
    }

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file_object:
            np.savez(file_object, allow_pickle=False, **arrays)

    replace_file(file, save)


def _load(file: Path, root: Path, subfolders: Sequence[str]) -> FileIndex | None:
    """Return a kept list; None where there is none, it is damaged, or a folder or a file of a sample has changed."""
    try:
        with file.open("rb") as file_object, np.load(file_object, allow_pickle=False) as arrays:
            folders = PackedStrings.read(arrays, "folder")
            stamps_now = [number for folder in folders for number in _stamp(str(root / folder))]
            if stamps_now != arrays["stamps"].tolist() or PackedStrings.read(arrays, "within")[:] != list(subfolders):
                return None
            sizes, counts = (pack_integers(arrays[name]) for name in ("sizes", "counts"))
            listing = FileIndex(PackedStrings.read(arrays, "name"), sizes, counts, file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    rows = range(0, len(listing.names), max(1, len(listing.names) // SAMPLE))
    is_current = all(_size(str(root / listing.names[row])) == listing.sizes[row] for row in rows)
    return listing if is_current else None


def find_files(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[tuple[Path, int]]:
    """Return the images in a folder and below it in alphabetical order, with sizes in bytes; see `iter_files`."""
    return [(folder / name, size) for name, size in iter_files(str(folder), "", suffixes)]
