"""Engine that runs work as processes of this machine and divides its cores and GPUs among them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpn_cli.config.load import Logger, discard_message
from dpn_cli.errors import OutOfMemoryError
from dpn_cli.run.cores import cores
from dpn_cli.run.files import read_object
from dpn_cli.run.process import PARENT, SHARE
from dpn_cli.sweep.engines.gpus import Shares
from dpn_cli.sweep.scheduler import Work

# Folder of the processes\' output, below the folder of their run.
LOGS = "logs"
# Seconds for a process to save its state before it is killed.
SAVE_TIMEOUT = 120.0


@dataclass(frozen=True)
class _Running:
    work: Work
    slot: int
    process: subprocess.Popen[bytes]


class Processes:
    """Runs up to `slots` command lines at once, each with its output in ``LOGS/NAME.log``.

    Args:
        slots: number of processes at once.
        logs: folder of their output.
        shares: allocator of the GPUs; None on a machine without.
        notify: receives messages about the GPUs.
    """

    def __init__(self, slots: int, logs: Path, shares: Shares | None = None, notify: Logger = discard_message) -> None:
        self.slots, self.logs, self.shares, self.notify = slots, logs, shares, notify
        self._running: dict[str, _Running] = {}
        self._retries: list[_Running] = []
        self._finished: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def has_room(self, work: Work) -> bool:
        """Return whether a GPU has room for work."""
        return self.shares is None or self.shares.find(work) is not None

    def start(self, work: Work, slot: int) -> None:
        """Start work in a slot that is free."""
        if self.shares:
            self.shares.take(work)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_of(work.name).write_bytes(b"")
        self._launch(work, slot)

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        """Wait up to `seconds` for work to finish; return names and exit codes of what has finished.

        Work that ran out of memory in a part of a GPU restarts when it can have the whole GPU.
        """
        with suppress(queue.Empty):
            name, code = self._finished.get(timeout=seconds)
            self._read_memory_files()
            finished = self._running.pop(name)
            return [] if self.shares and self._retry(self.shares, finished, code) else [(name, code)]
        self._read_memory_files()
        return []

    def stop(self) -> None:
        """Have all processes save their state and end, and wait for them."""
        processes = [running.process for running in self._running.values()]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(SAVE_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Release nothing."""

    def _launch(self, work: Work, slot: int) -> None:
        core_numbers = self._cores(work, slot)
        with self.log_of(work.name).open("ab") as log, _pin_to_cores(core_numbers):
            process = subprocess.Popen(
                [sys.executable, "-m", "dpn_cli", *work.line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(work, core_numbers),
                process_group=0,  # Ctrl-C reaches this process alone, which stops the others
            )
        self._running[work.name] = _Running(work, slot, process)
        threading.Thread(target=self._wait, args=(work.name, process), daemon=True).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._finished.put((name, process.wait()))

    def _read_memory_files(self) -> None:
        """Read the memory that processes have measured on their GPUs, and resize their shares."""
        for name, running in self._running.items():
            share = self.shares.allocated[name] if self.shares else None
            if share and share.measures and (usage := read_object(self._memory_file(name))):
                assert self.shares
                self.shares.set_parts(running.work, usage["parts"])
                gpu = self.shares.gpus[share.gpu]
                self.notify(
                    f"{name} takes {usage['reserved_bytes'] / 1e9:.1f} of the {gpu.memory / 1e9:.0f} GB of GPU "
                    f"{gpu.name}: {usage['parts']} at once there"
                )

    def _retry(self, shares: Shares, finished: _Running, code: int) -> bool:
        """Return whether work restarts on a whole GPU, and start the retries whose GPU is free by now."""
        retried = code == OutOfMemoryError.exit_code and shares.take_whole(finished.work)
        if retried:
            name = finished.work.name
            self.notify(f"{name}: out of memory on a shared GPU; restarted on a whole one ({self.log_of(name)})")
            self._retries.append(finished)
        else:
            shares.release(finished.work)
        for retry in list(self._retries):
            gpu = shares.allocated[retry.work.name].gpu
            if all(shares.allocated[name].gpu != gpu for name in self._running):
                self._retries.remove(retry)
                self._launch(retry.work, retry.slot)
        return retried

    def _memory_file(self, name: str) -> Path:
        return self.log_of(name).with_suffix(".gpu.json")

    def _environment(self, work: Work, core_numbers: Sequence[int]) -> dict[str, str]:
        environment = {**os.environ, PARENT: str(os.getpid())}
        if self.shares:
            share = self.shares.allocated[work.name]
            environment["CUDA_VISIBLE_DEVICES"] = self.shares.gpus[share.gpu].name
            if share.measures:
                memory_file = self._memory_file(work.name).absolute()
                memory_file.unlink(missing_ok=True)
                environment[SHARE] = f"{self.shares.most}:{memory_file}"
            elif share.parts > 1:
                environment[SHARE] = str(share.parts)
        if "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(max(1, len(core_numbers)))
        return environment

    def _cores(self, work: Work, slot: int) -> list[int]:
        """Return the cores of work in a slot, an equal share of all cores; empty when there are too few."""
        core_numbers, number, parts = cores(), slot, self.slots
        if self.shares:
            share = self.shares.allocated[work.name]
            number, parts = share.gpu * share.parts + share.lane % share.parts, len(self.shares.gpus) * share.parts
        count = len(core_numbers) // parts
        return core_numbers[number * count : (number + 1) * count]


@contextmanager
def _pin_to_cores(core_numbers: list[int]) -> Iterator[None]:
    """Pin this thread and the processes that it starts to some cores, on systems that can."""
    if not (core_numbers and hasattr(os, "sched_setaffinity")):
        yield
        return
    previous = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core_numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous)


def last_error(log: Path) -> str:
    """Return the last error message of a log, without its prefix; the last line of a log without errors."""
    lines = log.read_text(encoding="utf-8", errors="backslashreplace").splitlines() if log.is_file() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
