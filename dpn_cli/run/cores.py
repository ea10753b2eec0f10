"""The processor cores and the shared memory that this process may use."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

SHARED, CLOCKS = Path("/dev/shm"), Path("/proc/stat")


def cores() -> list[int]:
    """Return the numbers of the cores that a scheduler, a container or ``--jobs`` leaves to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def other_programs_seconds() -> float | None:
    """Return the seconds that other programs have used this process's cores; None where the system does not say."""
    names = {f"cpu{number}" for number in cores()}
    try:
        lines = [line.split() for line in CLOCKS.read_text().splitlines()]
        ticks = sum(int(tick) for line in lines if line[0] in names for tick in line[1:4])  # user, nice and system
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def shared_memory() -> int | None:
    """Return the free bytes of the memory in which processes hand over tensors; None where the system has no limit."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
