"""Durations: a training as long as the config's or longer keeps its warm-up, a shorter one its share of it, said so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.config.load import build
from support.cli import run_dpn
from tasks.classify import highres_config as highres
from tasks.classify import pretrain_config as pretrain
from tasks.classify.config import resolve_steps
from tasks.lit import config as lit
from tasks.segment import config as segment

# A task's warm-up: config, resolved for a number of steps.
Warmup = Callable[[int, Callable[[str], None]], int]


def _asked(steps: int) -> dict[str, Any]:
    return {"backbone": {"arch": "B/16"}, "data": {"source": "x"}, "schedule": {"steps": steps}}


TASKS: dict[str, tuple[Warmup, int, int]] = {
    "pretrain": (
        lambda steps, say: pretrain.resolve("imagenet", None, None, None, _asked(steps), {}, say)["schedule"]["warmup"],
        10_000,
        92_897,
    ),
    "highres": (lambda steps, say: highres.resolve("highres", _asked(steps), {}, say)["schedule"]["warmup"], 500, 5000),
    "lit": (lambda steps, say: lit.resolve(None, _asked(steps), {}, say)["schedule"]["warmup"], 10_000, 55_000),
    "segment": (
        lambda steps, say: segment.resolve("ade20k", None, {**_asked(steps), "data": {"source": "demo"}}, {}, say)[
            "schedule"
        ]["warmup"],
        50,
        1200,
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_only_a_shorter_training_has_a_shorter_warmup_and_it_is_logged(task: str) -> None:
    warmup, default, steps = TASKS[task]
    said: list[str] = []
    # The paper's 93,000 and 930,000 steps have the warm-up of 92,897 (arXiv 2302.01327 §5.1, App. C).
    for longer in (steps, steps + 103, 10 * steps + 1030):
        assert warmup(longer, said.append) == default
    assert said == []
    assert warmup(steps // 10, said.append) == steps // 10 * default // steps
    (line,) = said
    assert line == (
        f"{steps // 10:,} steps instead of the config's {steps:,}: "
        f"warmup scaled from {default:,} to {steps // 10 * default // steps:,}"
    )


def test_epochs_follow_the_same_rule() -> None:
    asked = {"backbone": {"arch": "B/16"}, "data": {"source": "x"}}
    plain = pretrain.resolve("imagenet", None, None, None, asked, {})
    built = build(pretrain.PretrainConfig, plain, "test")
    said: list[str] = []
    longer = resolve_steps(built.model_copy(update={"epochs": 900.0}), 1_268_355, said.append).schedule
    assert (longer.steps, longer.warmup, said) == (278_691, 10_000, [])
    shorter = resolve_steps(built.model_copy(update={"epochs": 30.0}), 1_268_355, said.append).schedule
    assert (shorter.steps, shorter.warmup, len(said)) == (9290, 1000, 1)


def test_a_short_preset_has_big_visions_warmup() -> None:
    """Its 90 epochs of batch 1024 are 111,477 steps; configs/vit_s16_i1k.py warms up for 10,000."""
    asked = {"backbone": {"arch": "S/16"}, "data": {"source": "x"}}
    plain = pretrain.resolve("imagenet", "short", None, None, asked, {})
    schedule = resolve_steps(build(pretrain.PretrainConfig, plain, "test"), 1_268_355).schedule
    assert (schedule.steps, schedule.warmup) == (111_477, 10_000)


@pytest.mark.parametrize("command", ["pretrain --arch B/16", "finetune highres --arch B/16", "lit train --arch B/16"])
def test_the_command_line_reports_the_duration(command: str, tmp_path: Path) -> None:
    result = run_dpn(*command.split(), "--data", str(tmp_path), "--steps", "50", "--print-config")
    assert result.exit_code == 0
    assert "50 steps instead of the config's" in result.stderr


@pytest.mark.parametrize(("epochs", "is_reported"), [("1", True), ("9999", False)])
def test_a_training_reports_the_duration_once_its_images_are_counted(
    epochs: str, is_reported: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpn_cli.errors import DpnError
    from tasks.classify import highres as command

    def stop(*_: Any) -> None:
        raise DpnError("counted")

    monkeypatch.setattr(command, "train", stop)
    result = run_dpn(
        *(
            "finetune",
            "highres",
            "--data",
            str(photos),
            "--val-fraction",
            "0.2",
            "--arch",
            "mu/8",
            "--image-size",
            "32",
        ),
        *("--checkpoint", "none", "-b", "16", "--epochs", epochs, "-o", str(tmp_path / "run")),
    )
    assert result.stderr.endswith("counted\n")
    assert ("scaled from" in result.stderr) == is_reported
