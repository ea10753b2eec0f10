"""How far it is from the command to the gradients: frames of this program from `main` to ``backward``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pictures
from test_distill import teacher_file

from dpn_cli import cli

ROOT = Path(__file__).parents[1]
MOST_FRAMES = 8
SHORT = ["--steps", "2", "--image-size", "32", "--device", "cpu", "-j", "0", "-q"]
SCRATCH = ["--checkpoint", "none", "--arch", "mu/16", *SHORT]
OWN = ["--data", "PHOTOS", "--val-fraction", "0.2", "-b", "8"]
COMMANDS = {
    "vtab": [
        "finetune",
        "vtab",
        "--data",
        "demo",
        "--lrs",
        "1e-3",
        "--seeds",
        "1",
        "--set",
        "schedule.warmup=0",
        *SCRATCH,
    ],
    "highres": ["finetune", "highres", *OWN, *SCRATCH],
    "pretrain": ["pretrain", *OWN, "--augment", "none", "--arch", "mu/16", *SHORT],
    "distill": ["distill", "--teacher", "TEACHER", "--data", "PHOTOS", "-b", "8", *SHORT],
    "lit": ["lit", "train", "--data", "demo", "--no-cache", "-b", "8", *SCRATCH],
    "segment": ["segment", "ade20k", "--data", "demo", "-b", "8", *SCRATCH],
}


class _GradientsError(Exception):
    """Ends a training at its first gradients: the rest of it is of no interest here."""


@pytest.mark.parametrize("task", COMMANDS)
def test_at_most_eight_frames_lie_between_main_and_the_gradients(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[str] = []

    def look(*arguments: Any, **more: Any) -> None:
        for frame in traceback.extract_stack():
            inside = Path(frame.filename).is_relative_to(ROOT) and not Path(frame.filename).is_relative_to(
                ROOT / "tests"
            )
            if inside and ".venv" not in frame.filename:
                frames.append(f"{Path(frame.filename).relative_to(ROOT)}:{frame.name}")
        raise _GradientsError

    monkeypatch.setattr(torch.Tensor, "backward", look)
    photos = str(pictures(tmp_path / "photos", classes=2, each=20))
    teacher = str(teacher_file(tmp_path / "teacher.safetensors"))
    words = [{"PHOTOS": photos, "TEACHER": teacher}.get(word, word) for word in COMMANDS[task]]
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["dpn", *words, "-o", str(tmp_path / "run")])
    with pytest.raises(_GradientsError):
        cli.main()
    assert frames[0] == "dpn_cli/cli.py:main"
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)
