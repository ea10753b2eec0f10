"""A process of its own for all that needs torch: where it hangs or dies, it is known at what, and the others stand."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from dpn_cli.doctor import devices, ranks
from dpn_cli.doctor.packages import first_line
from dpn_cli.doctor.result import Finding

# Seconds that one of the steps may take: torch alone takes a minute from a slow disk.
PATIENCE = 180.0
DEATH = "'python -X faulthandler -c \"import torch, torchvision, timm\"' may show where; install another build of them"


@contextmanager
def start_checks() -> Iterator[SubprocessCheck]:
    """Start the process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(prefix="dpn-doctor-") as errors:
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_checks, args=(theirs, Path(errors.name)), daemon=True)
        process.start()
        theirs.close()
        try:
            yield SubprocessCheck(process, ours, Path(errors.name))
        finally:
            process.kill()
            process.join()


@dataclass(frozen=True)
class SubprocessCheck:
    """The process at work; what it writes to its stderr is in the file `errors`."""

    process: BaseProcess
    connection: Connection
    errors: Path

    def findings(self, mine: list[Finding]) -> Iterator[Finding]:
        """Wait for what the process finds; it compares `mine`, those of this one, with those of other ranks."""
        at = "torch"
        try:
            self.connection.send(mine)
            while self.connection.poll(PATIENCE):
                got = self.connection.recv()
                if got is None:
                    return
                if isinstance(got, Finding):
                    yield got
                else:
                    at = got
            yield Finding(at, "problem", f"no answer in {PATIENCE:.0f} s", "a device or a network hangs; restart it")
        except (EOFError, OSError):
            self.process.join()
            yield Finding(at, "problem", self._death(), DEATH)

    def _death(self) -> str:
        """Say how the process ended, with the last line that it wrote."""
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        written = self.errors.read_text(errors="replace").strip().splitlines()
        return f"the process {how}" + (f": {written[-1][:300]}" if written else "")


def _run_checks(connection: Connection, errors: Path) -> None:
    """Send the name of each step before it begins, and what it finds; None at the end."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    found: list[Finding] = []

    def take(name: str, step: Callable[[], Iterable[Finding]]) -> bool:
        connection.send(name)
        try:
            for finding in step():
                found.append(finding)
                connection.send(finding)
        except Exception as error:
            connection.send(Finding(name, "problem", first_line(error), "a part of torch does not work; reinstall it"))
            return False
        return not found or found[-1].level != "problem"

    if take("torch", partial(devices.imported, "torch")):
        # timm imports torchvision: where that fails, timm's error is the same.
        any(not take(name, partial(devices.imported, name)) for name in ("torchvision", "timm"))
        take("simplejpeg", partial(devices.imported, "simplejpeg"))
        take("GPU", devices.gpus)
        take("precision", devices.precision)
        take("compile", devices.compiler)
        take(ranks.NAME, lambda: ranks.check_ranks([*connection.recv(), *found]))
    connection.send(None)
