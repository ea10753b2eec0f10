"""Zip archives of data sets, unpacked into a known layout; nothing is written before all of an archive is checked."""

from __future__ import annotations

import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dpn_cli.data.decode import file_size
from dpn_cli.errors import DataError, DpnError, SaveError
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.files import make_folder, remove_leftovers, save_error

# More files or bytes than any data set here has; COCO's training images are 118,287 and take 19 GB.
MOST_FILES, MOST_BYTES = 500_000, 64 * 10**9
# Texts of annotations shrink to a tenth, images hardly at all; small files may be anything.
MOST_SHRUNK, SMALL = 200, 2**12
# What is in names that lead out of the folder: a root, a drive, a step upwards; and control characters.
UNSAFE = re.compile(r"^/|^[A-Za-z]:|\\|(?:^|/)\.\.(?:/|$)|[\x00-\x1f]")
CHUNK = 2**20


@dataclass(frozen=True)
class ArchiveLayout:
    """Contents of a data set's archives.

    The first group of `member` is a file's path in the unpacked folder; members that do not match are left out.
    `files` says how many files each folder has when everything is unpacked.
    """

    name: str
    archives: str
    member: re.Pattern[str]
    files: Mapping[str, int]


@dataclass(frozen=True)
class ArchiveEntry:
    """A file in an archive, and its path below the folder."""

    info: zipfile.ZipInfo
    target: str


def unpack(archives: Sequence[Path], layout: ArchiveLayout, out: Path, console: Console) -> dict[str, int]:
    """Unpack archives of a data set into `out`; returns how many files were written, kept and left out.

    Files that are there already in their full size are kept: each is written under another name first. Before anything
    is written, all names, sizes and the space on the disk are checked. Raises `DataError` for a file that is no zip
    archive or damaged, for members that lead out of the folder, are links, are encrypted or share a path, for more
    files or bytes than a data set has, and for an archive of something else; `DpnError` when `out` is no folder;
    `SaveError` for a full disk; `StoppedError` after a signal.
    """
    if out.exists() and not out.is_dir():
        raise DpnError(f"--out {out}: a file; name a folder")
    entries = {archive: _check_members(archive, layout) for archive in archives}
    left_out = sum(len(_members(archive)) - len(found) for archive, found in entries.items())
    missing = {
        archive: [entry for entry in found if file_size(out / entry.target) != entry.info.file_size]
        for archive, found in entries.items()
    }
    _check_space(out, [entry for found in missing.values() for entry in found])
    make_folder(out)
    remove_leftovers(out)
    written = sum(map(len, missing.values()))
    for archive, found in missing.items():
        with _open_archive(archive) as files, console.counting(archive.name, len(found)) as on_progress:
            for entry in found:
                signals.check_here()
                _write(files, entry, archive, out / entry.target)
                on_progress(1)
    os.sync()
    return {"written": written, "kept": sum(map(len, entries.values())) - written, "left_out": left_out}


def describe_missing(layout: ArchiveLayout, out: Path) -> list[str]:
    """Say of each folder that has another number of files than the data set how many it has."""
    counts = {folder: _count(out / folder) for folder in layout.files}
    return [
        f"{out / folder} has {count_noun(count, 'file')}, and {layout.name} {layout.files[folder]}"
        for folder, count in counts.items()
        if count != layout.files[folder]
    ]


def _count(folder: Path) -> int:
    try:
        return sum(path.is_file() for path in folder.iterdir() if path.name[0] != ".")
    except OSError:
        return 0


def _members(archive: Path) -> list[zipfile.ZipInfo]:
    with _open_archive(archive) as files:
        return [info for info in files.infolist() if not info.is_dir()]


def _open_archive(archive: Path) -> zipfile.ZipFile:
    try:
        if not stat.S_ISREG(archive.stat().st_mode):
            raise OSError(0, "not a regular file")
        return zipfile.ZipFile(archive)
    except OSError as error:
        raise DataError(f"{archive}: {error.strerror}; name the archive that you have") from error
    except zipfile.BadZipFile as error:
        raise DataError(f"{archive}: not a whole zip archive ({error}); download it again") from error


def _check_members(archive: Path, layout: ArchiveLayout) -> list[ArchiveEntry]:
    """Return the files of an archive that belong into the folder, all of them checked."""
    members = _members(archive)
    size = sum(info.file_size for info in members)
    if len(members) > MOST_FILES or size > MOST_BYTES:
        raise DataError(
            f"{archive}: {count_noun(len(members), 'file')} of {size / 1e9:.1f} GB; {layout.name} has less than "
            f"{MOST_FILES} files and {MOST_BYTES / 1e9:.0f} GB, so this is not it, and it is not unpacked"
        )
    entries, relative_paths = list[ArchiveEntry](), set[str]()
    for info in members:
        name = info.filename
        if UNSAFE.search(info.orig_filename):
            _refuse(archive, info, "a name that leads out of the folder, or that no file here can have")
        if stat.S_IFMT(info.external_attr >> 16) not in {0, stat.S_IFREG}:
            _refuse(archive, info, "a link or a device")
        if info.flag_bits & 1:
            _refuse(archive, info, "encrypted")
        if info.file_size > MOST_SHRUNK * max(info.compress_size, SMALL):
            _refuse(archive, info, f"{info.compress_size} bytes that unpack to {info.file_size}")
        if match := layout.member.fullmatch(name):
            if match[1] in relative_paths:
                _refuse(archive, info, f"the second one for {match[1]}")
            relative_paths.add(match[1])
            entries.append(ArchiveEntry(info, match[1]))
    if not entries:
        raise DataError(f"{archive}: holds nothing of {layout.name}; its archives are {layout.archives}")
    return entries


def _refuse(archive: Path, info: zipfile.ZipInfo, problem: str) -> NoReturn:
    raise DataError(f"{archive}: member {info.orig_filename!r}: {problem}; nothing of the archive is unpacked")


def _check_space(out: Path, entries: Sequence[ArchiveEntry]) -> None:
    bytes_needed = sum(entry.info.file_size for entry in entries)
    existing_folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing_folder).free
    if bytes_needed > free:
        raise SaveError(
            f"--out {out}: the files will take {bytes_needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make "
            "room, or pass another --out"
        )


def _write(opened: zipfile.ZipFile, entry: ArchiveEntry, archive: Path, target: Path) -> None:
    """Write a file, whose checksum is compared while it is unpacked."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened.open(entry.info) as member, temporary.open("wb") as file:
            shutil.copyfileobj(member, file, CHUNK)
        temporary.replace(target)  # not flushed one by one, which would take longer than unpacking
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"{archive}: member {entry.info.filename}: damaged ({reason}); download it again") from error
    except OSError as error:
        raise save_error(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)
