"""A subprocess for the checks that need torch: if it hangs or dies, the failed step is known and the others count."""

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

# Seconds for one step: importing torch alone takes a minute from a slow disk.
STEP_TIMEOUT = 180.0
REMEDY = "'python -X faulthandler -c \"import torch, torchvision, timm\"' may show where; install another build of them"


@contextmanager
def start_checks() -> Iterator[SubprocessCheck]:
    """Start the subprocess, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(prefix="dpn-doctor-") as errors:
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_run_checks, args=(child_end, Path(errors.name)), daemon=True)
        process.start()
        child_end.close()
        try:
            yield SubprocessCheck(process, parent_end, Path(errors.name))
        finally:
            process.kill()
            process.join()


@dataclass(frozen=True)
class SubprocessCheck:
    """The running subprocess; its stderr goes to the file `errors`."""

    process: BaseProcess
    connection: Connection
    errors: Path

    def findings(self, local_findings: list[Finding]) -> Iterator[Finding]:
        """Yield the findings of the subprocess, which compares `local_findings` with those of other ranks."""
        label = "torch"
        try:
            self.connection.send(local_findings)
            while self.connection.poll(STEP_TIMEOUT):
                message = self.connection.recv()
                if message is None:
                    return
                if isinstance(message, Finding):
                    yield message
                else:
                    label = message
            yield Finding(
                label, "problem", f"no response in {STEP_TIMEOUT:.0f} s", "a device or a network hangs; restart it"
            )
        except (EOFError, OSError):
            self.process.join()
            yield Finding(label, "problem", self._describe_exit(), REMEDY)

    def _describe_exit(self) -> str:
        """Describe the end of the process, with the last line of its stderr."""
        code = self.process.exitcode or 0
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return f"the process {ending}" + (f": {lines[-1][:300]}" if lines else "")


def _run_checks(connection: Connection, errors: Path) -> None:
    """Send the name of each step, then its findings; None at the end."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    findings: list[Finding] = []

    def run_step(name: str, step: Callable[[], Iterable[Finding]]) -> bool:
        connection.send(name)
        try:
            for finding in step():
                findings.append(finding)
                connection.send(finding)
        except Exception as error:
            connection.send(Finding(name, "problem", first_line(error), "a part of torch does not work; reinstall it"))
            return False
        return not findings or findings[-1].level != "problem"

    if run_step("torch", partial(devices.check_import, "torch")):
        # timm imports torchvision: if that fails, timm's error is the same.
        any(not run_step(name, partial(devices.check_import, name)) for name in ("torchvision", "timm"))
        run_step("simplejpeg", partial(devices.check_import, "simplejpeg"))
        run_step("GPU", devices.check_gpus)
        run_step("precision", devices.check_precision)
        run_step("compile", devices.check_compiler)
        run_step(ranks.NAME, lambda: ranks.check_ranks([*connection.recv(), *findings]))
    connection.send(None)
