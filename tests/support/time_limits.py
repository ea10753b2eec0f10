"""Time limits inside a process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.programs import LIMIT


def start_deadline() -> Callable[[], None]:
    """Return a function that raises `TimeoutError` once the time limit has passed."""
    end = time.monotonic() + LIMIT

    def check() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    return check


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """End a block that waits for a FIFO, instead of never."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("the test hangs")

    initial = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, initial)


ERROR_LIMIT = 60.0


def wait_for_error() -> None:
    """Wait for what the death of a child raises in this process, wherever it is."""
    until = time.monotonic() + ERROR_LIMIT
    while time.monotonic() < until:
        signal.sigtimedwait([signal.SIGUSR2], 0.05)
