"""How far it is from the command to the gradients: frames of this program from `main` to ``backward``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from dpn_cli import cli
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from support.distill import write_teacher
from support.images import write_class_folders
from support.programs import ROOT

MOST_FRAMES = 8
# A comparison is a command around the command of each training.
MOST_FRAMES_OF_SEVERAL = 10
SHORT = ["--steps", "2", "--image-size", "32", "--device", "cpu", "-j", "0", "-q"]
SCRATCH = ["--checkpoint", "none", "--arch", "mu/16", *SHORT]
OWN = ["--data", "PHOTOS", "--val-fraction", "0.2", "-b", "8"]
VTAB = ["--data", "demo", "--tasks", "demo_color", "--lrs", "1e-3", "--seeds", "1", "--set", "schedule.warmup=0"]
COMMANDS = {
    "vtab": ["finetune", "vtab", *VTAB, *SCRATCH],
    "vtab, several": ["finetune", "vtab", *VTAB, *SCRATCH, "--compare", "none,dpn"],
    "highres": ["finetune", "highres", *OWN, *SCRATCH],
    "pretrain": ["pretrain", *OWN, "--augment", "none", "--arch", "mu/16", *SHORT],
    "pretrain sun397": ["pretrain", "sun397", "--data", "PHOTOS", "-b", "8", "--arch", "mu/16", *SHORT[2:]],
    "distill": ["distill", "--teacher", "TEACHER", "--data", "PHOTOS", "-b", "8", *SHORT],
    "lit": ["lit", "train", "--data", "demo", "--no-cache", "-b", "8", *SCRATCH],
    "segment": ["segment", "ade20k", "--data", "demo", "-b", "8", *SCRATCH],
}
SEVERAL = {
    "highres": [*COMMANDS["highres"], "--seeds", "2"],
    "pretrain": [*COMMANDS["pretrain"], "--compare", "none,dpn"],
    "segment": [*COMMANDS["segment"], "--compare", "none,dpn"],
}


class _GradientsError(Exception):
    """Ends a training at its first gradients: the rest of it is of no interest here."""


def frames_to_the_gradients(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    frames: list[str] = []

    def look(*arguments: Any, **extra: Any) -> None:
        for frame in traceback.extract_stack():
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / "dpn_cli") or path.is_relative_to(ROOT / "tasks"):
                frames.append(f"{path.relative_to(ROOT)}:{frame.name}")
        raise _GradientsError

    monkeypatch.setattr(torch.Tensor, "backward", look)
    for split in ("train", "val", "test") if "sun397" in words else ("",):
        write_class_folders(tmp_path / "photos" / split, classes=2, each=20)
    teacher = str(write_teacher(tmp_path / "teacher.safetensors"))
    words = [{"PHOTOS": str(tmp_path / "photos"), "TEACHER": teacher}.get(word, word) for word in words]
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["dpn", *words, "-o", str(tmp_path / "run")])
    with pytest.raises(_GradientsError):
        cli.main()
    assert frames[0] == "dpn_cli/cli.py:main"
    return frames


def test_every_training_command_has_its_frames_counted() -> None:
    lines = [" ".join(words) + " " for words in COMMANDS.values()]
    counted = {
        training.module
        for name, training in TRAIN_COMMANDS.items()
        if any(line.startswith(f"{name} ") for line in lines)
    }
    assert counted == {training.module for training in TRAIN_COMMANDS.values()}


@pytest.mark.parametrize("task", COMMANDS)
def test_at_most_eight_frames_lie_between_main_and_the_gradients(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = frames_to_the_gradients(COMMANDS[task], tmp_path, monkeypatch)
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)


@pytest.mark.parametrize("task", SEVERAL)
def test_a_comparison_is_two_frames_around_a_training(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = frames_to_the_gradients(SEVERAL[task], tmp_path, monkeypatch)
    assert len(frames) <= MOST_FRAMES_OF_SEVERAL, "\n".join(frames)
