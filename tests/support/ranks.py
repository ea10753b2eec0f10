"""Ranks of a distributed training, with gloo, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dpn_cli.run.distributed import World
from support.processes import run_processes

CPU = torch.device("cpu")


Work = Callable[[World, Path], None]


def _run_rank(rank: int, folder: str, work: Work, ranks: int) -> None:
    """Join the process group, work and leave it, all in one function: gloo aborts where it outlives its rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    work(World(rank, ranks, CPU), Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def run_distributed(work: Work, folder: Path, ranks: int = 2) -> None:
    """Call ``work(world, folder)`` on every rank of a process group."""
    run_processes(_run_rank, str(folder), work, ranks, ranks=ranks)
