"""Loss and gradient norm that are read one step later, as on a GPU: here on the CPU, which can do the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.config.schema import Optim
from dpn_cli.engine import fit as engine
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.nan_guard import FiniteCheck
from dpn_cli.engine.trainer_args import Batch, Outputs
from dpn_cli.errors import NonFiniteError
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.distributed import World
from support.engine import has_same_weights, loss_fn, small_vit, train_steps

STEPS = 400  # of which every eighth is logged
ADAM = Optim(name="adam", weight_decay=1e-4)
MOMENTUM = Optim(weight_decay=0.0)
# What updates weights without looking at `found_inf`: momentum with decoupled decay, and moments in bfloat16.
OTHERS = Optim(weight_decay=1e-4), Optim(state_dtype="bfloat16")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "FiniteCheck", lambda optimizer, late: FiniteCheck(optimizer, late=True))


class EnoughError(Exception):
    """Ends a training from within."""


class Spoiled:
    """The loss, which is NaN or infinite at a step, or has such a gradient with a `value` of 0.

    Without one it raises `EnoughError` there.
    """

    def __init__(self, step: int, value: float | None) -> None:
        self.left, self.value = step, value

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            return loss_fn(model, batch)
        if self.value is None:
            raise EnoughError
        loss = loss_fn(model, batch)
        return loss + torch.sqrt(loss * self.value) if self.left == -1 else loss


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("optim", [ADAM, MOMENTUM, *OTHERS], ids=["adam", "momentum", "decoupled", "bfloat16"])
@pytest.mark.parametrize("step", [0, 11, 15])  # the first, one that is read late, one that is logged
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_nothing_is_updated_from_a_step_that_is_no_number_on(optim: Optim, step: int, value: float) -> None:
    damaged, full = small_vit(), small_vit()
    with pytest.raises(NonFiniteError, match=f"step {step + 1}: loss "):
        train_steps(damaged, STEPS, loss_fn=Spoiled(step, value), optim=optim, lr=1e-3)
    with pytest.raises(EnoughError):
        train_steps(full, STEPS, loss_fn=Spoiled(step, None), optim=optim, lr=1e-3)
    assert has_same_weights(damaged, full)


def seen(monkeypatch: pytest.MonkeyPatch, optim: Optim) -> list[str]:
    """Return in which order the gradients of ten steps were computed and their values read."""
    order: list[str] = []
    compute, tolist = Gradients.compute, Tensor.tolist
    pending: list[Tensor] = []

    def computed(self: Gradients, batch: Batch, step: int, **arguments: Any) -> Tensor:
        pending.append(compute(self, batch, step, **arguments))
        order.append(f"compute {step}")
        return pending[-1]

    def read(self: Tensor) -> Any:
        order.extend(f"read {number}" for number, one in enumerate(pending) if one is self)
        return tolist(self)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "compute", computed)
        patch.setattr(Tensor, "tolist", read)
        with pytest.raises(EnoughError):
            train_steps(small_vit(), STEPS, loss_fn=Spoiled(10, None), optim=optim)
    return order


@pytest.mark.parametrize("optim", [ADAM, MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.usefixtures("late")
def test_the_next_gradients_are_started_before_a_step_is_read(optim: Optim, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, optim) == [
        *("compute 0", "read 0", "compute 1"),  # there is nothing before the first to show
        *(name for step in range(2, 7) for name in (f"compute {step}", f"read {step - 1}")),
        *("compute 7", "read 6", "read 7"),  # which is logged
        *("compute 8", "compute 9", "read 8"),
    ]


def test_a_step_is_read_before_its_update_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [f"{case} {step}" for step in range(10) for case in ("compute", "read")]
    assert seen(monkeypatch, ADAM) == at_once  # a CPU
    monkeypatch.setattr(engine, "FiniteCheck", lambda optimizer, late: FiniteCheck(optimizer, late=True))
    assert [seen(monkeypatch, optim) for optim in OTHERS] == [at_once, at_once]


@pytest.mark.parametrize("optim", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_reading_late_changes_no_weight(optim: Optim, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> nn.Module:
        model = small_vit()
        with pytest.raises(EnoughError):
            train_steps(model, STEPS, loss_fn=Spoiled(20, None), optim=optim, lr=1e-3)
        return model

    at_once = trained()
    monkeypatch.setattr(engine, "FiniteCheck", lambda optimizer, late: FiniteCheck(optimizer, late=True))
    assert has_same_weights(at_once, trained())


@pytest.mark.usefixtures("late")
def test_no_checkpoint_is_written_of_a_step_that_is_no_number(tmp_path: Path) -> None:
    outputs = Outputs(checkpoints=Checkpoints(tmp_path))
    with pytest.raises(NonFiniteError, match="step 14"):
        train_steps(small_vit(), STEPS, loss_fn=Spoiled(13, math.nan), checkpoint_every=7, outputs=outputs)
    saved = outputs.checkpoints.load("last", print) if outputs.checkpoints else None
    assert saved is not None
    assert saved[1]["step"] == 7


@pytest.mark.parametrize(("device", "late"), [("cpu", False), ("cuda", True)])
def test_a_gpu_is_read_late(device: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(optimizer: torch.optim.Optimizer, late: bool) -> FiniteCheck:
        calls.append(late)
        raise EnoughError

    calls: list[bool] = []
    monkeypatch.setattr(engine, "FiniteCheck", check)
    with pytest.raises(EnoughError):
        train_steps(small_vit(), 2, world=World(0, 1, torch.device(device)))
    assert calls == [late]
