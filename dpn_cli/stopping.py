"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop; it does so at the next step, with its state saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dpn_cli import distributed
from dpn_cli.errors import RESUME, StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# What is said of work that has no --resume: evaluations, and what is kept part by part.
NO_RESULT = "no result was written"
GOES_ON = "what is finished is kept: run the same command again to go on"

_received: list[int] = []  # signal handlers belong to the process, and so does what they note


@contextmanager
def listen(then: str = RESUME) -> Iterator[None]:
    """Note stop signals instead of dying from them; a second Ctrl-C ends the process at once.

    `then` is what the error says of work that was stopped.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in _received:
            raise KeyboardInterrupt
        _received.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    except StoppedError as error:
        raise StoppedError(error.signal_number, then) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


def requested() -> int | None:
    """Return the signal that any rank has received, or None. Every rank must ask at the same point."""
    number = distributed.max_over_ranks(_received[0] if _received else 0)
    return number or None


def check_here() -> None:
    """Raise `StoppedError` when this rank was asked to stop, for loops in which ranks do not go in step."""
    if _received:
        raise StoppedError(_received[0])


def check() -> None:
    """Raise `StoppedError` when any rank was asked to stop, for loops whose work is redone on resume."""
    number = requested()
    if number is not None:
        raise StoppedError(number)


def leave_to_parent(worker: int) -> None:
    """Let a data-loading process ignore the signals: schedulers send them to every process, and the parent stops it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
