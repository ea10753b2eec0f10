"""The processor cores and the shared memory that this process may use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHARED = Path("/dev/shm")


def cores() -> list[int]:
    """Return the numbers of the cores that a scheduler, a container or ``--jobs`` leaves to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shared_memory() -> int | None:
    """Return the free bytes of the memory in which processes hand over tensors; None where the system has no limit."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
