"""The commands, one module per group; each turns options into a call and a result into text."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from typer._click.globals import get_current_context  # Typer has no public name for it

from dpn_cli.console import printable, show_error
from dpn_cli.errors import DataError, DpnError, PictureError


@contextmanager
def one_line_errors(debug: bool = False) -> Iterator[None]:
    """Print a `DpnError` as one line and exit with its code; anything else is a bug and keeps its traceback.

    A file that the system refuses, for its name or its rights, is no bug wherever it is met.
    """
    try:
        try:
            yield
        except OSError as error:
            if error.filename is None:
                raise
            raise DataError(f"{error.filename}: {error.strerror}") from error
    except DpnError as error:
        if debug:
            print("\n".join(map(printable, traceback.format_exc().split("\n"))), file=sys.stderr)
        show_error(f"{error}{_way_out(error)}")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted at once: the state since the last checkpoint is lost", file=sys.stderr)
        raise typer.Exit(130) from None


def _way_out(error: DpnError) -> str:
    """Name ``--skip-bad-images`` after an unreadable picture where the command has that option and it was not given."""
    context = get_current_context(silent=True)
    skips = context.params.get("skip_bad_images", True) if context else True
    return "; --skip-bad-images leaves it out and counts it" if isinstance(error, PictureError) and not skips else ""
