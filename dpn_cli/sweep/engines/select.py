"""Engines by their names in ``--engine``."""

from __future__ import annotations

from pathlib import Path

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import Logger
from dpn_cli.errors import DpnError
from dpn_cli.sweep.engines.gpus import Shares, visible_gpus
from dpn_cli.sweep.engines.local import Processes
from dpn_cli.sweep.scheduler import Backend

# Packages of the engines, and the extras that install them.
PACKAGES = {"ray": "ray", "slurm": "submitit"}


def check_sharing(launch: LaunchOptions) -> None:
    """Raise `DpnError` where GPUs cannot be shared as the `launch` says."""
    if launch.jobs_per_gpu is None:
        return
    if launch.engine == "local":
        Shares(visible_gpus(), launch.jobs_per_gpu)
    elif launch.engine == "slurm":
        raise DpnError(
            f"--jobs-per-gpu {launch.jobs_per_gpu}: a job of SLURM has its GPU alone; goes with --engine local or ray"
        )
    elif launch.jobs_per_gpu == "auto":
        raise DpnError("--jobs-per-gpu auto: goes with --engine local; with ray it is a number")
    elif any(name == "num_gpus" for name, _ in launch.resources):
        raise DpnError(f"--jobs-per-gpu {launch.jobs_per_gpu} --resources num_gpus: pass one of them")


def backend_of(launch: LaunchOptions, logs: Path, sources: list[str], notify: Logger) -> Backend:
    """Return the engine of a `launch`.

    Args:
        launch: the engine, its number of processes and its resources.
        logs: folder of their output, on a file system that all nodes have.
        sources: paths of the data; a node with other data is refused.
        notify: receives messages about GPUs.

    Raises `DpnError` when the engine is not installed, not reachable, or does not know a setting.
    """
    settings, jobs = dict(launch.resources), launch.jobs or 1
    if launch.engine == "local":
        if settings:
            raise DpnError(f"--resources {next(iter(settings))}: goes with --engine ray or slurm")
        return _local(launch, logs, notify)
    try:
        if launch.engine == "ray":
            from dpn_cli.sweep.engines.ray import RayCluster

            assert launch.jobs_per_gpu != "auto", "check_sharing refuses it"
            return RayCluster(launch.jobs, logs, settings, sources, launch.jobs_per_gpu, notify)
        from dpn_cli.sweep.engines.slurm import Slurm

        return Slurm(jobs, logs, settings)
    except ModuleNotFoundError as error:
        if error.name != PACKAGES[launch.engine]:
            raise
        raise DpnError(
            f"--engine {launch.engine}: needs {error.name}; pip install 'dpn-cli[{launch.engine}]'"
        ) from error


def _local(launch: LaunchOptions, logs: Path, notify: Logger) -> Processes:
    gpus, jobs = visible_gpus()[: launch.jobs], launch.jobs
    if launch.jobs_per_gpu is None:
        jobs = jobs or 1
        return Processes(jobs, logs, Shares(gpus, -(-jobs // len(gpus))) if gpus else None, notify)
    shares = Shares(gpus, launch.jobs_per_gpu)
    room = shares.most * len(gpus)
    return Processes(min(jobs or room, room), logs, shares, notify)
