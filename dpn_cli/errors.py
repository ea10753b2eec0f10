"""Errors that end a run on purpose: one line for the user and one exit code each."""

from __future__ import annotations

import signal


class DpnError(Exception):
    """A mistake in the command or config: where, what was given, what is allowed, what to do next."""

    exit_code = 2


class DataError(DpnError):
    """Data or a weight file on disk is missing, damaged or not what the task needs."""

    exit_code = 3


class ImageError(DataError):
    """An image cannot be read: one of those that ``--skip-bad-images`` leaves out."""


class CheckError(DpnError):
    """A check before the run has found what would stop or spoil it; what it found is listed before."""

    exit_code = 3


class StoreError(DpnError):
    """Data behind a URL are missing, out of reach or damaged: no image's fault, and no reason to leave one out."""

    exit_code = 3


class OutOfMemoryError(DpnError):
    """Memory ran out even with the smallest micro-batch."""

    exit_code = 4


class NonFiniteError(DpnError):
    """The loss or gradient became NaN or infinite; raised before the optimizer step."""

    exit_code = 5


class SweepError(DpnError):
    """Some cells of a sweep failed; the others are finished and kept."""

    exit_code = 6


class SaveError(DpnError):
    """A file could not be written; what was saved before is intact."""

    exit_code = 1


class WorkerError(DpnError):
    """Raised when another process that this one needs has died: a rank, a data worker, a node. Saved state is kept."""

    exit_code = 1


RESUME = "the state is saved: run the same command with --resume to continue"


class StoppedError(DpnError):
    """A signal asked the work to stop; `then` says what was kept and how to continue."""

    def __init__(self, signal_number: int, then: str = RESUME) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {then}")
        self.signal_number, self.then = signal_number, then
        self.exit_code = 130 if signal_number == signal.SIGINT else 75

    def __reduce__(self) -> tuple[type[StoppedError], tuple[int, str]]:
        """Keep the arguments when one rank tells the others."""
        return StoppedError, (self.signal_number, self.then)
