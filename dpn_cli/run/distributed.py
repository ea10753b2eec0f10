"""A thin layer over torch.distributed, for one process or several (``torchrun --no-python dpn …``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not to type checkers
from torch.nn.parallel import DistributedDataParallel

from dpn_cli.errors import DpnError, WorkerError
from dpn_cli.run.gpu_share import keep_to_part

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and the device it computes on.

    `local_ranks` is the number of ranks on this machine. Where the ranks do not divide a batch, their shares are
    multiples of `grain` rows: with a grain of one micro-batch, any number of ranks has the same micro-batches.
    """

    rank: int
    size: int
    device: torch.device
    local_ranks: int = 1
    grain: int = 1

    @property
    def leads(self) -> bool:
        """Return whether this rank writes files and prints."""
        return self.rank == 0

    def rows(self, batch: int) -> range:
        """Return this rank's rows of a batch, consecutive ones: an equal share, or the nearest to it in grains."""
        return self._rows_of_rank(self.rank, batch)

    def most(self, batch: int) -> int:
        """Return the number of rows of a batch on the rank with the largest share."""
        return max(len(self._rows_of_rank(rank, batch)) for rank in range(self.size))

    def _rows_of_rank(self, rank: int, batch: int) -> range:
        grains, remainder = divmod(batch, self.grain)
        unit = 1 if batch % self.size == 0 or remainder or grains < self.size else self.grain
        first, last = (unit * (batch // unit * number // self.size) for number in (rank, rank + 1))
        return range(first, last)

    def share(self, count: int) -> int:
        """Return the number of this rank's items of `count` that are dealt to the ranks in turn."""
        return len(range(self.rank, count, self.size))


def count_local_ranks() -> int:
    """Return the number of ranks that torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def join(device: str, patience: timedelta | None = None, *, shard: bool = False) -> Iterator[World]:
    """Join the ranks that torchrun started, or run alone. A nested call joins nothing again.

    `device` is ``"auto"`` or a torch device name, `patience` how long ranks wait for each other (torch's own default
    without it). Raises `DpnError` when this machine lacks the device, and where there are no ranks to `shard` a network
    over (one that torchrun started is enough: others may have been lost). Raises `WorkerError` when another rank ends
    early.
    """
    size, rank, local = (
        int(os.environ.get(name, default))
        for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))
    )
    local_ranks = count_local_ranks()
    device_used = _device(device, local)
    if device_used.type == "cuda":
        torch.cuda.set_device(device_used)
        keep_to_part(device_used)
    if shard and not (dist.is_torchelastic_launched() or dist.is_initialized()):
        raise DpnError(
            "--shard: spreads a network over several processes, and this is one; start N of them with "
            "'torchrun --no-python --nproc-per-node N dpn ...', or leave --shard out"
        )
    if size == 1 and not shard:
        yield World(0, 1, device_used)
        return
    if dist.is_initialized():
        yield World(rank, size, device_used, local_ranks)
        return
    try:
        _connect_ranks("nccl" if device_used.type == "cuda" else "gloo", rank, size, patience)
    except RuntimeError as error:  # another rank has ended, or was never there
        raise WorkerError(f"the ranks did not find each other ({' '.join(str(error).split())[:120]})") from error
    try:
        with detect_lost_rank():
            yield World(rank, size, device_used, local_ranks)
            dist.barrier()  # gloo aborts at exit when a rank leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def _connect_ranks(backend: str, rank: int, size: int, patience: timedelta | None) -> None:
    """Connect the ranks through the store that torchrun names.

    On one machine that store outlives the ranks, and its old entries would mislead restarted ranks;
    on several, torchrun's count of restarts is not the same everywhere (docs/ranks.md names the way out).
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend, timeout=patience)
        return
    agent_store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"restart{env['TORCHELASTIC_RESTART_COUNT']}", agent_store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def refuse_ranks(world: World, command: str) -> None:
    """Raise `DpnError` for a command that has nothing to share when there are several ranks."""
    if world.size > 1:
        raise DpnError(f"{command}: run on one rank")


@contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Turn gloo's error about another rank that has ended, or is out of reach, into a `WorkerError`."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) and any(text in str(error) for text in ("by peer", "Broken pipe", "Timed out waiting")):
            raise WorkerError("another rank has ended; its own error names the reason") from error
        raise


def _device(name: str, local: int) -> torch.device:
    if name == "auto":
        return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        available = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise DpnError(f"--device {name}: not usable here; this machine has {', '.join(available)}") from error
    return torch.device("cuda", local) if name == "cuda" else device


def max_over_ranks(value: int) -> int:
    """Return the maximum over ranks. Every rank must call it at the same point."""
    if not dist.is_initialized():
        return value
    return int(reduce_over_ranks(torch.tensor(value), dist.ReduceOp.MAX))


def reduce_over_ranks(value: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum, or another reduction, of a tensor over ranks."""
    if dist.is_initialized():
        value = value.cuda() if dist.get_backend() == "nccl" else value.clone()
        dist.all_reduce(value, operation)
    return value


class _Gather(torch.autograd.Function):
    """Concatenate all ranks' rows in order; in the backward pass, each rank's rows receive the gradients of all ranks.

    torch.distributed.nn.functional.all_gather does the same but is deprecated from torch 2.15 on.
    """

    @staticmethod
    def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gather(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks (ranks * n, d), with gradients; every rank passes n rows (n, d).

    The gradients of all ranks' losses add up, so that DDP's mean over ranks is the gradient of the mean loss.
    """
    if not dist.is_initialized():
        return rows
    gathered: torch.Tensor = _Gather.apply(rows.contiguous())
    return gathered


def from_leader(value: ValueT) -> ValueT:
    """Return rank 0's value on every rank, so that all ranks decide alike."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: ValueT) -> list[ValueT]:
    """Return the values of all ranks, in their order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all(compute: Callable[[], ValueT]) -> list[ValueT]:
    """Return on every rank what each of them computes, in their order; what stops one stops all."""
    value, problem = None, None
    try:
        value = compute()
    except DpnError as error:
        problem = error
    outcomes = from_all((value, problem))
    for _, is_stopped in outcomes:
        if is_stopped is not None:
            raise is_stopped
    return [cast(ValueT, computed) for computed, _ in outcomes]


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_on_leader(world: World, compute: Callable[[], ValueT]) -> ValueT:
    """Return on every rank what rank 0 computes; what stops it there stops all ranks."""
    value, problem = None, None
    if world.leads:
        try:
            value = compute()
        except DpnError as error:
            problem = error
    value, problem = from_leader((value, problem))
    if problem is not None:
        raise problem
    return cast(ValueT, value)


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def parallel(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model so that its gradients are averaged over ranks; with one rank, return it unchanged."""
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    # Buffers are equal on all ranks; broadcasting them would synchronise the ranks in every forward pass.
    with warnings.catch_warnings():
        # torch 2.15 renames the option; torch 2.11 does not know the new name.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
