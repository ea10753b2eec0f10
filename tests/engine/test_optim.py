"""Schedules, optimizers and losses against trajectories recorded from big_vision, optax and Scenic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpn_cli.config.schema import Optim, Schedule
from dpn_cli.engine.losses import sigmoid_xent, softmax_xent
from dpn_cli.engine.optim import build_optimizer, clip_gradients, is_decayed, lr_factor, set_lr
from dpn_cli.weights.backbone import load_backbone
from support.goldens import Arrays

BIG_VISION: dict[str, Schedule] = {
    "cosine_w500_t5000": Schedule(steps=5000, warmup=500),
    "cosine_w200_t2500": Schedule(steps=2500, warmup=200),
    "cosine_w10000_t93000": Schedule(steps=93000, warmup=10000),
    "cosine_w0_t1000": Schedule(steps=1000),
    "linear_w100_t1000": Schedule(steps=1000, warmup=100, decay="linear"),
    "linear_w100_t1000_end0.05": Schedule(steps=1000, warmup=100, decay="linear", end=0.05),
    "poly_p2_w50_t800_end0.01": Schedule(steps=800, warmup=50, decay="polynomial", power=2, end=0.01),
    "poly_p0.9_w0_t800": Schedule(steps=800, decay="polynomial", power=0.9),
    "rsqrt_w100_t1000_ts300_cd200": Schedule(steps=1000, warmup=100, decay="rsqrt", timescale=300, cooldown=200),
    "rsqrt_default_w100_t3000": Schedule(steps=3000, warmup=100, decay="rsqrt"),
    "stair_w20_t500": Schedule(steps=500, warmup=20, decay="stair", stairs=((100, 0.5), (250, 0.1), (400, 0.01))),
    "cosine_epochs": Schedule(steps=780, warmup=round(1.5 * 5000 / 64)),
    "cosine_percent_base0.003_scalebs": Schedule(steps=600, warmup=60),
}
SCENIC: dict[str, tuple[float, Schedule]] = {
    "paper_style_t1000": (3e-5, Schedule(steps=1000, decay="polynomial", power=0.9)),
    "paper_ade20k_t161664": (3e-5, Schedule(steps=161664, decay="polynomial", power=0.9)),
    "warm100_end0.1_p2": (1e-3, Schedule(steps=1000, warmup=100, decay="polynomial", power=2, end=0.1, decay_from=0)),
    "constant_cosine_warm": (0.01, Schedule(steps=500, warmup=50)),
    "constant_lineardecay": (0.01, Schedule(steps=400, decay="linear", decay_from=50)),
}


@pytest.mark.parametrize("name", BIG_VISION)
def test_schedules_equal_big_vision(name: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("schedules_bv")
    base = 0.003 * 512 / 256 if "scalebs" in name else 1.0
    actual = [base * lr_factor(BIG_VISION[name], int(step)) for step in arrays[f"{name}/steps"]]
    np.testing.assert_allclose(actual, arrays[f"{name}/value"], atol=2e-6 * base, rtol=0)


@pytest.mark.parametrize("name", SCENIC)
def test_schedules_equal_scenic(name: str, golden: Callable[[str], Arrays]) -> None:
    arrays, (base, schedule) = golden("schedules_scenic"), SCENIC[name]
    steps = [int(step) for step in arrays[f"{name}/steps"] if step < schedule.steps]
    actual = [base * lr_factor(schedule, step) for step in steps]
    np.testing.assert_allclose(actual, arrays[f"{name}/value"][: len(steps)], atol=2e-6 * base, rtol=0)


def test_every_recorded_schedule_is_compared(golden: Callable[[str], Arrays]) -> None:
    assert {key.split("/")[0] for key in golden("schedules_bv")} == set(BIG_VISION)
    assert {key.split("/")[0] for key in golden("schedules_scenic")} == set(SCENIC)


def test_first_update_of_appendix_e_has_lr_zero_and_the_last_is_tiny() -> None:
    schedule = Schedule(steps=2500, warmup=200)
    values = [3e-4 * lr_factor(schedule, step) for step in (0, 1, 100, 200, 1350, 2499)]
    assert values == pytest.approx([0, 1.5e-6, 1.5e-4, 3e-4, 1.5e-4, 1.40e-10], rel=1e-2, abs=1e-13)


ADAM_BF16 = Optim(name="adam", state_dtype="bfloat16", weight_decay=1e-4, decay_unit="schedule")
TRAJECTORIES: dict[str, tuple[Optim, float, int, int, str, float]] = {
    # optimizer, lr, warm-up, total steps, which recording, tolerance
    "optim_momentum_fp32": (Optim(), 0.03, 5, 20, "params", 2e-6),
    "optim_momentum_hp": (Optim(state_dtype="bfloat16"), 0.03, 5, 20, "params", 2e-6),
    "optim_momentum_hp_paper_schedule": (Optim(state_dtype="bfloat16"), 0.03, 500, 5000, "params", 2e-6),
    "optim_adam_fp32": (Optim(name="adam", weight_decay=1e-4, decay_unit="schedule"), 1e-3, 5, 20, "params", 2e-6),
    "optim_adam_bf16mu": (ADAM_BF16, 1e-3, 5, 20, "params", 2e-6),
    "optim_adam_bf16mu_strongwd": (ADAM_BF16.model_copy(update={"weight_decay": 0.03}), 1e-3, 5, 20, "params", 2e-6),
}


def follow(arrays: Arrays, optim: Optim, lr: float, factors: list[float]) -> dict[str, list[Any]]:
    """Feed the recorded gradients to our optimizer; returns every parameter after every step."""
    names = [key.removeprefix("init/") for key in arrays if key.startswith("init/")]
    parameters = {name: nn.Parameter(torch.from_numpy(arrays[f"init/{name}"].copy())) for name in names}
    optimizer = build_optimizer(parameters.items(), optim, lr)
    history: dict[str, list[Any]] = {name: [] for name in names}
    for step, factor in enumerate(factors):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(arrays[f"grads/{name}"][step].copy())
        clip_gradients(parameters.values(), optim.clip_norm)
        set_lr(optimizer, lr * factor)
        optimizer.step()
        for name, parameter in parameters.items():
            history[name].append(parameter.detach().numpy().copy())
    return history


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_updates_equal_big_vision(name: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden(name)
    optim, lr, warmup, total, recorded, atol = TRAJECTORIES[name]
    factors = [lr_factor(Schedule(steps=total, warmup=warmup), step) for step in range(20)]
    np.testing.assert_allclose(factors, arrays["schedule"], atol=2e-6)
    for key, values in follow(arrays, optim, lr, factors).items():
        np.testing.assert_allclose(np.stack(values), arrays[f"{recorded}/{key}"], atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize(
    ("name", "lr", "decay", "atol"),
    [("optim_scenic_adamw", 3e-5, 0.01, 1e-6), ("optim_scenic_adamw_strong", 0.03, 0.3, 2e-6)],
)
def test_updates_equal_scenic_adamw(
    name: str, lr: float, decay: float, atol: float, golden: Callable[[str], Arrays]
) -> None:
    arrays = golden(name)
    optim = Optim(name="adam", weight_decay=decay, decay_unit="lr", decay_mask="not_1d", clip_norm=None)
    factors = [lr_factor(Schedule(steps=25, decay="polynomial", power=0.9), step) for step in range(20)]
    for key, values in follow(arrays, optim, lr, factors).items():
        np.testing.assert_allclose(np.stack(values), arrays[f"params/{key}"], atol=atol, rtol=5e-7, err_msg=key)
    parameters = {key: torch.from_numpy(arrays[key]) for key in arrays if key.startswith("init/")}
    decayed = {key.removeprefix("init/") for key, value in parameters.items() if is_decayed(key, value, "not_1d")}
    assert decayed == set(arrays["decayed"])


def test_momentum_with_decay_in_big_visions_unit_follows_the_closed_form() -> None:
    # Zero gradient, decay 1e-4, lr 1e-3: kernels lose factor x 1e-4 of themselves, the lr does not enter.
    weight = nn.Parameter(torch.full((2, 2), 3.0))
    optimizer = build_optimizer([("fc.weight", weight)], Optim(weight_decay=1e-4, decay_unit="schedule"), lr=1e-3)
    weight.grad = torch.zeros_like(weight)
    set_lr(optimizer, 1e-3 * 0.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 3.0 * (1 - 0.5 * 1e-4)), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "optim",
    [Optim(weight_decay=0.1), Optim(name="adam", weight_decay=0.1), Optim(weight_decay=0.1, state_dtype="bfloat16")],
)
def test_only_kernels_decay_and_every_parameter_is_in_one_group(optim: Optim) -> None:
    model = load_backbone("mu/8", image_size=16, num_classes=3, pre_logits=True)
    optimizer = build_optimizer(model.named_parameters(), optim, 0.1)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    everything = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in model.parameters())
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "pre_logits.weight",
        "head.weight",
    }


def test_frozen_parameters_are_left_out() -> None:
    model = load_backbone("mu/8", image_size=16)
    model.blocks.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), Optim(), 0.1)
    assert not {id(p) for p in model.blocks.parameters()} & {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }


def test_clipping_divides_by_the_norm_itself() -> None:
    small, large = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    small.grad, large.grad = torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 0, 0, 4.0])
    assert clip_gradients([small, large], 1.0).item() == pytest.approx(5)
    torch.testing.assert_close(large.grad, torch.tensor([0, 0, 0, 0.8]), atol=1e-7, rtol=0)
    assert clip_gradients([small, large], 2.0).item() == pytest.approx(1)
    torch.testing.assert_close(small.grad, torch.tensor([0.6, 0, 0, 0]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("loss", ["sigmoid_xent", "softmax_xent"])
@pytest.mark.parametrize("labels", ["onehot", "mixup", "multihot"])
def test_losses_and_gradients_equal_big_vision(loss: str, labels: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("losses_classification")
    logits = torch.from_numpy(arrays["logits"]).requires_grad_()
    function = {"sigmoid_xent": sigmoid_xent, "softmax_xent": softmax_xent}[loss]
    target = torch.from_numpy(arrays[f"labels/{labels}"])
    value = function(logits, target)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == pytest.approx(arrays[f"{loss}/{labels}/loss"].item(), rel=1e-5)
    torch.testing.assert_close(logits.grad, torch.from_numpy(arrays[f"{loss}/{labels}/grad"]), atol=1e-6, rtol=1e-5)
    rows = [function(logits[i : i + 1], target[i : i + 1]).item() for i in range(len(target))]
    np.testing.assert_allclose(rows, arrays[f"{loss}/{labels}/per_example"], rtol=1e-5)


def test_a_zero_head_starts_at_classes_times_ln_2() -> None:
    target = torch.nn.functional.one_hot(torch.tensor([3, 7]), 100).float()
    assert sigmoid_xent(torch.zeros(2, 100), target).item() == pytest.approx(69.31, abs=0.01)
