"""The machine: processor cores, memory, shared memory, open files. Imports no torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from dpn_cli.doctor.result import Finding
from dpn_cli.run.console import gigabytes
from dpn_cli.run.cores import SHARED, cores, shared_memory

GROUPS, PROCESS_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# ViT-L's weights, gradients and optimizer state: 16 bytes for each of 304 M weights.
MIN_MEMORY = 5e9
# Each decoding process has two batches in shared memory; a batch of 512 images of 224 pixels has 77 MB.
MIN_SHARED = 1e9
# Linux's default; tensors that processes hand over are open files.
MIN_FILES = 1024


def check_machine() -> Iterator[Finding]:
    """Yield findings about cores, memory, shared memory and the limit of open files."""
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _open_files()


def _cores() -> Finding:
    usable, total = len(cores()), os.cpu_count() or 1
    found = f"{usable} of {total} cores" if usable < total else f"{usable} cores"
    limit = _core_limit()
    if limit is None or limit >= usable:
        return Finding("cores", "ok", found)
    workers = max(1, int(limit))
    return Finding(
        "cores",
        "warning",
        f"{found}, but this container may use {limit:g} of them at a time, which '-j auto' does not see",
        f"pass -j {workers}, and set OMP_NUM_THREADS={workers}",
    )


def _core_limit() -> float | None:
    """Return the number of cores that the control groups allow; None without a limit."""
    limits = []
    for group in _groups("cpu"):
        text = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        quota, _, period = text.partition(" ")
        limits += [int(quota) / int(period)] if quota.isdecimal() else []
    return min(limits, default=None)


def _memory() -> Finding:
    total, available = _memory_of_machine()
    limits = [_read(group / "memory.max") or _read(group / "memory.limit_in_bytes") for group in _groups("memory")]
    limit = min([int(text) for text in limits if text.isdecimal()], default=total)
    total, available = min(total, limit), min(available, limit)
    found = f"{gigabytes(available)} of {gigabytes(total)} available"
    if available >= MIN_MEMORY:
        return Finding("memory", "ok", found)
    return Finding(
        "memory",
        "warning",
        f"{found}; weights, gradients and optimizer state of ViT-L take {gigabytes(MIN_MEMORY)}",
        "end other programs, or use a smaller --arch, --micro-batch-size and -j",
    )


def _memory_of_machine() -> tuple[int, int]:
    """Return the bytes of total and of available memory, which are equal if the system does not report the latter."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    return total, int(available[1]) * 1024 if available else total


def _shared_memory() -> Finding:
    free = shared_memory()
    if free is None:
        return Finding("shared memory", "ok", f"no {SHARED} on this system")
    found = f"{gigabytes(free)} free in {SHARED}"
    if free >= MIN_SHARED:
        return Finding("shared memory", "ok", found)
    return Finding(
        "shared memory",
        "warning",
        f"{found}, in which processes hand over the images that they have decoded",
        "start the container with --shm-size 8g or --ipc host, or pass -j 0",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    found = f"at most {soft}; a batch that a process hands over is an open file"
    allowed = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
    remedy = f"run 'ulimit -n {MIN_FILES}' first" if allowed else f"have the limit of {hard} raised, or pass -j 0"
    return Finding("open files", "warning", found, remedy)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of both versions, and their parents."""
    for line in _read(PROCESS_GROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            root = GROUPS if number == "0" else GROUPS / controller
            inner = root / path.strip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read(file: Path) -> str:
    """Return the stripped text of a file; an empty string if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
