"""Allocation of the GPUs of this machine to work that shares them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from dpn_cli.config.launch import PerGpu
from dpn_cli.errors import DpnError
from dpn_cli.run.cores import cores
from dpn_cli.run.gpu_share import part_of
from dpn_cli.sweep.scheduler import Work

# Fewest cores per process where memory decides the number: one drives the GPU, one reads images.
CORES = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name in CUDA_VISIBLE_DEVICES, and its memory in bytes."""

    name: str
    memory: int


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    memory = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return tuple(map(Gpu, names, memory))


@dataclass
class Share:
    """One of `parts` equal parts of the GPU with this number.

    `lane` is the lowest free number on that GPU. With `measures` the process measures how many parts there are, and has
    the whole GPU until then.
    """

    gpu: int
    parts: int
    lane: int
    measures: bool


class Shares:
    """Allocates GPUs.

    Args:
        gpus: the GPUs of the machine.
        per_gpu: number of processes per GPU. With ``"auto"`` the first process of each network has a GPU alone until
            it has measured its memory; others follow as memory and cores allow.

    Raises `DpnError` without GPUs, and when a part of one is too small for anything.
    """

    def __init__(self, gpus: Sequence[Gpu], per_gpu: PerGpu) -> None:
        if not gpus:
            raise DpnError(f"--jobs-per-gpu {per_gpu}: this machine has no GPU that PyTorch can use; pass --jobs")
        self.gpus = gpus
        self.fixed = None if per_gpu == "auto" else per_gpu
        self.most = self.fixed or max(1, len(cores()) // (CORES * len(gpus)))
        if self.fixed and self.fixed > 1:
            part_of(min(gpu.memory for gpu in gpus), self.fixed)
        self.allocated: dict[str, Share] = {}
        self._measured: dict[tuple[str, int], int] = {}

    def find(self, work: Work) -> Share | None:
        """Return a free share for work on the GPU with the most room; None when it has to wait."""
        for gpu in sorted(range(len(self.gpus)), key=lambda gpu: -self._free_share(gpu)):
            parts = self.fixed or self._measured.get((work.network, self.gpus[gpu].memory))
            if Fraction(1, parts or 1) <= self._free_share(gpu):
                used = {share.lane for share in self._shares_on(gpu)}
                lane = next(lane for lane in range(len(used) + 1) if lane not in used)
                return Share(gpu, parts or 1, lane, measures=parts is None and self.most > 1)
        return None

    def take(self, work: Work) -> Share:
        """Allocate the share that `find` returns."""
        share = self.find(work)
        assert share is not None, f"no room for {work.name}"
        self.allocated[work.name] = share
        return share

    def set_parts(self, work: Work, parts: int) -> None:
        """Record the number of parts that work has measured, so that others of its network share its GPU."""
        share = self.allocated[work.name]
        share.parts, share.measures = parts, False
        self._measured[work.network, self.gpus[share.gpu].memory] = parts

    def take_whole(self, work: Work) -> bool:
        """Allocate the whole GPU to work that had a part; return False if it already had all of it."""
        share = self.allocated[work.name]
        was_shared, share.parts, share.measures = share.parts > 1, 1, False
        return was_shared

    def release(self, work: Work) -> None:
        """Free the share of finished work."""
        del self.allocated[work.name]

    def _shares_on(self, gpu: int) -> list[Share]:
        return [share for share in self.allocated.values() if share.gpu == gpu]

    def _free_share(self, gpu: int) -> Fraction:
        return 1 - sum((Fraction(1, share.parts) for share in self._shares_on(gpu)), Fraction(0))
