"""The back ends by the names that ``--engine`` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from dpn_cli.errors import DpnError
from dpn_cli.jobs.processes import Processes, visible_gpus
from dpn_cli.jobs.scheduler import Backend

Engine = Literal["local", "ray", "slurm"]
# Packages of the engines, and the extras that install them.
PACKAGES = {"ray": "ray", "slurm": "submitit"}


def backend_of(engine: Engine, jobs: int, logs: Path, settings: Mapping[str, object], sources: list[str]) -> Backend:
    """Return what runs up to `jobs` command lines at once.

    Args:
        engine: ``local`` for processes of this machine, ``ray`` for a Ray cluster, ``slurm`` for jobs of SLURM.
        jobs: how many at once.
        logs: folder of what they print, on a file system that all nodes have.
        settings: resources of each, in the words of the engine.
        sources: places of the data; a node that does not have the same there is refused.

    Raises `DpnError` when the engine is not installed, not reachable or does not know a setting.
    """
    if engine == "local":
        if settings:
            raise DpnError(f"--resources {next(iter(settings))}: goes with --engine ray or slurm")
        return Processes(jobs, logs, visible_gpus(torch.cuda.device_count()))
    try:
        if engine == "ray":
            from dpn_cli.jobs.ray_cluster import RayCluster

            return RayCluster(jobs, logs, settings, sources)
        from dpn_cli.jobs.slurm import Slurm

        return Slurm(jobs, logs, settings)
    except ModuleNotFoundError as error:
        if error.name != PACKAGES[engine]:
            raise
        raise DpnError(f"--engine {engine}: needs {error.name}; pip install 'dpn-cli[{engine}]'") from error
