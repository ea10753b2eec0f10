"""Engine that runs work on the nodes of a Ray cluster: a running one, or one on this machine alone."""

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

# Restarts of work whose node was lost or stopped.
MOST_RESTARTS = 100
ADDRESS = "address"
# Seconds for a cluster to respond, and for work to save its state.
CONNECT_TIMEOUT, SAVE_TIMEOUT = 10.0, 120.0


def _run_command(line: tuple[str, ...], log: str, folder: str, gpu_shares: int) -> int:
    """Run a command line on a node, in one of `gpu_shares` parts of its GPU, and return its exit code."""
    with Path(log).open("ab") as file:
        process = node.start_command(line, file, folder, {SHARE: str(gpu_shares)} if gpu_shares > 1 else {})
        try:
            return process.wait()
        except KeyboardInterrupt:  # how Ray cancels
            node.save_and_end(process, signal.SIGTERM)
            raise


class RayCluster:
    """Runs up to `slots` command lines at once on nodes that Ray chooses; those of lost nodes restart elsewhere.

    Args:
        slots: number of command lines at once.
        logs: folder of their output, ``LOGS/NAME.log``, on a file system that every node has.
        settings: options of a Ray task, such as ``num_gpus``, and ``address`` of the cluster.
        sources: paths of the data.
        per_gpu: number of processes per GPU. With it, None for `slots` is as many as the cluster has room for.
        notify: receives messages about GPUs.

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
        notify: Callable[[str], object],
    ) -> None:
        self.logs, self.notify = logs.absolute(), notify
        options = dict(settings)
        self._connect(options.pop(ADDRESS, None), slots or 1)
        gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
        if per_gpu and not gpus:
            raise DpnError(f"--jobs-per-gpu {per_gpu}: the Ray cluster has no GPU; pass --jobs")
        self._per_gpu = per_gpu or 1
        self.slots = min(slots or gpus * per_gpu, gpus * per_gpu) if per_gpu else slots or 1
        try:
            task_options = {
                "num_cpus": 1,
                "num_gpus": _gpu_fraction(self._per_gpu) if gpus else 0,
                "max_retries": 0,
            } | options
            self._task = ray.remote(_run_command).options(**task_options)
        except (TypeError, ValueError) as error:
            raise DpnError(f"--resources {' '.join(options)}: {' '.join(str(error).split())}") from error
        self._check_nodes(sources)
        self._driver_node = ray.get_runtime_context().get_node_id()
        self._running: dict[Any, Work] = {}
        self._restarts = 0
        self._exclusive: set[str] = set()

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def has_room(self, work: Work) -> bool:
        """Return True: Ray queues work until a node is free."""
        return True

    def start(self, work: Work, slot: int) -> None:
        """Start work; Ray chooses where."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_of(work.name).write_bytes(b"")
        self._submit(work)

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        """Wait up to `seconds` for work to finish; return names and exit codes of what has finished.

        Raises `WorkerError` when the node that connects this process to the cluster is lost: Ray then ends all work
        without an error.
        """
        finished, _ = ray.wait(list(self._running), num_returns=1, timeout=seconds)
        if not finished and not any(entry["Alive"] for entry in _nodes() if entry["NodeID"] == self._driver_node):
            self._running.clear()
            raise WorkerError(
                "--engine ray: this machine's node of the cluster is lost; start it again, and pass --resume to go on"
            )
        codes = []
        for reference in finished:
            work, code = self._running.pop(reference), self._exit_code(reference)
            if code == StoppedError(signal.SIGTERM).exit_code and self._restarts < MOST_RESTARTS:
                self._restarts += 1
                self._submit(work)
            elif code == OutOfMemoryError.exit_code and self._per_gpu > 1 and work.name not in self._exclusive:
                self.notify(f"{work.name}: out of memory on a shared GPU; restarted on a whole one")
                self._exclusive.add(work.name)
                self._submit(work)
            else:
                codes.append((work.name, code))
        return codes

    def stop(self) -> None:
        """Have all work save its state and end, and wait for it."""
        for reference in self._running:
            ray.cancel(reference)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=SAVE_TIMEOUT)

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()

    def _submit(self, work: Work) -> None:
        exclusive = work.name in self._exclusive
        task = self._task.options(num_gpus=1) if exclusive else self._task
        arguments = (work.line, str(self.log_of(work.name)), str(Path.cwd()), 1 if exclusive else self._per_gpu)
        self._running[task.remote(*arguments)] = work

    def _exit_code(self, reference: Any) -> int:
        """Return the exit code of work; a lost node counts as a stop by signal."""
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            raise DpnError(f"--engine ray: {str(error).strip().splitlines()[-1]}") from error
        except ray.exceptions.RayError:
            return StoppedError(signal.SIGTERM).exit_code

    def _connect(self, address: str | None, slots: int) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cluster = address or os.environ.get("RAY_ADDRESS")
        try:
            if cluster:
                _check_port(cluster)
                ray.init(
                    address=cluster, **{name: value for name, value in options.items() if name != "include_dashboard"}
                )
            else:
                # "local": without an address, Ray would look for a cluster on this machine, which has cores of its own.
                ray.init("local", num_cpus=max(len(cores()), slots), include_dashboard=False, **options)
        except (OSError, RuntimeError, ValueError) as error:
            message = " ".join(str(error).split())[:200]
            raise DpnError(
                f"--engine ray: no cluster at {cluster or 'this machine'} ({message}); start one there"
            ) from error

    def _check_nodes(self, sources: list[str]) -> None:
        """Refuse nodes with another version of this program, without the run's folder, or with other data."""
        folder, run = str(Path.cwd()), str(self.logs.parent)
        expected = node.inspect_node(folder, run, sources)
        inspect = ray.remote(node.inspect_node)
        nodes = {entry["NodeID"]: entry["NodeManagerHostname"] for entry in _nodes() if entry["Alive"]}
        for node_id, host in nodes.items():
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            try:
                actual = ray.get(inspect.options(num_cpus=0, scheduling_strategy=on_node).remote(folder, run, sources))
            except ray.exceptions.RayError as error:
                raise DpnError(f"--engine ray: {host}: {str(error).splitlines()[-1]}") from error
            for key, value in expected.items():
                if actual[key] != value:
                    raise DataError(
                        f"--engine ray: {host}: {key} is {actual[key]}, and here {value}; give all nodes the same"
                    )


def _gpu_fraction(per_gpu: int) -> float:
    """Return the largest fraction of a GPU of which `per_gpu` fit; Ray counts in ten-thousandths."""
    return 10_000 // per_gpu / 10_000


def _check_port(address: str) -> None:
    """Raise `OSError` when nothing listens at HOST:PORT, where Ray would end the process."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]
