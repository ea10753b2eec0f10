"""Runs work on the nodes of a Ray cluster: one that is there, or one of this machine alone."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpn_cli.errors import DataError, DpnError, OutOfMemoryError, StoppedError, WorkerError
from dpn_cli.run.cores import cores
from dpn_cli.run.process import SHARE
from dpn_cli.sweep.engines import node
from dpn_cli.sweep.scheduler import Work

# Times that the work of a node that was lost, or told to stop, begins again.
AGAIN = 100
ADDRESS = "address"
# Seconds in which a cluster has to answer, and those that work has to save its state.
PATIENCE, NOTICE = 10.0, 120.0


def _work(line: tuple[str, ...], log: str, folder: str, parts: int) -> int:
    """Run a command line on a node, in one of the parts of its GPU, and return its exit code."""
    with Path(log).open("ab") as file:
        process = node.start_command(line, file, folder, {SHARE: str(parts)} if parts > 1 else {})
        try:
            return process.wait()
        except KeyboardInterrupt:  # how Ray cancels
            node.save_and_end(process, signal.SIGTERM)
            raise


class RayCluster:
    """Runs up to `slots` command lines at once. Ray finds nodes for them; those of lost nodes begin again elsewhere.

    Args:
        slots: how many at once.
        logs: folder of what they print, ``LOGS/NAME.log``, which every node has.
        settings: options of a Ray task, such as ``num_gpus``, and ``address`` of the cluster.
        sources: places of the data.
        per_gpu: how many have a GPU together. With it None for `slots` is as many as the cluster has room for.
        say: is told what happens with GPUs.

    Raises `DpnError` when the cluster cannot be reached or has no GPUs to share, and `DataError` when nodes differ in
    what they need.
    """

    def __init__(
        self,
        slots: int | None,
        logs: Path,
        settings: Mapping[str, Any],
        sources: list[str],
        per_gpu: int | None,
        say: Callable[[str], object],
    ) -> None:
        self.logs, self.say = logs.absolute(), say
        options = dict(settings)
        self._connect(options.pop(ADDRESS, None), slots or 1)
        gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
        if per_gpu and not gpus:
            raise DpnError(f"--jobs-per-gpu {per_gpu}: the Ray cluster has no GPU; pass --jobs")
        self._parts = per_gpu or 1
        self.slots = min(slots or gpus * per_gpu, gpus * per_gpu) if per_gpu else slots or 1
        try:
            how = {"num_cpus": 1, "num_gpus": _gpu_fraction(self._parts) if gpus else 0, "max_retries": 0} | options
            self._task = ray.remote(_work).options(**how)
        except (TypeError, ValueError) as error:
            raise DpnError(f"--resources {' '.join(options)}: {' '.join(str(error).split())}") from error
        self._check_nodes(sources)
        self._here = ray.get_runtime_context().get_node_id()
        self._running: dict[Any, Work] = {}
        self._lost = 0
        self._alone: set[str] = set()

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def has_room(self, work: Work) -> bool:
        """Tell that work can begin: Ray has it wait for a node."""
        return True

    def start(self, work: Work, slot: int) -> None:
        """Begin to run work; Ray chooses where."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_of(work.name).write_bytes(b"")
        self._submit(work)

    def ended(self, seconds: float) -> list[tuple[str, int]]:
        """Return names and exit codes of work that has ended, as soon as there is any or the time has passed.

        Raises `WorkerError` when the node through which this process speaks to the cluster is lost: Ray ends all work
        then and says nothing.
        """
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=seconds)
        if not done and not any(each["Alive"] for each in _nodes() if each["NodeID"] == self._here):
            self._running.clear()
            raise WorkerError(
                "--engine ray: this machine's node of the cluster is lost; start it again, and pass --resume to go on"
            )
        codes = []
        for reference in done:
            work, code = self._running.pop(reference), self._code(reference)
            if code == StoppedError(signal.SIGTERM).exit_code and self._lost < AGAIN:
                self._lost += 1
                self._submit(work)
            elif code == OutOfMemoryError.exit_code and self._parts > 1 and work.name not in self._alone:
                self.say(f"{work.name}: out of memory beside others on a GPU; once more, alone")
                self._alone.add(work.name)
                self._submit(work)
            else:
                codes.append((work.name, code))
        return codes

    def stop(self) -> None:
        """Tell all work to save its state and to end, and wait for it."""
        for reference in self._running:
            ray.cancel(reference)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=NOTICE)

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()

    def _submit(self, work: Work) -> None:
        alone = work.name in self._alone
        task = self._task.options(num_gpus=1) if alone else self._task
        words = (work.line, str(self.log_of(work.name)), str(Path.cwd()), 1 if alone else self._parts)
        self._running[task.remote(*words)] = work

    def _code(self, reference: Any) -> int:
        """Return the exit code of work; that of work that was stopped when its node is lost."""
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            raise DpnError(f"--engine ray: {str(error).strip().splitlines()[-1]}") from error
        except ray.exceptions.RayError:
            return StoppedError(signal.SIGTERM).exit_code

    def _connect(self, address: str | None, slots: int) -> None:
        how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        named = address or os.environ.get("RAY_ADDRESS")
        try:
            if named:
                _check_port(named)
                ray.init(address=named, **{name: value for name, value in how.items() if name != "include_dashboard"})
            else:
                # "local": without an address, Ray would look for a cluster on this machine, which has cores of its own.
                ray.init("local", num_cpus=max(len(cores()), slots), **how)
        except (OSError, RuntimeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise DpnError(
                f"--engine ray: no cluster at {named or 'this machine'} ({told}); start one there"
            ) from error

    def _check_nodes(self, sources: list[str]) -> None:
        """Refuse nodes that have another version of this program, or not the run's folder and the same data."""
        folder, run = str(Path.cwd()), str(self.logs.parent)
        here = node.inspect_node(folder, run, sources)
        look = ray.remote(node.inspect_node)
        nodes = {each["NodeID"]: each["NodeManagerHostname"] for each in _nodes() if each["Alive"]}
        for number, host in nodes.items():
            there_only = NodeAffinitySchedulingStrategy(number, soft=False)
            try:
                there = ray.get(look.options(num_cpus=0, scheduling_strategy=there_only).remote(folder, run, sources))
            except ray.exceptions.RayError as error:
                raise DpnError(f"--engine ray: {host}: {str(error).splitlines()[-1]}") from error
            for what, value in here.items():
                if there[what] != value:
                    raise DataError(
                        f"--engine ray: {host}: {what} is {there[what]}, and here {value}; give all nodes the same"
                    )


def _gpu_fraction(parts: int) -> float:
    """Return a part of a GPU of which so many fit: Ray counts in parts of ten thousand."""
    return 10_000 // parts / 10_000


def _check_port(address: str) -> None:
    """Raise `OSError` when nobody listens at HOST:PORT: Ray ends the process then."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]
