"""torchrun starts its ranks again after one is killed: the run goes on by itself, and ends as an undisturbed one."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.cli import run_dpn
from support.programs import LIMIT, child_processes, kill_tree, program_environment, start_program

pytestmark = pytest.mark.slow

STEPS, KILLED_AFTER = 400, 130
TRAINING = (
    *("pretrain", "--arch", "mu/8", "--image-size", "16", "--augment", "none", "-b", "12", "--steps", str(STEPS)),
    *("--val-fraction", "0.2", "--set", "data.minival=0.1", "--set", "optim.name=momentum"),
    *("--device", "cpu", "-j", "0", "--json"),
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--monitor-interval", "0.1")
# Two machines that meet in a file; whichever is lost, the other one finds that out in seconds.
PATIENCE = "store_type=file,last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3"
TWO_MACHINES = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d")
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TIMES = ("images_per_second", "wait_share")


@dataclass(frozen=True)
class Loss:
    """What is lost: the second rank or the first one, and with it the machine (else only its process)."""

    rank: int
    machine: bool = True
    flags: tuple[str, ...] = ()

    def torchruns(self, meeting: Path) -> Sequence[tuple[str, ...]]:
        """Return the commands that start two ranks."""
        if not self.machine:
            return [(*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")]
        where = ("--rdzv-id", "run7", "--rdzv-endpoint", str(meeting), "--rdzv-conf", PATIENCE)
        return 2 * [(*TORCHRUN, *TWO_MACHINES, *where)]


LOSSES = {
    "a machine": Loss(1),
    "the machine that leads": Loss(0, flags=("--shard", "--set", "runtime.checkpoint_every=50")),
    "a process": Loss(1, machine=False, flags=("--overwrite",)),
}


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def rank_of(worker: int) -> int:
    variables = Path(f"/proc/{worker}/environ").read_text().split("\0")
    return int(next(variable.removeprefix("RANK=") for variable in variables if variable.startswith("RANK=")))


def lose(loss: Loss, torchruns: list[Popen[str]]) -> None:
    """Kill a rank, and the torchrun that started it with it where the whole machine is lost."""
    workers = {
        rank_of(worker): (torchrun, worker) for torchrun in torchruns for worker in child_processes(torchrun.pid)
    }
    torchrun, worker = workers[loss.rank]
    kill_tree(torchrun.pid if loss.machine else worker)


def until_step(step: int, folder: Path, torchruns: list[Popen[str]]) -> None:
    """Wait until a run has logged a step. Raises `TimeoutError`."""
    end = time.monotonic() + LIMIT
    while max((record["step"] for record in records(folder)), default=0) < step:
        if time.monotonic() > end or any(torchrun.poll() is not None for torchrun in torchruns):
            raise TimeoutError(f"step {step} was not logged")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = run_dpn(*TRAINING, "--data", str(photos), "-o", str(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("name", LOSSES)
def test_lost_ranks_do_not_change_the_result(name: str, photos: Path, undisturbed: Path, tmp_path: Path) -> None:
    loss, folder, message = LOSSES[name], tmp_path / "run", tmp_path / "said"
    command = (sys.executable, "-m", "dpn_cli", *TRAINING, *loss.flags, "--data", str(photos), "-o", str(folder))
    variables = program_environment(**(RESTARTS if loss.machine else {}))
    with ExitStack() as stack, message.open("w") as file:
        torchruns = [
            stack.enter_context(start_program((*torchrun, *command), stdout=file, stderr=file, env=variables))
            for torchrun in loss.torchruns(tmp_path / "meeting")
        ]
        until_step(KILLED_AFTER, folder, torchruns)
        lose(loss, torchruns)
        codes = [torchrun.wait(LIMIT) for torchrun in torchruns]
    text = message.read_text()
    assert sorted(codes) == ([-signal.SIGKILL, 0] if loss.machine else [0]), text
    restarts = [line for line in text.splitlines() if "torchrun restarted the ranks" in line]
    left = "1 rank" if loss.machine else "2 ranks"
    assert restarts == [f"{folder}: torchrun restarted the ranks; the run continues with {left}"]
    (step,) = [int(line.split()[3]) for line in text.splitlines() if line.startswith("continues after step ")]
    assert 100 <= step < STEPS
    if loss.rank == 1:
        assert step >= KILLED_AFTER  # which rank 0 has saved when it lost the other one
    same_training(folder, undisturbed, lost_after=step)


def same_training(folder: Path, undisturbed: Path, lost_after: int) -> None:
    """Compare the log, in which each step is once, and the weights.

    Where rank 0 saved after it lost the other rank, the next mean of the loss lacks that rank's rows.
    """
    losses = [record["step"] for record in records(undisturbed) if "loss" in record]
    next_loss = next((step for step in losses if step > lost_after), None)
    for actual, their_values in zip(records(folder), records(undisturbed), strict=True):
        if actual["step"] == next_loss and "loss" in actual:
            assert actual.pop("loss") == pytest.approx(their_values.pop("loss"), rel=0.02)
        expected = {key: value for key, value in their_values.items() if key not in TIMES}
        assert {key: actual[key] for key in actual if key not in TIMES} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    weights = load_file(folder / "weights.safetensors")
    for name, value in load_file(undisturbed / "weights.safetensors").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
