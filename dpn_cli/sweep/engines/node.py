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

# Files of a data folder that enter its digest.
DIGESTED_FILES = 2000


def start_command(
    line: tuple[str, ...], log: IO[bytes], folder: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start a command line in a folder, with additional environment variables.

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
    """Have a process save its state, and wait for its end. Safe while another thread waits for the process."""
    try:
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):
        return


def inspect_node(folder: str, run: str, sources: Iterable[str]) -> dict[str, str]:
    """Return the facts that all nodes share: version of this program, run folder, and digests of the data."""
    base = Path(folder)
    return {
        "version of dpn": __version__,
        f"run folder {run}": "there" if (base / run / "run.json").is_file() else "not there",
        **{f"data {source}": _digest_files(base / Path(source).expanduser()) for source in sources},
    }


def _digest_files(path: Path) -> str:
    """Return a digest of names and sizes of the first files below a path."""
    if not path.exists():
        return "not there"
    entries = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = islice((entry for entry in entries if entry.is_file()), DIGESTED_FILES)
    lines = [f"{file.relative_to(path)} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:12]
