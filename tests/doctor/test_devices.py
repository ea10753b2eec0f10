"""Every training on torch's meta device, where a tensor has no contents: what mixes it with the CPU's ends in an error.

A GPU refuses the same. Autocast and fused optimizers do not know the device, so the steps are in float32 and end before
the update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dpn_cli.arch import NORMS
from dpn_cli.cli import app
from dpn_cli.engine import fit as engine
from tasks.lit import encode, train

META = torch.device("meta")
NANO = "--checkpoint none --arch nano/4 --image-size 32"
TRAININGS: dict[str, str] = {
    "pretrain": "pretrain --data demo",
    "augmented": "pretrain --data demo --augment medium1",
    "deit": "pretrain imagenet --data demo --base-config deit --arch nano/4",
    "vtab": "finetune vtab --data demo --checkpoint none",
    "highres": f"finetune highres --data demo {NANO}",
    "averaged, with norms": f"finetune highres --data demo {NANO} --set log.layer_norms=true --set ema=0.9",
    "lit": f"lit train --data demo {NANO}",
    "lit without features": f"lit train --data demo {NANO} --no-cache",
    "segment": "segment ade20k --data demo --checkpoint none --arch nano/4",
    **{
        norm: f"pretrain --data demo --norm {norm} --micro-batch-size 32"
        for norm in NORMS
        if norm not in ("ln", "none")
    },
    **{
        placement: f"pretrain --data demo --placement {placement}"
        for placement in ("post,post", "pre+post,pre+post", "normformer", "subln")
    },
}


class EnoughError(Exception):
    """Ends a training from within."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Loss and norm of the steps that were taken; the second ends the program."""
    taken: list[Tensor] = []

    def update(self: Any, pending: Tensor, *_: Any, now: bool) -> list[float]:
        taken.append(pending)
        if len(taken) == 2:
            raise EnoughError
        self.optimizer.zero_grad(set_to_none=True)
        return [1.0] * pending.numel()

    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def no_autocast(device: str, *arguments: Any, **named: Any) -> torch.autocast:
        return autocast("cpu", enabled=False) if device == "meta" else autocast(device, *arguments, **named)

    monkeypatch.setattr(engine._Training, "update", update)
    monkeypatch.setattr(torch, "autocast", no_autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device != "meta" and enabled(device))
    for module in (encode, train):
        monkeypatch.setattr(module, "digest_of", lambda _: "")  # of weights that are not there
    return taken


def test_the_simulated_device_refuses_the_operations_that_a_gpu_refuses() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(3, device=META) + torch.ones(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_computes_on_its_device_alone(
    name: str, steps: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "lit":  # which keeps features in files
        monkeypatch.setattr(Tensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype))
    result = CliRunner().invoke(app, [*TRAININGS[name].split(), "--device", "meta", "-q", "-o", str(tmp_path / "run")])
    assert isinstance(result.exception, EnoughError), (result.output, result.exception)
    assert [step.device for step in steps] == [META, META]
