"""The torchrun that started this process; it restarts its ranks when one is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from dpn_cli.run.distributed import from_all
from dpn_cli.run.environment import describe_process

# Key of run.json.
LAUNCH = "torchrun"
# What torchrun calls itself without --rdzv-id, in every command.
NO_ID = "none"


@dataclass(frozen=True)
class TorchrunLaunch:
    """One torchrun command.

    Args:
        id: its ``--rdzv-id``.
        restarts: how often its processes have started their ranks again, at most; not when a machine has joined.
        agents: its processes, one on each machine.
    """

    id: str
    restarts: int
    agents: list[dict[str, Any]]

    def has_worked_on(self, run: Mapping[str, Any]) -> bool:
        """Return whether this command has worked on the run of that run.json before: it has started its ranks again.

        A process of its own was there then. Where a script stands between torchrun and its ranks, the id and the count
        of restarts have to do.
        """
        saved_launch = run.get(LAUNCH) or {}
        is_known_agent = any(agent in saved_launch.get("agents", ()) for agent in self.agents)
        return is_known_agent or (self.restarts > 0 and self.has_id_of(run))

    def has_id_of(self, run: Mapping[str, Any]) -> bool:
        """Return whether the run of that run.json started under the same id, as when a job is requeued."""
        return self.id != NO_ID and self.id == (run.get(LAUNCH) or {}).get("id")

    def warning(self) -> str | None:
        """Return what keeps torchrun from starting ranks again on several machines, where it is to do so."""
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts_ranks = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
        if not (shared and restarts_ranks and len(self.agents) > 1):
            return None
        return (
            "torchrun keeps the messages between ranks, which mislead restarted ranks on several "
            "machines; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it"
        )

    def facts(self) -> dict[str, Any]:
        """Return the field of run.json that names this command."""
        return {LAUNCH: asdict(self)}


def current_torchrun() -> TorchrunLaunch | None:
    """Return the torchrun command that started the ranks; None without one. Every rank must call it."""
    if not dist.is_torchelastic_launched():
        return None
    own_facts = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), describe_process(os.getppid())
    restarts, agents = zip(*from_all(own_facts), strict=True)
    return TorchrunLaunch(
        os.environ["TORCHELASTIC_RUN_ID"],
        max(restarts),
        [agent for number, agent in enumerate(agents) if agent not in agents[:number]],
    )
