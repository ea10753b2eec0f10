"""Runs work as processes of this machine, which is divided among them: processor cores, and GPUs in turn."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpn_cli.jobs.scheduler import Work
from dpn_cli.run.cores import cores
from dpn_cli.run.process import PARENT

# Folder of what processes print, in that of all of them.
LOGS = "logs"
# Seconds that a process has to save its state, before it is killed.
PATIENCE = 120.0


class Processes:
    """Runs up to `slots` command lines at once, each with the output of its own in ``LOGS/NAME.log``.

    Args:
        slots: how many processes at once.
        logs: folder of what they print.
        gpus: what CUDA_VISIBLE_DEVICES may hold, dealt to the slots in turn; none on a machine without.
    """

    def __init__(self, slots: int, logs: Path, gpus: tuple[str, ...] = ()) -> None:
        self.slots, self.logs, self.gpus = slots, logs, gpus
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def start(self, work: Work, slot: int) -> None:
        """Begin to run work in a slot that is free."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.log_of(work.name).open("wb") as log, _on(self._cores(slot)):
            process = subprocess.Popen(
                [sys.executable, "-m", "dpn_cli", *work.line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(slot),
                process_group=0,  # Ctrl-C comes to this process alone, which tells the others
            )
        self._running[work.name] = process
        threading.Thread(target=self._wait, args=(work.name, process), daemon=True).start()

    def ended(self, seconds: float) -> list[tuple[str, int]]:
        """Return names and exit codes of work that has ended, as soon as there is any or the time has passed."""
        try:
            name, code = self._ended.get(timeout=seconds)
        except queue.Empty:
            return []
        del self._running[name]
        return [(name, code)]

    def stop(self) -> None:
        """Tell all processes to save their state and to end, and wait for them."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """There is nothing to let go of."""

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((name, process.wait()))

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {**os.environ, PARENT: str(os.getpid())}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        if "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(max(1, len(cores()) // self.slots))
        return environment

    def _cores(self, slot: int) -> list[int]:
        """Return the cores of a slot; none where there are fewer cores than slots, or the system does not bind any."""
        mine = cores() if hasattr(os, "sched_setaffinity") else []
        share = len(mine) // self.slots
        return mine[slot * share : (slot + 1) * share]


@contextmanager
def _on(chosen: list[int]) -> Iterator[None]:
    """Keep this thread, and what it starts, on some cores."""
    if not chosen:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def last_error(log: Path) -> str:
    """Return the last line of a log that tells of an error, without the word; its last line where none does."""
    lines = log.read_text(encoding="utf-8", errors="backslashreplace").splitlines() if log.is_file() else []
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or ["no output"])[-1]


def visible_gpus(count: int) -> tuple[str, ...]:
    """Return what names each of the GPUs that this process sees; `count` is how many torch sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(count)]
    return tuple(names[:count])
