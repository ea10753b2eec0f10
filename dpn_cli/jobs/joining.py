"""Starts processes that work on a run along with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpn_cli.errors import DpnError, SweepError
from dpn_cli.jobs.processes import LOGS, Processes, last_error, visible_gpus
from dpn_cli.jobs.scheduler import Work, run_all
from dpn_cli.run import stopping
from dpn_cli.run.session import Session


def at_once(begun: Session[Any], command: Sequence[str], jobs: int) -> None:
    """Have `jobs` processes do all that is to be done in the folder of a run; return when they have ended.

    `command` is that of the run, whose recipe they read in its folder. Raises `DpnError` for every failure but that of
    trainings, when all have been stopped.
    """
    folder, console = begun.folder.path, begun.console
    backend = Processes(jobs, folder / LOGS, visible_gpus(torch.cuda.device_count()))
    line = (*command, "--config", str(folder / "config.yaml"), "-o", str(folder), "--join", "--no-report")

    def on_start(work: Work) -> None:
        console.info(f"{work.name}: {backend.log_of(work.name)}")

    def on_end(work: Work, code: int) -> None:
        log = backend.log_of(work.name)
        if code not in (0, SweepError.exit_code):
            raise DpnError(f"{work.name}: {last_error(log)} (exit code {code}; {log})")

    works = [Work(f"process {number}", line) for number in range(1, jobs + 1)]
    run_all(works, backend, on_start, on_end, stopping.check_here)
