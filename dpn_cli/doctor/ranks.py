"""Checks of the ranks that torchrun has started: their connection and their versions. Imports torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from dpn_cli.doctor.packages import first_line
from dpn_cli.doctor.result import Finding
from dpn_cli.run.console import count_noun
from dpn_cli.run.environment import git_commit, versions

if TYPE_CHECKING:
    import torch

NAME = "ranks"
# Time that ranks wait for each other.
TIMEOUT = timedelta(seconds=60)
# Length of the vector that is summed over the ranks to measure the speed: ViT-Ti's gradients.
NUMBERS = 5_700_000
REPEATS = 10


@dataclass(frozen=True)
class _Rank:
    """Report of a rank to the others: its machine, its versions, and its findings."""

    host: str
    versions: dict[str, str]
    findings: tuple[Finding, ...]


def check_ranks(local_findings: Sequence[Finding]) -> Iterator[Finding]:
    """Join the other ranks, sum numbers over them, and compare versions; yields the findings of all ranks.

    `local_findings` are the findings of this rank. All ranks must call it.
    """
    import torch

    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count()
    if size == 1:
        built = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
        found = f"one process (built in: {', '.join(built)}); start several with torchrun to see whether they meet"
        yield Finding(NAME, "ok", found)
    elif 0 < devices < local:
        found = f"{count_noun(local, 'rank')} on this machine, and {count_noun(devices, 'GPU')}"
        yield Finding(NAME, "problem", found, f"start torchrun with --nproc-per-node {devices}")
    else:
        try:
            yield from _check_collectives(local_findings)
        except Exception as error:  # a lost network, an ended rank and a wrong address raise many kinds
            yield Finding(
                NAME,
                "problem",
                f"rank {os.environ['RANK']} of {size} does not reach the others: {first_line(error)}",
                "see that each machine has the same torch and reaches MASTER_ADDR, and name the network with "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says more",
            )


def _check_collectives(local_findings: Sequence[Finding]) -> Iterator[Finding]:
    import torch

    from dpn_cli.run import distributed

    with distributed.join("auto", TIMEOUT) as world:
        ranks = distributed.from_all(_Rank(socket.gethostname(), _versions(), tuple(local_findings)))
        total = int(distributed.reduce_over_ranks(torch.tensor(world.rank)))
        small, large = (_seconds(torch.zeros(numbers, device=world.device)) for numbers in (1, NUMBERS))
    hosts = len({rank.host for rank in ranks})
    if total != sum(range(world.size)):
        found = f"the sum of the numbers of {count_noun(world.size, 'rank')} is {total}"
        yield Finding(NAME, "problem", found, "the network or a GPU computes wrongly; NCCL_DEBUG=INFO says more")
        return
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    yield Finding(
        NAME,
        "ok",
        f"{count_noun(world.size, 'rank')} on {count_noun(hosts, 'machine')} meet over {backend}: a number is summed "
        f"in {1e3 * small:.2g} ms, {4e-6 * NUMBERS:.0f} MB in {1e3 * large:.2g} ms",
    )
    yield from _compare_versions(ranks)
    leader_findings = {(ranks[0].host, finding.name, finding.level) for finding in ranks[0].findings}
    for number, rank in enumerate(ranks):
        for finding in rank.findings:
            if finding.level != "ok" and (key := (rank.host, finding.name, finding.level)) not in leader_findings:
                leader_findings.add(key)
                yield replace(finding, name=f"rank {number}, {rank.host}: {finding.name}")


def _versions() -> dict[str, str]:
    return {**versions(), "commit": git_commit() or "none"}


def _compare_versions(ranks: Sequence[_Rank]) -> Iterator[Finding]:
    """Yield a problem for each rank with other versions than rank 0."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        unequal = [name for name in first.versions if rank.versions.get(name) != first.versions[name]]
        if unequal:
            differences = "; ".join(f"{name} {rank.versions.get(name)}, not {first.versions[name]}" for name in unequal)
            found = f"not the versions of rank 0 on {first.host}: {differences}"
            yield Finding(f"rank {number}, {rank.host}", "problem", found, "install the same on all machines")


def _seconds(numbers: torch.Tensor) -> float:
    """Return the mean seconds of a sum over all ranks, without the first one."""
    import torch
    import torch.distributed as dist

    for repeat in range(REPEATS + 1):
        if repeat == 1:
            start_time = time.perf_counter()
        dist.all_reduce(numbers)
        if numbers.is_cuda:
            torch.cuda.synchronize()
    return (time.perf_counter() - start_time) / REPEATS
