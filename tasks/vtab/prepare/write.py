"""A task's folder: images as stored bytes or PNG, lists of them, digests of all files, and what they were made of.

A folder gets its name when everything in it is written: one that is there is whole.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dpn_cli.data.sources.base import fingerprint
from dpn_cli.data.sources.folder import FileList
from dpn_cli.errors import DataError, DpnError, SaveError
from dpn_cli.run import signals
from dpn_cli.run.console import Console, OnProgress
from dpn_cli.run.files import file_digest, read_object, replace_json, save_error
from tasks.vtab.prepare.builders import Builder
from tasks.vtab.prepare.sources import Example, Source, TfdsPart
from tasks.vtab.tasks import Task

MANIFEST, FORMAT = "manifest.json", "dpn-vtab-1"
# Digests in the format that ``sha256sum -c`` reads.
SUMS = "SHA256SUMS"
# The union of the two training splits, which other programs read; its images are those of the two.
UNION = "train800val200"
# How files of the kinds that TensorFlow Datasets stores begin.
KINDS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp"}
# A file takes whole blocks of the disk: half of one is lost.
BLOCK = 4096
Json = dict[str, Any]


def is_prepared(folder: Path) -> bool:
    """Return whether a task's folder was written here, with images as they were published."""
    manifest = read_object(folder / MANIFEST)
    return manifest is not None and manifest.get("format") == FORMAT


def partial(out: Path, task: Task) -> Path:
    """Return the location of a task's folder while it is being written."""
    return out / f".{task.folder}.partial"


def check_free(out: Path, tasks: Sequence[Task]) -> None:
    """Raise `DpnError` when a task's folder is there and holds something else."""
    if out.exists() and not out.is_dir():
        raise DpnError(f"--out {out}: a file; name a folder")
    for task in tasks:
        folder = out / task.folder
        if os.path.lexists(folder) and not is_prepared(folder):
            raise DpnError(f"{folder}: there already, and not written by this command; pass another --out")


def prepare(
    source: Source, tasks: Sequence[Task], builder: Builder, out: Path, console: Console, versions: Mapping[str, str]
) -> dict[str, Json]:
    """Write the folders of `tasks`, all made of one source, into `out`; returns their manifests.

    Warns where a split has another size than VTAB's. Raises
    `DataError` for a missing split, too few examples, a label outside the task's classes or an image of an unknown
    kind, `SaveError` when the disk is too small or a file cannot be written, `StoppedError` after a signal.
    """
    warnings = list(_other_sizes(source, builder))
    for text in warnings:
        console.warn(text)
    parts = source.parts({name: split.examples for name, split in builder.splits.items()})
    _check_space(parts, builder, tasks, out)
    folders = [_Folder(task, out) for task in tasks]
    names = " and ".join(task.name for task in tasks)
    try:
        for name, part in parts.items():
            expected = part.stop - part.start
            with console.counting(f"{names}, {name}", expected) as on_progress:
                count = _write_split(source, folders, name, builder.examples(part), on_progress)
            if not 0 < count == expected:
                raise DataError(f"{builder.name}: {part} has {count} examples, and {name} of {names} {expected}")
        description = {
            "builder": builder.name,
            "parts": {name: str(part) for name, part in parts.items()},
            "warnings": warnings,
            "versions": dict(versions),
        }
        return {folder.task.name: folder.finish(source, description) for folder in folders}
    except OSError as error:
        raise save_error(out, error) from error
    finally:
        for folder in folders:
            shutil.rmtree(folder.partial, ignore_errors=True)


def _other_sizes(source: Source, builder: Builder) -> Iterator[str]:
    """Yield what to say of splits that have another size than VTAB's. Raises `DataError` for a missing one."""
    for name, expected in source.sizes.items():
        if name not in builder.splits:
            raise DataError(f"{builder.name}: no split {name}; delete the data set's folder, and prepare it again")
        if (count := builder.splits[name].examples) != expected:
            yield (
                f"{builder.name}: its split {name} has {count} examples, VTAB's has {expected}; the tasks may be made "
                "of other images than VTAB's"
            )


def _check_space(parts: Mapping[str, TfdsPart], builder: Builder, tasks: Sequence[Task], out: Path) -> None:
    """Raise `SaveError` when the folders will not fit on the disk."""
    bytes_needed = 0.0
    for part in parts.values():
        split = builder.splits[part.split]
        bytes_needed += (part.stop - part.start) * (split.bytes / max(1, split.examples) + BLOCK / 2)
    existing_folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing_folder).free
    if bytes_needed > free:
        names = " and ".join(task.name for task in tasks)
        raise SaveError(
            f"--out {out}: {names} will take about {bytes_needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make "
            "room, or pass another --out"
        )


@dataclass
class _Folder:
    """A task's folder under its temporary name, and the lines of the lists in it."""

    task: Task
    out: Path
    lines: dict[str, list[str]] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        return partial(self.out, self.task)

    def write_image(self, split: str, name: str, label: int, digest: str) -> Path:
        """Note an image, and return the location for its file. Raises `DataError` for a label outside the classes."""
        if not 0 <= label < self.task.classes:
            raise DataError(
                f"{self.task.name}: {split} image {name} would have the label {label}, and the classes are 0 to "
                f"{self.task.classes - 1}"
            )
        self.lines.setdefault(split, []).append(f"{name} {label}")
        self.sums.append(f"{digest}  {name}")
        return self.partial / name

    def finish(self, source: Source, described: Json) -> Json:
        """Write lists, digests and manifest, and give the folder its name; returns the manifest."""
        self.lines[UNION] = self.lines["train800"] + self.lines["val200"]
        for split, lines in self.lines.items():
            path = self.partial / f"{split}.txt"
            path.write_text("\n".join(lines) + "\n", "utf-8")
            self.sums.append(f"{file_digest(path)}  {path.name}")
        (self.partial / SUMS).write_text("\n".join(self.sums) + "\n", "utf-8")
        manifest = {
            "format": FORMAT,
            "task": self.task.name,
            **described,
            "label": (source.labels[self.task.name].__doc__ or "").strip(),
            "images": {split: len(lines) for split, lines in self.lines.items()},
            "fingerprints": {
                split: fingerprint(FileList(self.partial, split)) for split in ("train800", "val200", "test")
            },
            SUMS: file_digest(self.partial / SUMS),
        }
        replace_json(self.partial / MANIFEST, manifest)
        os.sync()  # one for all files: a flush of each would take longer than writing them
        self.partial.rename(self.out / self.task.folder)
        return manifest


def _write_split(
    source: Source, folders: list[_Folder], split: str, examples: Iterator[Example], on_progress: OnProgress
) -> int:
    """Write the images of a split into all folders; returns how many there were."""
    for folder in folders:
        (folder.partial / "images" / split).mkdir(parents=True)
    count = 0
    for example in examples:
        signals.check_here()
        content, kind = pack_image(bytes(example["image"]), source.white, f"{source.builder}, {split} image {count}")
        name, digest = f"images/{split}/{count:06d}.{kind}", hashlib.sha256(content).hexdigest()
        first, *copies = [
            folder.write_image(split, name, source.labels[folder.task.name](example), digest) for folder in folders
        ]
        first.write_bytes(content)
        for copy in copies:
            _link(first, copy)
        count += 1
        on_progress(1)
    return count


def _link(first: Path, other: Path) -> None:
    """Give a file a second name, or copy it where the system has no such names."""
    try:
        other.hardlink_to(first)
    except OSError:
        shutil.copyfile(first, other)


def pack_image(content: bytes, white: int, location: str) -> tuple[bytes, str]:
    """Return an image's bytes and the ending of its file: those that were stored, unless `white` is not 255.

    Values are then scaled, so that `white` becomes 255, and stored as PNG. Raises `DataError` for an unknown kind.
    """
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise DataError(f"{location}: neither JPEG, PNG, GIF nor BMP; prepare the data set again")
    if white == 255:
        return content, kind
    with Image.open(io.BytesIO(content)) as image:
        values = np.asarray(image)
    file = io.BytesIO()
    Image.fromarray(values * np.uint8(255 // white)).save(file, "PNG")
    return file.getvalue(), "png"


def verify(folder: Path) -> list[str]:
    """Return the names of a prepared folder's files that are missing or have other digests than when it was written."""
    sums = folder / SUMS
    manifest = read_object(folder / MANIFEST) or {}
    if not sums.is_file() or file_digest(sums) != manifest.get(SUMS):
        return [SUMS]
    problems = []
    for line in sums.read_text("utf-8").splitlines():
        signals.check_here()
        digest, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or file_digest(path) != digest:
            problems.append(name)
    return problems
