"""`dpn plan distill` against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.engine import planning
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.images import write_class_folders

# S/32 at 224 with 1000 classes: 50 tokens of 384, 49 patches of 3072 values, 12 blocks, an MLP of 1536.
LINEAR = 12 * 50 * (4 * 384 * 384 + 2 * 384 * 1536) + 384 * 1000
PATCHES, ATTENTION = 49 * 3072 * 384, 12 * 2 * 50 * 50 * 384
S32 = ("--teacher-arch", "S/32")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MEASURED_SECONDS", 0.001)
    monkeypatch.setattr(planning, "SIDE", {"cpu": 8})


def planned(*arguments: str) -> dict[str, Any]:
    completed = run_dpn("plan", "distill", *arguments, "--json")
    assert completed.exit_code == 0, completed.output
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


def test_teacher_stem_and_all_weights_have_their_own_price() -> None:
    result = planned(*S32, "--images", "1000000", "--epochs", "2.048", "-b", "1024", "--stem-share", "0.1")
    assert (result["steps"], result["stem_steps"], result["teacher_images"]) == (2000, 200, 2_048_000)
    teacher = 2 * (LINEAR + PATCHES + ATTENTION)
    both = 6 * (LINEAR + PATCHES) + 7 * ATTENTION  # the norm before the projection learns
    stem = 4 * LINEAR + 6 * PATCHES + 7 * ATTENTION
    assert result["teacher_flops_per_image"] == teacher
    assert result["flops_per_image"] == both
    assert result["stem_flops_per_image"] == stem
    assert result["flops"] == 1024 * (2000 * teacher + 200 * stem + 1800 * both)
    assert result["hours"] == pytest.approx(result["flops"] / result["matrix_flops_per_second"] / 3600 / 0.5)
    assert result["cache_bytes"] == 0
    assert result["stages_bytes"] == 2 * result["weights_bytes"] == 8 * result["parameters"]


def test_cached_targets_are_computed_once_per_view() -> None:
    default = (
        *S32,
        "--images",
        "1000000",
        "--epochs",
        "4.096",
        "-b",
        "1024",
        "--stem-share",
        "0",
        "--set",
        "stem_lr=null",
    )
    result, kept = planned(*default), planned(*default, "--cache-teacher", "3")
    assert kept["teacher_images"] == 3_000_000
    saved = 1_096_000 * result["teacher_flops_per_image"]
    assert result["flops"] - kept["flops"] == saved
    assert kept["cache_bytes"] == 3_000_000 * 2 * (50 * 384 + 384 + 1000)
    per_second = kept["images_per_second_needed"] * kept["hours"] * 3600
    assert per_second == pytest.approx(4_096_000 + 3_000_000)


def test_compared_attention_is_recomputed() -> None:
    default = (*S32, "--images", "1000", "--epochs", "10", "-b", "100", "--stem-share", "0.5")
    result, observed = (
        planned(*default),
        planned(*default, "--set", "losses.attention=1", "--set", "losses.layers=[[1,1],[2,3]]"),
    )
    linear, products = 2 * 50 * 3 * 384 * 384, 2 * 50 * 50 * 384
    more = [
        observed[name] - result[name] for name in ("teacher_flops_per_image", "flops_per_image", "stem_flops_per_image")
    ]
    assert more == [2 * (linear + products), 6 * (linear + products), 4 * linear + 6 * products]


def test_weights_and_images_that_are_here_are_read(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    export_backbone(load_backbone("mu/8", stem="none", image_size=(16, 24), num_classes=3), teacher)
    photos = ["--data", str(write_class_folders(tmp_path / "photos", each=20)), "-b", "9", "--epochs", "3"]
    result = planned("--teacher", str(teacher), *photos, "--set", "data.held_out=0.1", "--stem", "rms")
    assert (result["images"], result["steps"], result["arch"], result["stem"]) == (54, 18, "mu/8", "rms")
    assert result["teacher"]["arch"] == "mu/8"
    completed = run_dpn("plan", "distill", "--teacher", str(teacher), "--teacher-arch", "B/16")
    assert (completed.exit_code, "--teacher-arch B/16" in completed.stderr) == (2, True)
    completed = run_dpn("plan", "distill", "--teacher", str(teacher), "--images", "1", "-b", "9")
    assert (completed.exit_code, completed.stdout) == (3, "")
    assert "--images 1: 1 image to train on, fewer than one batch of 9; use --batch-size 1 at most" in completed.stderr
    text = run_dpn("plan", "distill", "--teacher-arch", "S/16", "--student-arch", "Ti/16", "--images", "1000000").stdout
    assert text.startswith("Ti/16 stem dpn (5.7 M weights) from S/16 stem none (22.1 M): 7.7 GFLOP an image forward")


@pytest.mark.parametrize(("images", "batch"), [("1281167", 1024), ("49500", 128), ("3018", 32), ("20", 20)])
def test_the_batch_is_a_share_of_few_images(images: str, batch: int) -> None:
    result = planned(*S32, "--images", images)
    assert (result["batch_size"], result["steps"]) == (batch, round(10 * int(images) / batch))
    assert planned(*S32, "--images", images, "-b", "8")["batch_size"] == 8


def test_a_batch_in_a_configuration_file_is_not_made_smaller(tmp_path: Path) -> None:
    (tmp_path / "batch.yaml").write_text("batch_size: 256\n")
    command = (*S32, "--images", "3018", "-c", str(tmp_path / "batch.yaml"))
    assert planned(*command)["batch_size"] == 256
    assert planned(*command, "--set", "batch_share=0.01")["batch_size"] == 32
