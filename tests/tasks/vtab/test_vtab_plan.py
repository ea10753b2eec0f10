"""`dpn plan vtab` against sums by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dpn_cli.config.schema import Optim
from dpn_cli.engine import planning
from dpn_cli.engine.footprint import step_bytes
from dpn_cli.run import precision
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn

# S/32 at 224: 50 tokens of 384, 49 patches of 3072 values, 12 blocks, an MLP of 1536; dtd has 47 classes, svhn 10.
LINEAR = {classes: 12 * 50 * (4 * 384 * 384 + 2 * 384 * 1536) + 384 * classes for classes in (47, 10)}
PATCHES, ATTENTION = 49 * 3072 * 384, 12 * 2 * 50 * 50 * 384
TESTED = 1_880 + 26_032
SWEEP = ("--arch", "S/32", "--tasks", "dtd,svhn", "--lrs", "1e-3,1e-2", "--seeds", "3", "--steps", "100", "-b", "64")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "matrix_rate", lambda *_: 1e12)


def planned(*arguments: str) -> dict[str, Any]:
    completed = run_dpn("plan", "vtab", *SWEEP, "--device", "cpu", *arguments, "--json")
    assert completed.exit_code == 0, completed.output
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


@pytest.mark.parametrize("ranks", [1, 4])
def test_hours_are_the_flops_of_all_trainings_at_half_the_measured_rate(ranks: int) -> None:
    result = planned("--ranks", str(ranks))
    (one,) = result["networks"]
    assert (one["name"], one["trainings"], one["steps"]) == ("S/32 dpn", 2 * 6, 1200)
    both = [6 * (linear + PATCHES) + 7 * ATTENTION for linear in LINEAR.values()]
    assert one["step_seconds"] == pytest.approx(64 * sum(both) / 2 / 0.5e12 / ranks)
    forward = 2 * (LINEAR[47] + PATCHES + ATTENTION) / 0.5e12 / ranks
    assert one["evaluation_seconds"] == pytest.approx((12 * 200 + 2 * 1000 + 3 * TESTED) * forward)
    assert one["hours"] == pytest.approx((1200 * one["step_seconds"] + one["evaluation_seconds"]) / 3600)
    assert result["hours"] == one["hours"]


def test_a_plan_is_priced_in_the_precision_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 1e12, "bf16": 4e12}
    monkeypatch.setattr(planning, "matrix_rate", lambda device, name: rates[name])
    plans = {name: planned("--precision", name)["networks"][0] for name in ("auto", "fp32", "bf16")}
    assert plans["auto"] == plans["fp32"]  # the tests' machine has no products of bf16
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    assert planned()["networks"][0] == plans["bf16"]
    assert plans["bf16"]["step_seconds"] == pytest.approx(plans["fp32"]["step_seconds"] / 4)
    assert plans["bf16"]["memory"] < plans["fp32"]["memory"]


@pytest.mark.slow
def test_disk_and_memory_count_weights_gradients_states_and_activations() -> None:
    (one,) = planned()["networks"]
    parameters = load_backbone("S/32", stem="dpn", num_classes=47).report.parameters
    assert one["kept"] == 0
    # Six networks until the learning rate is chosen, and three states of a training.
    assert one["disk"] == pytest.approx(6 * 4 * parameters + 3 * one_state(parameters), rel=0.01)
    model = load_backbone("S/32", stem="dpn", num_classes=47)
    (fewer,) = planned("--micro-batch-size", "8")["networks"]
    assert fewer["memory"] == step_bytes(model, Optim(), 64, 8)
    (shorter,) = planned("--micro-batch-size", "8", "--precision", "bf16", "--set", "optim.state_dtype=bfloat16")[
        "networks"
    ]
    assert shorter["memory"] == step_bytes(model, Optim(state_dtype="bfloat16"), 64, 8, bf16=True)


def one_state(parameters: int) -> int:
    """Bytes of weights and of Adam's two sums."""
    return 3 * 4 * parameters


def test_every_network_is_a_row_and_none_needs_weights() -> None:
    result = run_dpn("plan", "vtab", *SWEEP, "--compare", "none,dpn", "--device", "cpu")
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["network", "none", "dpn"]
    assert "hours on 1 x cpu at half of its matrix-product rate" in rows[3]
    final = planned("--protocol", "vtab")["networks"][0]
    assert final["trainings"] == 2 * (6 + 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "S/32", "--tasks", "dtf"], "dtd"),
        ([], "--arch is needed to train from scratch"),
        (["--arch", "S/30"], "image size"),
    ],
)
def test_an_impossible_plan_is_reported_on_one_line(words: list[str], message: str) -> None:
    result = run_dpn("plan", "vtab", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
