"""The process: its standard streams, its memory, and a quick exit."""

from __future__ import annotations

import atexit
import ctypes
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# Holds the number of the process that ours ends with, where one has started it.
PARENT = "DPN_PARENT"
# Says which part of a GPU ours has, where several processes share one; `gpu_share` reads it.
SHARE = "DPN_GPU_SHARE"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in Linux' prctl.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in glibc's malloc.h
# Bytes: freed memory at the end of the heap that is kept; blocks from this size on are not in the heap (glibc's most).
CACHED_BYTES, MAPPED_BYTES = 256 * 2**20, 32 * 2**20
_code: list[int] = []  # the exit code belongs to the process


def prepare() -> None:
    """Make stdout and stderr safe to write to, and keep memory. Call it first, before anything heavy is imported.

    File names may have characters that a terminal cannot show, and it may close before the program ends (`disown`).
    """
    _end_with(os.environ.pop(PARENT, None))
    keep_memory()
    sys.stdout, sys.stderr = _open(sys.stdout), _open(sys.stderr)
    atexit.register(_leave)  # what is registered first is called last


def keep_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones; the user's MALLOC_* variables come first.

    It would give it back to the system in every step, and pages that are new cost as much as the arithmetic on them.
    Has no effect with other C libraries.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = None if chosen or sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, CACHED_BYTES)
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)


def _end_with(parent: str | None) -> None:
    """Have the system send SIGTERM to this process, which saves its state then, when its parent dies. Linux only."""
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it has died before
        sys.exit(128 + signal.SIGTERM)


@contextmanager
def fast_exit() -> Iterator[None]:
    """End the process right after the functions registered with `atexit`, when the block raises `SystemExit`.

    Finalising the interpreter takes seconds when torch is loaded, and changes nothing outside the process. A Ctrl-C
    that nothing has caught, because the work has not begun, is one line.
    """
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            _code[:] = [end.code]
        raise
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        _code[:] = [128 + signal.SIGINT]
        sys.exit(128 + signal.SIGINT)


def _leave() -> None:
    if _code:
        with suppress(OSError):  # a closed pipe, which the interpreter reports itself
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_code[0])


class _Terminal(io.FileIO):
    """A terminal that discards text once it has closed."""

    def write(self, text: Any) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(text)


def _open(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if not stream.isatty():
        stream.reconfigure(errors="backslashreplace")
        return stream
    raw = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
