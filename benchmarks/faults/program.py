"""The program in a process that can be watched and disturbed, forked from one that has imported what it needs.

A run is in one phase at a time. The process tells in shared memory which one it is in, how often it has entered each,
and how long it was in it, so that another process can disturb it at a moment of its choice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

PHASES = ("starting", "caching", "training", "saving", "evaluating", "finishing")
# What a phase lasts as long as: module, class (or none) and function.
ENTRANCES = (
    ("dpn_cli.engine.fit", "", "fit", "training"),
    ("dpn_cli.engine.fit", "_Training", "evaluate", "evaluating"),
    ("dpn_cli.run.checkpoints", "Checkpoints", "save", "saving"),
    ("dpn_cli.run.run_dir", "RunFolder", "finish", "saving"),
    ("tasks.classify.train", "", "evaluate", "evaluating"),
    ("tasks.segment.train", "", "evaluate", "evaluating"),
    ("tasks.lit.train", "", "retrieval_scores", "evaluating"),
    ("tasks.lit.cache", "", "fill", "caching"),
    ("tasks.vtab.train", "Trainer", "pixels", "caching"),
    ("tasks.vtab.train", "Trainer", "evaluate", "evaluating"),
    ("tasks.vtab.train", "Trainer", "count_test", "evaluating"),
)
IMPORTED = (
    *("tasks.classify.highres", "tasks.vtab.command", "tasks.lit.command", "tasks.segment.command"),
    *("dpn_cli.cli", "open_clip", "torchmetrics.classification", "torch._dynamo"),
)
PIPE = 2**20  # bytes of a process's messages at most


class Phases:
    """Shared memory with the phase that a process is in, and the number and seconds of its visits to each."""

    def __init__(self) -> None:
        self._now = RawArray("i", 1)
        self._visits = RawArray("i", len(PHASES))
        self._seconds = RawArray("d", len(PHASES))
        self._since = 0.0

    @property
    def now(self) -> str:
        """The phase."""
        return PHASES[self._now[0]]

    def visits(self, phase: str) -> int:
        """Return how often the process has entered a phase."""
        return int(self._visits[PHASES.index(phase)])

    def seconds(self, phase: str) -> float:
        """Return how long a visit to a phase took on average."""
        return float(self._seconds[PHASES.index(phase)]) / max(1, self.visits(phase))

    def enter(self, phase: str) -> None:
        """Count the time in the phase before, and enter another one."""
        now = time.perf_counter()
        self._seconds[self._now[0]] += now - self._since if self._since else 0.0
        self._now[0], self._since = PHASES.index(phase), now
        self._visits[self._now[0]] += 1

    def observe(self) -> None:
        """Have the functions in `ENTRANCES` enter their phases, in this process."""
        self.enter("starting")
        for module, owner, name, phase in ENTRANCES:
            place: Any = import_module(module)
            place = getattr(place, owner) if owner else place
            setattr(place, name, self._entering(getattr(place, name), phase))

    def _entering(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def entering(*arguments: Any, **named: Any) -> Any:
            outside = self.now
            self.enter(phase)
            try:
                return function(*arguments, **named)
            finally:
                self.enter("finishing" if outside == "starting" and phase != "caching" else outside)

        return entering


@dataclass
class Ended:
    """What a process left: its exit code (negative for a signal), the phase it ended in, and what it said."""

    code: int
    phase: str
    errors: str
    phases: Phases

    @property
    def clear(self) -> bool:
        """Whether it ended in one line of error, or in a signal that it was sent, and not in a traceback."""
        lines = [line for line in self.errors.splitlines() if line.startswith("error:")]
        return "Traceback" not in self.errors and len(lines) == 1

    @property
    def said(self) -> str:
        """Its last line."""
        return (self.errors.strip().splitlines() or [""])[-1]


Inside = Callable[[Phases], None]


def preload() -> None:
    """Import what the processes need, and start no threads."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            import_module(name)


class Program:
    """A run of the program in a folder, in a process of its own."""

    def __init__(
        self, words: Sequence[str], folder: Path, inside: Inside | None, environment: Mapping[str, str]
    ) -> None:
        self.phases = Phases()
        self.ended: Ended | None = None
        self._errors, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE)  # nobody reads before the end
        os.set_blocking(write, False)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _become(words, folder, inside, environment, self.phases, write)
        os.close(write)

    def wait(self, limit: float) -> Ended:
        """Wait for the end. Raises `TimeoutError` after so many seconds, when everything it started is killed."""
        until = time.monotonic() + limit
        while (ended := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
                raise TimeoutError(f"the program did not end within {limit:g} s, in {self.phases.now}")
            time.sleep(0.002)
        return ended

    def poll(self) -> Ended | None:
        """Return how it ended; None while it runs."""
        if self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                os.set_blocking(self._errors, False)
                try:
                    said = os.read(self._errors, PIPE)
                except BlockingIOError:  # one that it has started is still at work
                    said = b""
                os.close(self._errors)
                self.ended = Ended(code, self.phases.now, said.decode("utf-8", "replace"), self.phases)
        return self.ended

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.002)


def _become(
    words: Sequence[str],
    folder: Path,
    inside: Inside | None,
    environment: Mapping[str, str],
    phases: Phases,
    errors: int,
) -> None:
    """Turn this process into the program. Never returns."""
    code = 70
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream, descriptor in ((0, nothing), (1, nothing), (2, errors)):
            os.dup2(descriptor, stream)
        sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv = ["dpn", *words]
        phases.observe()
        if inside:
            inside(phases)
        from dpn_cli.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started. Linux only."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
