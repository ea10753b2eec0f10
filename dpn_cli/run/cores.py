"""The processor cores that this process may use."""

from __future__ import annotations

import os


def cores() -> list[int]:
    """Return the numbers of the cores: those that a scheduler, a container or ``--jobs`` has left to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
