"""Worker processes that read data. They end with the block that uses them, and their death is one clear error."""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dpn_cli.errors import DpnError, WorkerError
from dpn_cli.run.signals import SIGNALS

# Seconds that a worker has to finish its last item before it is killed.
PATIENCE = 2.0
# Most seconds from the closing of a process's connections to its end.
DYING = 1.0
# Probable causes of a signal that the system sent.
CAUSES = {
    signal.SIGKILL: "the machine has probably run out of memory; use a smaller -j",
    signal.SIGBUS: "shared memory (/dev/shm) is probably full; enlarge it, or use a smaller -j",
}

_watched_processes: list[Sequence[BaseProcess]] = []  # global, as child processes are
_starting: list[bool] = []  # an entry for each loader that is being made


def follow_parent(worker: int) -> None:
    """Make this worker process ignore stop signals, which schedulers send to every process, and end with its parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def open_loader(dataset: Dataset[Any], workers: int, **options: Any) -> Iterator[Iterator[Any]]:
    """Iterate over a data set through a `DataLoader` whose workers end with the block, however it ends.

    `options` are the loader's. Raises `WorkerError` inside the block as soon as a worker dies.
    """
    # A loader stops its workers when it is garbage-collected, so that a kept frame or traceback would keep them alive.
    processes = list[BaseProcess]()
    if workers:
        options |= {"worker_init_fn": follow_parent, "multiprocessing_context": _recording_context(processes)}
    try:
        with watch_processes(processes), _defer_notices():
            items = iter(DataLoader(dataset, num_workers=workers, **options))
    except BaseException:
        kill_processes(processes)
        raise
    try:
        with watch_processes(processes):
            yield items
    finally:
        if processes:
            _end(items, processes)


def _recording_context(started: list[BaseProcess]) -> BaseContext:
    """Return a multiprocessing context that appends the processes it starts to a list."""
    context = copy.copy(multiprocessing.get_context())
    create = context.Process

    def start_recorded(*arguments: Any, **options: Any) -> BaseProcess:
        started.append(create(*arguments, **options))
        return started[-1]

    context.Process = start_recorded  # type: ignore[assignment, misc]  # a class otherwise
    return context


@contextmanager
def watch_processes(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Raise `WorkerError` inside the block as soon as one of the child processes dies."""
    _watched_processes.append(processes)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _notice)  # instead of the loader's handler, which raises a RuntimeError
    try:
        _notice()
        yield
    except DpnError:
        raise
    except Exception:
        # A dying worker shows as a lost connection or a RuntimeError in its reader, perhaps before it has ended.
        running = [process for process in processes if process.pid is not None]
        ended = wait([process.sentinel for process in running], DYING if running else 0)
        for process in running:
            if process.sentinel in ended:
                _wait_for_exit_code(process)
        _raise_for_dead(processes)
        raise
    finally:
        _unwatch(processes)


@contextmanager
def _defer_notices() -> Iterator[None]:
    """Delay the errors of `watch_processes`: in a fork, Python prints such an error and drops it."""
    _starting.append(True)
    try:
        yield
    finally:
        _starting.pop()


def _notice(number: int = 0, frame: FrameType | None = None) -> None:
    for processes in [] if _starting else list(_watched_processes):
        _raise_for_dead(processes)


def _wait_for_exit_code(process: BaseProcess) -> None:
    """Wait, for a second at most, until a process whose connections have closed has an exit code."""
    last = time.monotonic() + DYING
    process.join(DYING)
    # A pool's own thread may have received the exit code from the system and not stored it yet; until it does, `join`
    # returns at once.
    while process.exitcode is None and time.monotonic() < last:
        time.sleep(0.001)


def _raise_for_dead(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if code := process.exitcode:
            _unwatch(processes)  # raised once, and not again while the other workers end
            raise WorkerError(_cause_of_death(process.pid, code)) from None


def _cause_of_death(pid: int | None, code: int) -> str:
    if code > 0:
        return f"data-loading process {pid} ended with exit code {code}; -j 0 reads without processes and shows why"
    number = signal.Signals(-code)
    cause = CAUSES.get(number, "-j 0 reads without such processes")
    return f"data-loading process {pid} was killed by {number.name}: {cause}"


def _unwatch(processes: Sequence[BaseProcess]) -> None:
    _watched_processes[:] = [group for group in _watched_processes if group is not processes]


def _end(items: Any, processes: Sequence[BaseProcess]) -> None:
    """Stop a loader's workers, and kill busy ones after `PATIENCE`: they ignore SIGTERM and have nothing to save."""
    if any(process.exitcode for process in processes):
        kill_processes(processes)  # they may wait for a lock of the dead one
    kill_timer = threading.Timer(PATIENCE, kill_processes, [processes])
    kill_timer.start()
    try:
        items._shutdown_workers()
    finally:
        kill_timer.cancel()
        kill_timer.join()
        kill_processes(processes)


def kill_processes(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that have been started, and wait until they have ended."""
    running = [process for process in processes if process.pid is not None]
    for process in running:
        process.kill()
    for process in running:
        process.join()


@atexit.register
def _kill_all() -> None:
    """Kill workers before multiprocessing's exit, which sends them a SIGTERM and waits for ever."""
    for processes in _watched_processes:
        kill_processes(processes)
