"""Hands out the trials of a run to the engine that its launch names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.errors import DpnError, NonFiniteError, OutOfMemoryError, SweepError
from dpn_cli.run import signals
from dpn_cli.run.run import Run
from dpn_cli.sweep.engines.local import LOGS, last_error
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.scheduler import Backend, Work, run_all

# Exit codes of trials that failed on their own account: the others go on.
FAILED_TRIAL = (SweepError.exit_code, NonFiniteError.exit_code, OutOfMemoryError.exit_code)


def backend_for(run: Run[Any], launch: LaunchOptions) -> Backend:
    """Return what runs the work of a run, as its `launch` says. Raises the errors of `backend_of`."""
    source = str(getattr(getattr(run.config, "data", None), "source", None) or "")
    sources = [source] if source and Path(source).expanduser().exists() else []
    return backend_of(launch, run.folder.path / LOGS, sources, run.console.info)


def dispatch(run: Run[Any], works: Sequence[Work], backend: Backend) -> dict[str, str]:
    """Run the trials of a run; return, by name, the error of each that diverged or ran out of memory.

    Raises `DpnError` for every other failure, when all have been stopped.
    """
    console, failed, labels = run.console, dict[str, str](), {work.name: work.label or work.name for work in works}

    def on_start(work: Work) -> None:
        console.info(f"{labels[work.name]}: {backend.log_of(work.name)}")

    def on_end(work: Work, code: int) -> None:
        log, label = backend.log_of(work.name), labels[work.name]
        if code in FAILED_TRIAL:
            failed[work.name] = last_error(log)
            console.warn(f"{label} failed: {failed[work.name]}")
        elif code:
            raise DpnError(f"{label}: {last_error(log)} (exit code {code}; {log})")

    run_all(works, backend, on_start, on_end, signals.check_here)
    return failed
