"""Files that are either whole or absent: write under a temporary name, flush, rename."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from dpn_cli.errors import DataError, DpnError, SaveError

# Seconds to wait for a claimed folder: the workers of a killed run notice within five.
PATIENCE = 10.0
# Names of the temporary files of `replace_file`; the last number is the process.
LEFTOVER = re.compile(r"\..+\.\d+\.tmp")
# Seconds without a write after which a temporary file is abandoned, even by a process of another machine.
ABANDONED = 60.0


@contextlib.contextmanager
def claim(folder: Path, on_wait: Callable[[], None] | None = None, patience: float | None = None) -> Iterator[None]:
    """Claim a folder by locking a file next to it, so that other processes that claim it wait.

    Raises `DpnError` when another process still holds it after `patience` seconds, usually 10; with `on_wait`, calls
    that instead and keeps waiting. Has no effect where the system has no locks or does not allow the file to be
    created.
    """
    folder = folder.absolute()
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass  # raises immediately where the lock could not create its file and would wait
        while not lock.is_locked:
            try:
                lock.acquire(timeout=PATIENCE if patience is None else patience)
            except Timeout as error:
                if on_wait is None:
                    raise DpnError(
                        f"{folder}: another process is running in this folder; wait until it has ended, or name "
                        "another folder"
                    ) from error
                on_wait()
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink()  # still held: a process that waits for it notices, and makes a new one
            lock.release()


def real_path(path: str | Path) -> Path:
    """Return the absolute path that a path leads to, with ``~`` expanded, whether it exists or not.

    A loop of links ends with its first name: before Python 3.13, `Path.resolve` raises for one.
    """
    return Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111  Path.expanduser raises for an unknown user


def is_leftover(name: str) -> bool:
    """Return whether a name is that of a temporary file of `replace_file`, which may have been killed."""
    return LEFTOVER.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that killed processes of this machine left in a folder of ours and below it."""
    with contextlib.suppress(OSError):
        for path in list(folder.rglob(".*.tmp")):
            if _is_ownerless(path):
                path.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Delete a file's abandoned temporary copies, in a folder that may not be ours."""
    with contextlib.suppress(OSError):
        for leftover in list(path.parent.glob(f".{glob.escape(path.name)}.*.tmp")):
            if _is_ownerless(leftover) and time.time() - leftover.stat().st_mtime > ABANDONED:
                leftover.unlink(missing_ok=True)


def _is_ownerless(path: Path) -> bool:
    owner = int(path.name.split(".")[-2]) if is_leftover(path.name) else None
    return owner is not None and (owner == os.getpid() or not is_alive(owner))


def is_alive(process: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def make_folder(path: Path) -> None:
    """Create the folder of ``-o``. Raises `DpnError` when the path is a file or the folder cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DpnError(f"-o {path}: a file, not a folder; pass another -o") from error
    except OSError as error:
        raise DpnError(f"-o {path}: the folder cannot be made ({error.strerror}); pass another -o") from error


def open_report(path: Path) -> None:
    """Make the folder of a report, before the work that fills it.

    Raises `DpnError` when the folder holds a run, whose result would be lost, or cannot be made.
    """
    make_folder(path)
    if (path / "run.json").is_file():
        raise DpnError(f"-o {path}: the folder holds a run, and its result.json would be replaced; pass another -o")


def clear_folder(path: Path, last: Sequence[str]) -> None:
    """Empty a folder, deleting the files named in `last` at the end and in that order. Raises `SaveError`."""
    try:
        for entry in sorted(path.iterdir(), key=lambda entry: last.index(entry.name) if entry.name in last else -1):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise SaveError(f"-o {path}: not emptied ({error}); empty it yourself, or pass another -o") from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], object]) -> str:
    """Let `write` fill a temporary file, then rename it to `path`; returns its SHA-256.

    Raises `SaveError` when writing fails, and other errors of `write`; the old file is then untouched, and the
    temporary one deleted.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # others may write the same file of a shared cache
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors creates files that only their owner can read
        flush(temporary)
        digest = file_digest(temporary)
        temporary.replace(path)
        flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise save_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return digest


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content by `text`, atomically. Raises `SaveError`."""
    # Bytes of a name that are not UTF-8 are escaped; JSON and YAML read the escapes back.
    replace_file(path, lambda temporary: temporary.write_text(text, "utf-8", "backslashreplace"))


def replace_json(path: Path, value: object) -> None:
    """Replace a file's content by a value as JSON, atomically. Raises `SaveError`."""
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_named(path: Path, option: str, way_out: str) -> bytes:
    """Return the content of the file that an option or a data set names.

    Raises `DataError`, with the system's reason and the way out, for a file that is missing, not a regular file (a
    folder, a FIFO that nobody writes to) or not readable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "Not a regular file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise DataError(f"{option}: {reason[:1].lower()}{reason[1:]}; {way_out}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None when the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def save_error(path: Path | str, error: Exception) -> SaveError:
    """Describe a failed write in one line."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return SaveError(
        f"{path}: not written ({reason}); earlier files are intact. "
        "Free some space or choose another folder, then run the same command again (with --resume in a run's folder)"
    )
