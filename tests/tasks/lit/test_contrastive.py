"""Contrastive losses: recorded values, open_clip's, micro-batches in two passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor, nn

from dpn_cli.config.schema import Optim, Schedule
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs, TrainJob
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.engine.optim import is_decayed
from dpn_cli.errors import OutOfMemoryError
from support.contrastive import ROWS, make_pairs, make_text_tower
from support.engine import SINGLE_PROCESS
from support.goldens import Arrays
from tasks.lit import loss as losses
from tasks.lit.loss import ContrastiveLoss, Kind


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


@pytest.mark.parametrize("rows", [1024, 3])
def test_the_softmax_loss_is_big_visions(
    rows: int, golden: Callable[[str], Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "ROWS", rows)
    arrays = golden("losses_contrastive")
    image, text, scale = (torch.from_numpy(arrays[name]).requires_grad_() for name in ("zimg", "ztxt", "t"))
    value = ContrastiveLoss("softmax", SINGLE_PROCESS).couple(text * scale, {"image": image})
    assert value.item() == pytest.approx(float(arrays["loss"]), abs=1e-5)
    for actual, name in zip(gradients(value, image, text, scale), ("zimg", "ztxt", "t"), strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(arrays[f"grad_{name}"]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "bias"), [("softmax", None), ("siglip", -10.0)])
@pytest.mark.parametrize("rows", [1024, 5])
def test_losses_and_gradients_are_open_clips(
    kind: Kind, bias: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "ROWS", rows)
    batch, text = make_pairs(), make_text_tower(bias)
    parameters = list(text.parameters())
    actual = ContrastiveLoss(kind, SINGLE_PROCESS)(text, batch)
    theirs: Any = ClipLoss() if kind == "softmax" else SigLipLoss()
    extra = {} if text.bias is None else {"logit_bias": text.bias}
    expected = theirs(batch["image"], text.encode(batch["tokens"]), text.log_temperature.exp(), **extra)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert apart(gradients(actual, *parameters), gradients(expected, *parameters)) < 2e-6


def after_one_step(kind: Kind, micro: MicroBatch, loss: ContrastiveLoss | None = None) -> tuple[float, list[Tensor]]:
    """Train one step of plain SGD: what it takes off the weights is the gradient."""
    model = make_text_tower(-1.0 if kind == "siglip" else None)
    initial = [p.detach().clone() for p in model.parameters()]
    job = TrainJob(
        loss_fn=loss or ContrastiveLoss(kind, SINGLE_PROCESS),
        batches=lambda start: (make_pairs() for _ in range(1)),
        optim=Optim(momentum=0.0, clip_norm=None),
        schedule=Schedule(steps=1),
        lr=1.0,
        batch_size=ROWS,
        seed=0,
        world=SINGLE_PROCESS,
        micro_batch=micro,
        outputs=Outputs(warn=lambda text: None),
    )
    done = engine.fit(model, job)
    return done.loss, [one - p.detach() for one, p in zip(initial, model.parameters(), strict=True)]


def apart(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the distance of two gradients, relative to the second."""
    one, other = (torch.cat([value.flatten() for value in values]).double() for values in (actual, expected))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("kind", ["softmax", "siglip"])
@pytest.mark.parametrize("micro", [1, 4, 5])
def test_two_passes_give_the_gradient_of_one(kind: Kind, micro: int) -> None:
    loss, gradient = after_one_step(kind, MicroBatch(ROWS))
    second, split = after_one_step(kind, MicroBatch(micro))
    assert second == pytest.approx(loss, rel=1e-6)
    assert apart(split, gradient) < 1e-6
    # What a sum over micro-batches would be: another loss.
    parts = [{name: value[i : i + 4] for name, value in make_pairs().items()} for i in range(0, ROWS, 4)]
    model = make_text_tower(-1.0 if kind == "siglip" else None)
    naive = torch.stack([ContrastiveLoss(kind, SINGLE_PROCESS)(model, part) for part in parts]).mean()
    assert apart(gradients(naive, *model.parameters()), gradient) > 0.01


def test_memory_that_runs_out_halves_the_micro_batch_and_keeps_the_batch() -> None:
    class Hungry(ContrastiveLoss):
        def features(self, model: nn.Module, part: Batch) -> Tensor:
            if len(part["tokens"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().features(model, part)

    micro = MicroBatch(ROWS)
    _, gradient = after_one_step("softmax", micro, Hungry("softmax", SINGLE_PROCESS))
    assert micro.size == 3
    assert apart(gradient, after_one_step("softmax", MicroBatch(ROWS))[1]) < 1e-6
    with pytest.raises(OutOfMemoryError, match="resume with --micro-batch-size 2"):
        after_one_step("softmax", MicroBatch(4, fixed=True), Hungry("softmax", SINGLE_PROCESS))


def test_every_token_sees_all_others_and_the_last_one_is_the_texts() -> None:
    model, tokens = make_text_tower(), make_pairs()["tokens"]
    with torch.no_grad():
        model.transformer.positional_embedding.zero_()
        mixed = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
        # Without positions and without a mask the order of the others is nothing to the last token, even in two layers.
        torch.testing.assert_close(model.encode(mixed), model.encode(tokens))
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % 30
        turned = torch.cat([tokens[:, -1:], tokens[:, :-1]], dim=1)
        for changed in (other, turned):
            assert (model.encode(changed) - model.encode(tokens)).norm(dim=-1).min() > 1e-3


def test_only_matrices_are_decayed() -> None:
    decayed = {name for name, value in make_text_tower(-1.0).named_parameters() if is_decayed(name, value, "kernels")}
    kinds = {name.split("resblocks.")[-1].split(".", 1)[-1] for name in decayed}
    assert kinds == {
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
        "text_projection",
    }
