"""Scheduler of work: in order, after its requirements, in as many slots as the engine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Seconds between two checks for signals.
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Work:
    """A command line, its words after ``dpn``, and the names of the work that it needs.

    Work on the same `network` takes the same memory. `label` is its name in messages, by default `name`.
    """

    name: str
    line: tuple[str, ...]
    after: tuple[str, ...] = ()
    network: str = ""
    label: str = ""

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.label or self.name


class Backend(Protocol):
    """Engine that runs work; a slot, 0 to `slots` - 1, is a part of the machine for one piece of work."""

    slots: int

    def has_room(self, work: Work) -> bool:
        """Return whether work can start now, given a free slot."""

    def start(self, work: Work, slot: int) -> None:
        """Start work in a slot that is free."""

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        """Wait up to `seconds` for work to finish; return names and exit codes of what has finished."""

    def stop(self) -> None:
        """Stop all running work with its state saved, and return when it has ended."""

    def log_of(self, name: str) -> Path:
        """Return the file of work's output."""

    def close(self) -> None:
        """Release the engine when all work has ended."""


def run_all(
    works: Sequence[Work],
    backend: Backend,
    on_start: Callable[[Work], None],
    on_end: Callable[[Work, int], None],
    check: Callable[[], None],
) -> list[Work]:
    """Run work until nothing more can start; return the work that was not started because it needs work that failed.

    Names in `after` that are not among the work count as done. `on_end` gets the exit code. `check` is called
    between waits; when it raises, all work is stopped first.
    """
    waiting = {work.name: work for work in works}
    running: dict[str, tuple[Work, int]] = {}
    free = list(range(backend.slots))
    failed: set[str] = set()
    try:
        while True:
            check()
            unfinished_names = {*waiting, *running, *failed}
            ready = [work for work in waiting.values() if not unfinished_names.intersection(work.after)]
            for work in ready:
                if free and backend.has_room(work):
                    del waiting[work.name]
                    running[work.name] = work, free.pop(0)
                    on_start(work)
                    backend.start(*running[work.name])
            if not running:
                return list(waiting.values())
            for name, code in backend.wait_finished(POLL_SECONDS):
                work, slot = running.pop(name)
                free.append(slot)
                if code:
                    failed.add(name)
                on_end(work, code)
    finally:
        if running:
            backend.stop()
        backend.close()
