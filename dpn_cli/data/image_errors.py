"""Errors about single images: raised when a training meets the first one, gathered when data are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dpn_cli.errors import DataError

_gathered: list[list[DataError]] = []  # of the blocks of `collect_errors`, the innermost last


@contextmanager
def collect_errors() -> Iterator[list[DataError]]:
    """Gather inside the block what `report_error` is told, instead of raising the first of it."""
    errors: list[DataError] = []
    _gathered.append(errors)
    try:
        yield errors
    finally:
        _gathered.pop()


def report_error(error: DataError) -> None:
    """Raise an error about one of many images; inside `collect_errors`, keep it, and the caller goes on without it."""
    if not _gathered:
        raise error
    _gathered[-1].append(error)
