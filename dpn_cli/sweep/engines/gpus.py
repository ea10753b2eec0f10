"""The GPUs of this machine, and which work runs on which of them, beside which other."""

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

# Cores of a process on a GPU at least, where memory decides how many there are: one drives the GPU, one reads images.
CORES = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU: what CUDA_VISIBLE_DEVICES calls it, and its memory in bytes."""

    name: str
    memory: int


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(count)]
    memory = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return tuple(Gpu(*one) for one in zip(names, memory, strict=False))


@dataclass
class Share:
    """One of `parts` equal parts of the GPU with this number.

    `lane` is the lowest number that nobody else there has. With `measures` the process is to say how many parts there
    are, and has the whole GPU until then.
    """

    gpu: int
    parts: int
    lane: int
    measures: bool


class Shares:
    """Deals out GPUs.

    Args:
        gpus: those of the machine.
        per_gpu: how many processes have a GPU together. With ``"auto"`` the first one of each network has a GPU alone
            until it has said what it takes, and others follow as memory and cores allow.

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
        self.dealt: dict[str, Share] = {}
        self._measured: dict[tuple[str, int], int] = {}

    def find(self, work: Work) -> Share | None:
        """Return the share that work can have now, of the GPU with the most room; None when it has to wait."""
        for gpu in sorted(range(len(self.gpus)), key=lambda gpu: -self._free_share(gpu)):
            parts = self.fixed or self._measured.get((work.network, self.gpus[gpu].memory))
            if Fraction(1, parts or 1) <= self._free_share(gpu):
                taken = {share.lane for share in self._shares_on(gpu)}
                lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
                return Share(gpu, parts or 1, lane, measures=parts is None and self.most > 1)
        return None

    def take(self, work: Work) -> Share:
        """Deal out the share that `find` has found."""
        share = self.find(work)
        assert share is not None, f"no room for {work.name}"
        self.dealt[work.name] = share
        return share

    def learn(self, work: Work, parts: int) -> None:
        """Note what work has said of its GPU: others of its network fit beside it."""
        share = self.dealt[work.name]
        share.parts, share.measures = parts, False
        self._measured[work.network, self.gpus[share.gpu].memory] = parts

    def take_whole(self, work: Work) -> bool:
        """Deal work the whole GPU of which it had a part, as soon as the others there end; False where it had it."""
        share = self.dealt[work.name]
        had_part, share.parts, share.measures = share.parts > 1, 1, False
        return had_part

    def give_back(self, work: Work) -> None:
        """Take back the share of work that has ended."""
        del self.dealt[work.name]

    def _shares_on(self, gpu: int) -> list[Share]:
        return [share for share in self.dealt.values() if share.gpu == gpu]

    def _free_share(self, gpu: int) -> Fraction:
        return 1 - sum((Fraction(1, share.parts) for share in self._shares_on(gpu)), Fraction(0))
