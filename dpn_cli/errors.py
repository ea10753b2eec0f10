"""Errors that end a run on purpose: one line for the user and one exit code each."""

from __future__ import annotations

import signal


class DpnError(Exception):
    """A mistake in the command or recipe: where, what was given, what is allowed, what to do next."""

    exit_code = 2


class DataError(DpnError):
    """Data or a weight file on disk is missing, damaged or not what the task needs."""

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


class StoppedError(DpnError):
    """A signal asked the run to stop, and its state is saved if there is one to save."""

    def __init__(self, signal_number: int, *, saved: bool = True) -> None:
        name = signal.Signals(signal_number).name
        then = "the state is saved: run the same command with --resume to go on" if saved else "nothing was written"
        super().__init__(f"stopped by {name}; {then}")
        self.signal_number = signal_number
        self.exit_code = 130 if signal_number == signal.SIGINT else 75
