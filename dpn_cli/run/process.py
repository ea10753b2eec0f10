"""How the program's process meets the terminal that it was started from, and how it ends."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_code: list[int] = []  # the exit code belongs to the process


def prepare() -> None:
    """Make stdout and stderr safe to write to. Call it first in the program, before anything heavy is imported.

    A terminal may know fewer characters than file names have, and it may be gone before the program ends (`disown`).
    """
    sys.stdout, sys.stderr = _open(sys.stdout), _open(sys.stderr)
    atexit.register(_leave)  # what is registered first is called last


@contextmanager
def leaving() -> Iterator[None]:
    """End the process at once after a `SystemExit` of the block, once all that was registered to be done has been.

    Taking down the interpreter takes seconds where torch is loaded, and changes nothing outside the process.
    """
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            _code[:] = [end.code]
        raise


def _leave() -> None:
    if _code:
        with suppress(OSError):  # a closed pipe: the interpreter says so in its own way
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_code[0])


class _Terminal(io.FileIO):
    """A terminal whose text goes nowhere once it has closed."""

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
