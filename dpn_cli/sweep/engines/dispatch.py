"""Runs work on the engine that a launch names, and notes what fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.errors import DpnError, NonFiniteError, OutOfMemoryError, SweepError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.run import Run
from dpn_cli.sweep.engines.local import LOGS, last_error
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.scheduler import Backend, Work, run_all

# Exit codes of trials that failed on their own account: the others go on.
FAILED_TRIAL = (SweepError.exit_code, NonFiniteError.exit_code, OutOfMemoryError.exit_code)


@dataclass
class DispatchReport:
    """Work without a result: `failed` holds errors by name; `unstarted` needs work that failed."""

    failed: dict[str, str] = field(default_factory=dict)
    unstarted: list[Work] = field(default_factory=list)


def create_backend(run: Run[Any], launch: LaunchOptions) -> Backend:
    """Return the engine of a run's launch. Raises the errors of `backend_of`."""
    source = str(getattr(getattr(run.config, "data", None), "source", None) or "")
    sources = [source] if source and Path(source).expanduser().exists() else []
    return backend_of(launch, run.folder.path / LOGS, sources, run.console.info)


def _fatal_error(code: int) -> type[DpnError] | None:
    return None if code in FAILED_TRIAL else DpnError


def dispatch(
    works: Sequence[Work],
    backend: Backend,
    console: Console,
    fatal_error: Callable[[int], type[DpnError] | None] = _fatal_error,
) -> DispatchReport:
    """Run work and return what failed.

    An exit code for which `fatal_error` returns a class stops all work and raises it; by default these are all codes
    but those of trials that diverged or ran out of memory.
    """
    report, started = DispatchReport(), list[str]()

    def on_start(work: Work) -> None:
        started.append(work.name)
        console.info(f"{work.title} ({len(started)} of {len(works)}): {backend.log_of(work.name)}")

    def on_end(work: Work, code: int) -> None:
        if not code:
            console.info(f"{work.title}: done")
            return
        log = backend.log_of(work.name)
        error = last_error(log)
        if kind := fatal_error(code):
            raise kind(f"{work.title}: {error} (exit code {code}; {log})")
        report.failed[work.name] = error
        console.warn(f"{work.title} failed: {error}")

    report.unstarted = run_all(works, backend, on_start, on_end, signals.check_here)
    return report
