"""Runs work as processes of this machine, which is divided among them: processor cores and GPUs."""

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

# Folder of what processes print, in that of all of them.
LOGS = "logs"
# Seconds that a process has to save its state, before it is killed.
PATIENCE = 120.0


@dataclass(frozen=True)
class _Running:
    work: Work
    slot: int
    process: subprocess.Popen[bytes]


class Processes:
    """Runs up to `slots` command lines at once, each with the output of its own in ``LOGS/NAME.log``.

    Args:
        slots: how many processes at once.
        logs: folder of what they print.
        shares: deals out the GPUs; None on a machine without.
        say: is told what happens with the GPUs.
    """

    def __init__(self, slots: int, logs: Path, shares: Shares | None = None, say: Logger = discard_message) -> None:
        self.slots, self.logs, self.shares, self.say = slots, logs, shares, say
        self._running: dict[str, _Running] = {}
        self._again: list[_Running] = []
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def has_room(self, work: Work) -> bool:
        """Return whether a GPU has room for work."""
        return self.shares is None or self.shares.find(work) is not None

    def start(self, work: Work, slot: int) -> None:
        """Begin to run work in a slot that is free."""
        if self.shares:
            self.shares.take(work)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_of(work.name).write_bytes(b"")
        self._launch(work, slot)

    def ended(self, seconds: float) -> list[tuple[str, int]]:
        """Return names and exit codes of work that has ended, as soon as there is any or the time has passed.

        Work that ran out of memory in a part of a GPU begins once more when it can have the whole one.
        """
        with suppress(queue.Empty):
            name, code = self._ended.get(timeout=seconds)
            self._measure()
            ended = self._running.pop(name)
            return [] if self.shares and self._retry(self.shares, ended, code) else [(name, code)]
        self._measure()
        return []

    def stop(self) -> None:
        """Tell all processes to save their state and to end, and wait for them."""
        processes = [running.process for running in self._running.values()]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """There is nothing to let go of."""

    def _launch(self, work: Work, slot: int) -> None:
        chosen = self._cores(work, slot)
        with self.log_of(work.name).open("ab") as log, _pin_to_cores(chosen):
            process = subprocess.Popen(
                [sys.executable, "-m", "dpn_cli", *work.line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(work, chosen),
                process_group=0,  # Ctrl-C comes to this process alone, which tells the others
            )
        self._running[work.name] = _Running(work, slot, process)
        threading.Thread(target=self._wait, args=(work.name, process), daemon=True).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((name, process.wait()))

    def _measure(self) -> None:
        """Look which processes have said what they take of their GPUs."""
        for name, running in self._running.items():
            share = self.shares.dealt[name] if self.shares else None
            if share and share.measures and (said := read_object(self._memory_file(name))):
                assert self.shares
                self.shares.learn(running.work, said["parts"])
                gpu = self.shares.gpus[share.gpu]
                self.say(
                    f"{name} takes {said['reserved_bytes'] / 1e9:.1f} of the {gpu.memory / 1e9:.0f} GB of GPU "
                    f"{gpu.name}: {said['parts']} at once there"
                )

    def _retry(self, shares: Shares, ended: _Running, code: int) -> bool:
        """Return whether work is to begin once more, and begin what can have a GPU alone from now on."""
        again = code == OutOfMemoryError.exit_code and shares.take_whole(ended.work)
        if again:
            name = ended.work.name
            self.say(f"{name}: out of memory beside others on a GPU; once more, alone ({self.log_of(name)})")
            self._again.append(ended)
        else:
            shares.give_back(ended.work)
        for one in list(self._again):
            gpu = shares.dealt[one.work.name].gpu
            if all(shares.dealt[name].gpu != gpu for name in self._running):
                self._again.remove(one)
                self._launch(one.work, one.slot)
        return again

    def _memory_file(self, name: str) -> Path:
        return self.log_of(name).with_suffix(".gpu.json")

    def _environment(self, work: Work, chosen: Sequence[int]) -> dict[str, str]:
        environment = {**os.environ, PARENT: str(os.getpid())}
        if self.shares:
            share = self.shares.dealt[work.name]
            environment["CUDA_VISIBLE_DEVICES"] = self.shares.gpus[share.gpu].name
            if share.measures:
                said = self._memory_file(work.name).absolute()
                said.unlink(missing_ok=True)
                environment[SHARE] = f"{self.shares.most}:{said}"
            elif share.parts > 1:
                environment[SHARE] = str(share.parts)
        if "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(max(1, len(chosen)))
        return environment

    def _cores(self, work: Work, slot: int) -> list[int]:
        """Return the cores of work in a slot: a part of those of its GPU; none where there are too few."""
        mine, number, parts = cores(), slot, self.slots
        if self.shares:
            share = self.shares.dealt[work.name]
            number, parts = share.gpu * share.parts + share.lane % share.parts, len(self.shares.gpus) * share.parts
        count = len(mine) // parts
        return mine[number * count : (number + 1) * count]


@contextmanager
def _pin_to_cores(chosen: list[int]) -> Iterator[None]:
    """Keep this thread, and what it starts, on some cores, where the system can."""
    if not (chosen and hasattr(os, "sched_setaffinity")):
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
