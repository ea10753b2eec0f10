"""Starts processes that work on a run along with others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.errors import DpnError, SweepError
from dpn_cli.run import signals
from dpn_cli.run.run import Run
from dpn_cli.sweep.engines.local import LOGS, last_error
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.scheduler import Backend, Work, run_all


def backend_for(run: Run[Any], place: LaunchOptions) -> Backend:
    """Return what runs the work of a run, as its `place` says. Raises the errors of `backend_of`."""
    source = str(getattr(getattr(run.config, "data", None), "source", None) or "")
    sources = [source] if source and Path(source).expanduser().exists() else []
    return backend_of(place, run.folder.path / LOGS, sources, run.console.info)


def at_once(run: Run[Any], command: Sequence[str], place: LaunchOptions) -> None:
    """Have processes do all that is to be done in the folder of a run; return when they have ended.

    `command` is that of the run, whose config they read in its folder. Raises `DpnError` for every failure but that of
    trainings, when all have been stopped.
    """
    folder, console = run.folder.path, run.console
    backend = backend_for(run, place)
    line = (*command, "--config", str(folder / "config.yaml"), "-o", str(folder), "--join", "--no-report")

    def on_start(work: Work) -> None:
        console.info(f"{work.name}: {backend.log_of(work.name)}")

    def on_end(work: Work, code: int) -> None:
        log = backend.log_of(work.name)
        if code not in (0, SweepError.exit_code):
            raise DpnError(f"{work.name}: {last_error(log)} (exit code {code}; {log})")

    works = [Work(f"process {number}", line, helps=True) for number in range(1, backend.slots + 1)]
    run_all(works, backend, on_start, on_end, signals.check_here)
