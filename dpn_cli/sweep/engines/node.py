"""Functions that run on a node of a cluster: one command line, and a check of the node."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from dpn_cli import __version__
from dpn_cli.run.process import PARENT

# Entries of a folder of data by which copies of it are told apart.
LOOKED_AT = 2000


def start_command(
    line: tuple[str, ...], log: IO[bytes], folder: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start a command line in a folder, with some more environment variables.

    The process saves its state and ends when this one dies (Linux).
    """
    return subprocess.Popen(
        [sys.executable, "-m", "dpn_cli", *line],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, PARENT: str(os.getpid()), **variables},
        process_group=0,
    )


def save_and_end(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Tell a process to save its state, and wait for its end. May be called while the process is waited for."""
    try:
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):
        return


def inspect_node(folder: str, run: str, sources: Iterable[str]) -> dict[str, str]:
    """Return what has to be the same on all nodes: this program, a run's folder, and the data at their places."""
    base = Path(folder)
    return {
        "version of dpn": __version__,
        f"run folder {run}": "there" if (base / run / "run.json").is_file() else "not there",
        **{f"data {source}": _entries(base / Path(source).expanduser()) for source in sources},
    }


def _entries(place: Path) -> str:
    """Return a digest of names and sizes of the first files below a place."""
    if not place.exists():
        return "not there"
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    first = islice((path for path in files if path.is_file()), LOOKED_AT)
    told = [f"{path.relative_to(place)} {path.stat().st_size}" for path in first]
    return hashlib.sha256("\n".join(told).encode("utf-8", "backslashreplace")).hexdigest()[:12]
