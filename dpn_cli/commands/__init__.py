"""The commands, one module per group; each turns options into a call and a result into text."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dpn_cli.errors import DataError, DpnError, ImageError
from dpn_cli.run.console import printable, show_error
from dpn_cli.run.files import save_error

# What the system says of a device to which nothing more can be written.
UNWRITABLE = {errno.EROFS, errno.ENOSPC, errno.EDQUOT}

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def one_line_errors(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Print a `DpnError` as one line and exit with its code; anything else is a bug and keeps its traceback.

    `arguments` are those of the command: with ``verbose`` the traceback comes first. A file that the system refuses,
    for its name or its rights, is an error of the user's wherever it is met.
    """
    try:
        try:
            yield
        except OSError as error:
            if error.filename is None:
                raise
            if error.errno in UNWRITABLE:
                raise save_error(error.filename, error) from error
            raise DataError(f"{error.filename}: {error.strerror}") from error
    except DpnError as error:
        if arguments.get("verbose"):
            print("\n".join(map(printable, traceback.format_exc().split("\n"))), file=sys.stderr)
        show_error(f"{error}{_remedy(error, arguments)}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        loss_note = ": the state since the last checkpoint is lost" if "resume" in arguments else ""
        show_error(f"interrupted at once{loss_note}")
        sys.exit(INTERRUPTED)


def _remedy(error: DpnError, arguments: Mapping[str, Any]) -> str:
    """Name ``--skip-bad-images`` after an unreadable image where the command has that option and it was not given."""
    skips = arguments.get("skip_bad_images", True)
    return "; --skip-bad-images leaves it out and counts it" if isinstance(error, ImageError) and not skips else ""
