"""Stop a run at its next step, with its state saved, on SIGTERM, SIGHUP, SIGINT or SIGUSR1."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dpn_cli.errors import RESUME, StoppedError, WorkerError
from dpn_cli.run import distributed

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
# Endings of the message about stopped work that has no --resume: evaluations, dry runs, work saved in parts.
NO_RESULT = "no result was written"
NOTHING_KEPT = "a dry run keeps nothing"
PARTS_KEPT = "finished parts are kept: run the same command again to continue"
# Ending of the message about a run that could not save its state.
LAST_SAVED = "run the same command with --resume to continue from the last saved state"

_received: list[int] = []  # global, as signal handlers are


def _record_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and signal.SIGINT in _received:
        raise KeyboardInterrupt
    _received.append(number)


@contextmanager
def listen(ending: str = RESUME) -> Iterator[None]:
    """Record stop signals instead of dying from them; a second Ctrl-C ends the process immediately.

    `ending` ends the error's message. Under nohup, SIGHUP stays ignored. A nested call changes nothing.
    """
    if signal.getsignal(signal.SIGTERM) is _record_signal:
        yield
        return
    caught_signals = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, _record_signal) for number in caught_signals}
    try:
        yield
    except StoppedError as error:
        raise StoppedError(error.signal_number, ending) from None
    except WorkerError as error:
        raise WorkerError(f"{error}; {LAST_SAVED if ending == RESUME else ending}") from None
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        _received.clear()


def requested_signal() -> int | None:
    """Return the signal that any rank has received, or None. Every rank must call it at the same point."""
    number = distributed.max_over_ranks(_received[0] if _received else 0)
    return number or None


def check_here() -> None:
    """Raise `StoppedError` when this rank has received a signal, in loops that ranks run independently."""
    if _received:
        raise StoppedError(_received[0])


def check() -> None:
    """Raise `StoppedError` when any rank has received a signal, in loops whose work is redone on resume."""
    number = requested_signal()
    if number is not None:
        raise StoppedError(number)
