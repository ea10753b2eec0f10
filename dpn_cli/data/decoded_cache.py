"""Pixels that the processes of a machine decode once and share: files that all of them map into memory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dpn_cli.data.pixels import PixelSet
from dpn_cli.errors import SaveError
from dpn_cli.run.files import claim, replace_file


def local_cache_dir(run: Path, started: str) -> Path | None:
    """Return the folder of the pixels of a run that `started` then; None where it cannot be this user's alone."""
    name = hashlib.sha256(f"{run.absolute()} {started}".encode("utf-8", "backslashreplace")).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"dpn-{os.getuid()}-{name}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_own = folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
    except OSError:
        return None
    return folder if is_own else None


def decode_once(path: Path | None, decode: Callable[[], PixelSet]) -> PixelSet:
    """Return the set that `decode` returns, from the files at `path` if another process has decoded it.

    The others wait for the first one. Without a path, or space for the files, the set is in this process's own memory.
    """
    if path is None:
        return decode()
    images, arrays_file = path.with_name(f"{path.name}.npy"), path.with_name(f"{path.name}.npz")
    with claim(path, on_wait=lambda: None):
        if not arrays_file.is_file():
            pixels = decode()
            try:
                replace_file(images, lambda file: _write(file, pixels.images.numpy()))
                replace_file(arrays_file, lambda file: _write(file, pixels.labels.numpy(), pixels.skipped, pixels.rows))
            except SaveError:
                images.unlink(missing_ok=True)
                return pixels
    with np.load(arrays_file) as arrays:
        labels, skipped, rows = (arrays[name] for name in arrays.files)
    mapped = np.load(images, mmap_mode="c")  # pages of the file until they are written to
    return PixelSet(torch.from_numpy(mapped), torch.from_numpy(labels), int(skipped), tuple(rows.tolist()))


def _write(file: Path, array: np.ndarray, *more: object) -> None:
    with file.open("wb") as file_object:
        if more:
            np.savez(file_object, array, *[np.asarray(item, dtype=np.int64) for item in more])
        else:
            np.save(file_object, array)
