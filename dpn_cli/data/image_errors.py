"""Errors about single images: raised when a training meets the first one, gathered when data are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dpn_cli.errors import DataError

_gathered: list[list[DataError]] = []  # of the blocks of `collect_errors`, the innermost last


@contextmanager
def collect_errors() -> Iterator[list[DataError]]:
    """Collect the errors given to `report_error` inside the block, instead of raising the first."""
    errors: list[DataError] = []
    _gathered.append(errors)
    try:
        yield errors
    finally:
        _gathered.pop()


def report_error(error: DataError) -> None:
    """Raise an error about one of many images; inside `collect_errors`, collect it instead."""
    if not _gathered:
        raise error
    _gathered[-1].append(error)
