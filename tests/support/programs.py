"""Programs that tests start: none of them, and nothing that it starts, outlives its time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Seconds that a program may take on a slow machine that is busy with other tests.
LIMIT = 240.0


def child_processes(pid: int) -> list[int]:
    """Return the processes that a process has started. Linux only."""
    with suppress(OSError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for listed in lists for child in listed.read_text().split()]
    return []


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started."""
    below = child_processes(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, 9)
    for child in below:
        kill_tree(child)


def program_environment(**arguments: str) -> dict[str, str]:
    """Return this process's environment, in which the program is the one under test."""
    path = os.pathsep.join([str(ROOT), *(folder for folder in sys.path if folder.startswith(str(ROOT / "tests")))])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **arguments}


@contextmanager
def start_program(command: Sequence[str], *, limit: float = LIMIT, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program, which is killed with all that it has started at the end of the block or after the limit."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **{**pipes, "env": program_environment(), **options}) as process:
        late = threading.Timer(limit, kill_tree, [process.pid])
        late.start()
        try:
            yield process
        finally:
            late.cancel()
            late.join()
            if process.poll() is None:
                kill_tree(process.pid)


def run_program(command: Sequence[str], *, limit: float = LIMIT, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it wrote. Raises `TimeoutExpired` after the limit."""
    with start_program(command, limit=2 * limit, **options) as process:
        output, errors = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def write_program(path: Path, text: str) -> str:
    """Write what stands for the interpreter: it gets ``-m dpn_cli`` and the words of the work."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


_HOLD = """
import sys, time
from pathlib import Path
from dpn_cli.run.files import claim

with claim(Path(sys.argv[1])):
    print("here", flush=True)
    sys.stdin.read()
"""


@contextmanager
def claim_in_other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process claim a folder until the end of the block."""
    with start_program([sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == "here\n"
        yield other
        other.kill()
