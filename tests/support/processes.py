"""Processes forked from a server that has imported the libraries already. None outlives its time limit."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

from support.programs import LIMIT, kill_tree


def run_processes(main: Callable[..., None], *arguments: object, ranks: int = 2, limit: float = LIMIT) -> None:
    """Call ``main(rank, *arguments)`` in processes that come from one that has imported the libraries already.

    Raises `TimeoutError` after the limit in seconds: ranks that wait for each other wait for ever.
    """
    options: dict[str, Any] = {"nprocs": ranks, "join": False, "start_method": "forkserver"}
    context = start_processes(main, args=arguments, **options)  # type: ignore[no-untyped-call]
    end = time.monotonic() + limit
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise TimeoutError(f"the ranks did not end within {limit:g} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def run_in_child(main: Callable[..., None], *arguments: object, limit: float = LIMIT) -> int:
    """Call ``main(*arguments)`` in a process that comes from where those of `run_processes` do; returns its exit code.

    Raises `TimeoutError` after the limit in seconds.
    """
    process = multiprocessing.get_context("forkserver").Process(target=main, args=arguments)
    process.start()
    process.join(limit)
    code, pid = process.exitcode, process.pid
    if code is None:
        assert pid is not None
        kill_tree(pid)
        raise TimeoutError(f"the process did not end within {limit:g} s")
    return code
