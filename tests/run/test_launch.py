"""A run that torchrun began goes on when torchrun starts the ranks again, and only then."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from filelock import FileLock
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.errors import DpnError
from dpn_cli.run import distributed, elastic, files
from dpn_cli.run import run as sessions
from dpn_cli.run.console import Console
from dpn_cli.run.elastic import NO_ID, TorchrunLaunch
from dpn_cli.run.environment import describe_process
from support.pretrain import small_pretrain_config

AGENTS = [{"host": host, "pid": 7, "pids": None, "began": "1"} for host in ("node1", "node2", "node3")]
RUN = TorchrunLaunch("run7", 0, AGENTS[:2]).facts()


@pytest.mark.parametrize(
    ("current", "began", "same_id"),
    [
        (TorchrunLaunch("run7", 1, AGENTS[:1]), True, True),  # node2 is lost
        (TorchrunLaunch("run7", 0, AGENTS[1:]), True, True),  # node3 is there instead of node1, which changes no count
        (TorchrunLaunch(NO_ID, 1, AGENTS[:1]), True, False),
        (TorchrunLaunch("run7", 1, AGENTS[2:]), True, True),  # a script between torchrun and its ranks
        (TorchrunLaunch("run7", 0, AGENTS[2:]), False, True),  # queued again
        (TorchrunLaunch("run8", 3, AGENTS[2:]), False, False),  # another command, whose mistake torchrun repeats
    ],
)
def test_the_torchrun_that_started_a_run_is_known_by_its_processes_or_its_id(
    current: TorchrunLaunch, began: bool, same_id: bool
) -> None:
    report = json.loads(json.dumps(RUN))
    assert (current.has_worked_on(report), current.has_id_of(report)) == (began, same_id)
    assert not current.has_worked_on({})
    assert not current.has_id_of({})


def test_no_id_is_no_id_to_know_a_run_by() -> None:
    run = TorchrunLaunch(NO_ID, 0, AGENTS[:1]).facts()
    assert not TorchrunLaunch(NO_ID, 3, AGENTS[1:]).has_worked_on(run)
    assert not TorchrunLaunch(NO_ID, 3, AGENTS[1:]).has_id_of(run)


def test_all_ranks_share_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elastic.current_torchrun() is None
    own = describe_process(os.getppid())
    monkeypatch.setattr(elastic, "from_all", lambda mine: [mine, (2, AGENTS[0]), mine])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert elastic.current_torchrun() == TorchrunLaunch("run7", 2, [own, AGENTS[0]])


def test_a_restart_that_torchrun_cannot_do_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    two, one = TorchrunLaunch("run7", 0, AGENTS[:2]), TorchrunLaunch("run7", 0, AGENTS[:1])
    assert two.warning() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert two.warning() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (two.warning() or "")
    assert one.warning() is None


def opened(
    folder: Path, current: TorchrunLaunch | None, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[str], set[str]]:
    """Open a run under a torchrun, and train for a while; return the messages, and the files that were there."""
    messages = list[str]()
    console = Console(quiet=True)
    config = small_pretrain_config(folder)
    with patch.context() as context:
        context.setattr(sessions, "current_torchrun", lambda: current)
        context.setattr(console, "info", messages.append)
        with sessions.open_run(config, config.runtime, "classifier", LaunchOptions(folder, **options), folder, console):
            there = {entry.name for entry in folder.iterdir()}
            (folder / "metrics.jsonl").touch()
    return [line for line in messages if "the run continues" in line], there


def test_ranks_that_are_restarted_continue_with_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, patch = tmp_path / "run", monkeypatch
    first, second, other = (
        TorchrunLaunch("run7", 0, AGENTS[:2]),
        TorchrunLaunch("run7", 1, AGENTS[:1]),
        TorchrunLaunch("run8", 1, AGENTS[2:]),
    )
    assert opened(folder, first, patch, overwrite=True) == ([], {"run.json", "config.yaml"})
    line = f"{folder}: torchrun restarted the ranks; the run continues with 1 rank"
    for overwrite in (False, True):
        assert opened(folder, second, patch, overwrite=overwrite) == (
            [line],
            {"run.json", "config.yaml", "metrics.jsonl"},
        )
    assert opened(folder, second, patch, resume=True)[0] == []
    assert json.loads((folder / "run.json").read_text())["torchrun"] == second.facts()["torchrun"]
    for stranger in (None, other):
        with pytest.raises(DpnError, match="the folder holds a run that has not finished"):
            opened(folder, stranger, patch)
    queued = TorchrunLaunch("run7", 0, AGENTS[2:])
    line = f"{folder}: the run continues, because it started with torchrun's --rdzv-id run7"
    assert opened(folder, queued, patch)[0] == [line]
    assert opened(folder, TorchrunLaunch("run7", 0, AGENTS[:1]), patch, overwrite=True)[1] == {
        "run.json",
        "config.yaml",
    }


def test_a_run_without_results_restarts_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path / "run", TorchrunLaunch("run7", 0, AGENTS), monkeypatch)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert opened(tmp_path / "run", TorchrunLaunch("run7", 1, AGENTS), monkeypatch)[0] == []


def test_ranks_that_are_restarted_wait_longer_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()

    def acquire(lock: Any, timeout: float) -> None:
        waited.append(timeout)
        raise DpnError("taken")

    opened(tmp_path / "run", TorchrunLaunch("run7", 0, AGENTS), monkeypatch)
    monkeypatch.setattr(FileLock, "acquire", acquire)
    for agents in ([], AGENTS):
        with suppress(DpnError):
            opened(tmp_path / "run", TorchrunLaunch("run7", 0, agents), monkeypatch)
    assert waited == [files.PATIENCE, sessions.LOST_AFTER]


def test_restarted_ranks_do_not_read_messages_of_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agents.port),
    }
    met = list[dict[str, Any]]()
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **mode: met.append(mode))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        distributed._connect_ranks("gloo", 1, 2, timedelta(seconds=60))
        assert not met[-1]["store"].check(["address"])
        met[-1]["store"].set("address", count)
    assert [(mode["rank"], mode["world_size"]) for mode in met] == [(1, 2), (1, 2)]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    distributed._connect_ranks("gloo", 1, 2, None)
    assert met[-1] == {"timeout": None}
