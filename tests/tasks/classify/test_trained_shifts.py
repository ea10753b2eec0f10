"""`--shifts` of training commands: a finished network is scored as `dpn eval --shifts` scores it, and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dpn_cli.config.cost import Cost
from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.data.shifted_images import image_rng, reduce_to
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.engine.dry_run import DryRunSetup
from support.cli import run_dpn
from support.distill import write_teacher
from support.images import write_class_folders
from tasks.classify import dry_run

SHIFTS = ["--shifts", "gain,gaussian_noise", "--severity", "2,5", "--shift-seed", "7"]
QUICK = ["-j", "0", "--device", "cpu", "-q", "--json"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split, each in (("train", 12), ("val", 8)):
        write_class_folders(root / split, classes=3, each=each)
    return root


@pytest.fixture(scope="module")
def command(photos: Path) -> list[str]:
    small = ["--arch", "mu/8", "--image-size", "16", "--steps", "6", "-b", "8", "--lr", "0.01", *SHIFTS, *QUICK]
    return ["pretrain", "--augment", "none", "--data", str(photos), *small]


def shifts_of(*words: str) -> dict[str, Any]:
    result = run_dpn(*words)
    assert result.exit_code == 0, result.output
    shifts: dict[str, Any] = json.loads(result.stdout)["shifts"]
    return shifts


def page_of(run: Path) -> str:
    result = run_dpn("report", str(run), "-o", str(run / "page"))
    assert result.exit_code == 0, result.output
    return (run / "page/report.html").read_text()


def test_a_training_is_scored_as_an_evaluation_scores_it(command: list[str], photos: Path, tmp_path: Path) -> None:
    trained = shifts_of(*command, "-o", str(tmp_path / "run"))
    evaluated = shifts_of("eval", str(tmp_path / "run"), "--data", str(photos), *SHIFTS, *QUICK)
    assert list(trained["networks"]) == ["mu/8 dpn"]
    assert list(trained["networks"].values()) == list(evaluated["networks"].values())
    assert {name: trained[name] for name in ("seed", "severities", "side")} == {
        "seed": 7,
        "severities": [2, 5],
        "side": evaluated["side"],
    }
    assert (tmp_path / "run/shifts.csv").read_text().count("\n") == 1 + 1 + 2 * 2
    assert {path.name for path in (tmp_path / "run/shifts").iterdir()} == {
        "clean.jpg",
        "gain.jpg",
        "gaussian_noise.jpg",
    }
    assert "top-1 under shifts: noise" in page_of(tmp_path / "run")


def test_student_and_teacher_are_scored_on_the_same_images(photos: Path, tmp_path: Path) -> None:
    teacher, run = write_teacher(tmp_path / "teacher.safetensors"), tmp_path / "run"
    command = ["distill", "--teacher", str(teacher), "--data", str(photos), "--steps", "2", "-b", "8", *SHIFTS, *QUICK]
    distilled = shifts_of(*command, "-o", str(run))
    evaluated = shifts_of("eval", str(run), "--data", str(photos), *SHIFTS, "--baseline", str(teacher), *QUICK)
    assert list(distilled["networks"]) == ["student", "teacher"]
    assert list(distilled["networks"].values()) == list(evaluated["networks"].values())
    assert distilled["mce"] == evaluated["mce"]
    assert "top-1 under shifts: gain" in page_of(run)


def test_a_student_without_labelled_images_has_no_shifts(photos: Path, tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher.safetensors")
    result = run_dpn("distill", "--teacher", str(teacher), "--data", str(photos / "train"), "-b", "8", *SHIFTS, *QUICK)
    assert result.exit_code == 3
    assert "--shifts: scores teacher and student on labelled images" in result.stderr


def test_networks_are_compared_under_shifts_in_pairs(command: list[str], tmp_path: Path) -> None:
    several = [word for word in command if word != "--json"]
    printed = run_dpn(*several, "--compare", "none,dpn", "--seeds", "2", "-o", str(tmp_path / "all")).stdout
    result = json.loads((tmp_path / "all/result.json").read_text())
    assert result["scores"] == ["top1", "shifts.gain", "shifts.gaussian_noise"]
    networks, (difference,) = result["compare"]["networks"], result["compare"]["differences"]
    means = {}
    for name, network in networks.items():
        runs = [next(iter(run["shifts"]["networks"].values())) for run in network["runs"].values()]
        means[name] = [sum(run["scores"]["gain"]) / 2 for run in runs]
        assert network["shifts.gain"]["values"] == pytest.approx(means[name], abs=1e-3)
    pairs = [after - before for before, after in zip(means["none"], means["dpn"], strict=True)]
    assert difference["shifts.gain"]["values"] == pytest.approx(pairs, abs=1e-3)
    assert "top-1 under shifts in % (means over severities), and the difference to none" in " ".join(printed.split())
    assert "gaussian noise" in printed
    assert "under gain" not in printed  # one table for all shifts
    assert "Mean over seeds, in a band that holds all of them." in page_of(tmp_path / "all")
    rows = (tmp_path / "all/page/figures/shifts_gain.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 3  # two networks, unshifted and at two severities


def test_stages_are_not_scored_under_shifts(photos: Path) -> None:
    result = run_dpn("pretrain", "sun397", "--arch", "mu/8", "--augment", "none", "--data", str(photos), *SHIFTS)
    assert result.exit_code == 2
    assert "score the chosen one with dpn eval RUN --shifts" in " ".join(result.stderr.split())


def test_a_dry_run_counts_the_passes_of_the_shifts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []

    def measure(build_setup: Callable[[], DryRunSetup], name: str, run_folder: Path, *, weights: int) -> Cost:
        scored.append(build_setup().sampled.end)
        return Cost(
            name=name, memory=0, step_seconds=1.0, steps=1, trainings=1, evaluation_seconds=1.0, kept=weights, passing=0
        )

    monkeypatch.setattr(dry_run, "dry_run_fit", measure)
    assert run_dpn(*command, "--dry-run", "-o", str(tmp_path / "run")).exit_code == 0
    assert scored == [24 * (1 + 1 + 2 * 2)]  # once for the accuracy, once unshifted, and two shifts of two severities


def test_a_page_of_predictions_shows_an_image_under_shifts(command: list[str], photos: Path, tmp_path: Path) -> None:
    """Its classes are those that `dpn predict` finds in the shifted image."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    run_dpn(*[word for word in command if word not in SHIFTS], "-o", str(run))
    image = photos / "val/class0/000.jpg"
    quick = [word for word in QUICK if word != "--json"]
    shown = run_dpn("predict", str(run), str(image), *SHIFTS, "--html", str(page), *quick)
    assert shown.exit_code == 0, shown.output
    pixels = reduce_to(read_pixels(image, "x", ReadOptions()), 18)  # of the network's 16 pixels, as 256 is of 224
    text = page.read_text().replace("<wbr>", "")
    for shift, severity in (("gain", 5), ("gaussian_noise", 2)):
        shifted = tmp_path / f"{shift}.png"
        rng = image_rng(7, shift, severity, image.name)
        Image.fromarray(shift_pixels(pixels, shift, severity, rng)).save(shifted)
        (predicted,) = json.loads(run_dpn("predict", str(run), str(shifted), *QUICK).stdout)
        best = predicted["classes"][0]
        found = re.search(rf"(\w+) ([\d.]+)%<br>{shift} {severity}<", text)
        assert found
        assert found[1] == best["name"]
        assert float(found[2]) == pytest.approx(100 * best["probability"], abs=0.06)
    refused = run_dpn("predict", str(run), str(image), "--shifts", "light")
    assert refused.exit_code == 2
    assert "name its file with --html" in " ".join(refused.stderr.split())


def test_students_are_compared_by_their_top1_under_shifts(photos: Path, tmp_path: Path) -> None:
    """The headline of a distillation is another score, the agreement."""
    teacher, run = write_teacher(tmp_path / "teacher.safetensors"), tmp_path / "all"
    command = ["distill", "--teacher", str(teacher), "--data", str(photos), "--steps", "2", "-b", "8", *SHIFTS]
    printed = run_dpn(*command, "--compare", "dpn,rms", *[word for word in QUICK if word != "--json"], "-o", str(run))
    assert printed.exit_code == 0, printed.output
    assert "distill: top-1 under shifts in % (means over severities)" in " ".join(printed.stdout.split())
    page = page_of(run)
    assert "top-1 under gain" in page
    assert "agreement under" not in page
    result = json.loads((run / "result.json").read_text())
    student = next(iter(result["compare"]["networks"]["dpn"]["runs"].values()))["shifts"]["networks"]["student"]
    assert result["compare"]["networks"]["dpn"]["shifts.gain"]["values"] == pytest.approx(
        [student["means"]["gain"]], abs=1e-4
    )
