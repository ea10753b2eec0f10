"""Warnings of trainings that cannot learn, or have not: the words, the limits, and that every task says them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, from_settings, merge
from dpn_cli.engine import fit as engine
from dpn_cli.run.baseline_warnings import crop_warning, result_warning
from dpn_cli.run.console import Console
from support.highres import highres_config, train_highres
from support.lit import lit_config, train_lit
from support.vtab import TOY
from tasks.classify.highres import run
from tasks.vtab import command as vtab_command
from tasks.vtab import config as vtab_config
from tasks.vtab.tasks import Task, choose_tasks
from tasks.vtab.train import Trainer


@pytest.mark.parametrize(
    ("crop", "images", "share"),
    [
        ((28, 28), [(512, 512)], "0.3"),
        ((64, 64), [(418, 418), (418, 600), (418, 500)], "2.0"),
        ((10, 10), [(10, 500)], "2.0"),
        ((50, 50), [(10, 500), (300, 300), (5000, 20)], "2.8"),
    ],
)
def test_a_crop_below_a_twentieth_of_the_images_is_reported(
    crop: tuple[int, int], images: list[tuple[int, int]], share: str
) -> None:
    warning = crop_warning(crop, images)
    assert warning is not None
    assert f"crops of {crop[0]}x{crop[1]} cover {share} % of the images" in warning


@pytest.mark.parametrize("images", [[], [(28, 28)], [(14, 14)], [(125, 125)], [(125, 125), (9000, 9000), (20, 20)]])
def test_other_crops_are_not(images: list[tuple[int, int]]) -> None:
    assert crop_warning((28, 28), images) is None


def test_a_score_has_to_beat_the_highest_floor_by_more_than_luck() -> None:
    floors = {"chance": 10.0, "most_frequent_class": 20.0}
    warning = result_warning("validation top-1", 15.0, floors, 100)
    assert warning is not None
    assert (
        "NOTHING LEARNT: validation top-1 15.00 % of 100 is not above what always naming the most frequent" in warning
    )
    warning = result_warning("validation top-1", 5.8, {"most_frequent_class": 5.6}, 1000)
    assert "5.80 % of 1000 is not clearly above what always naming the most frequent class gives (5.60" in str(warning)
    # The one-sided binomial test of 100 answers at 20 %: 27 may be luck, 28 is not.
    assert binom.sf(26, 100, 0.2) > 0.05 > binom.sf(27, 100, 0.2)
    assert result_warning("", 27.0, floors, 100) is not None
    assert result_warning("", 28.0, floors, 100) is None
    assert result_warning("mIoU", 20.1, floors) is None
    assert result_warning("mIoU", 20.0, floors) is not None
    assert result_warning("", 0.0, floors, 100) is not None


def test_one_class_alone_is_no_reason_to_warn() -> None:
    assert result_warning("", 100.0, {"chance": 100.0}, 50) is None
    assert result_warning("", 90.0, {"chance": 100.0}, 50) is not None


def lines(capsys: pytest.CaptureFixture[str], start: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if start in line]


def test_classification_warns_that_nothing_was_learned_and_records_the_floors(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("a", 30), ("b", 15), ("c", 15)):  # the same images in every class
        (tmp_path / "same" / name).mkdir(parents=True)
        for number in range(count):
            shutil.copy(photos / "class0" / f"{number:03d}.jpg", tmp_path / "same" / name)
    result = train_highres(highres_config(tmp_path / "same", schedule={"steps": 2}), tmp_path / "run")
    assert result["floors"] == {"chance": pytest.approx(100 / 3), "most_frequent_class": 50.0}
    (line,) = lines(capsys, "NOTHING LEARNT")
    assert f"validation top-1 {result['top1']:.2f} % of 12 is not above what always naming the most frequent" in line
    train_highres(highres_config(photos), tmp_path / "learnt")
    assert not lines(capsys, "NOTHING LEARNT")


def test_a_tiny_centre_crop_is_reported_before_training(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "fit", lambda *given, **named: pytest.fail("said too late"))
    config = highres_config(photos, data={"eval_resize": 160})
    with pytest.raises(pytest.fail.Exception, match="said too late"):
        train_highres(config, tmp_path / "run")
    (line,) = lines(capsys, "crops of")
    assert "crops of 32x32 cover 3.2 % of the images, which are cropped at 160x200 (median)" in line


def test_a_dry_run_is_reported_too(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, said in ((160, 1), (None, 0)):
        config = highres_config(photos, data={"eval_resize": side})
        run(config, LaunchOptions(dry_run=True), Console(quiet=True))
        assert len(lines(capsys, "crops of 32x32 cover 3.2 % of the images")) == said


@pytest.mark.parametrize("dry_run", [False, True])
def test_vtab_warns_of_tiny_crops_before_training(
    dry_run: bool, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "job", lambda *given, **named: pytest.fail("said too late"))

    def said(task: Task, resize: int | None, augment: dict[str, list[str]]) -> list[str]:
        monkeypatch.setattr("tasks.vtab.command.choose_tasks", lambda names, demo: [task])
        monkeypatch.setattr("tasks.vtab.sweep.choose_tasks", lambda names, demo: [task])
        layers = merge(from_settings(TOY), {"data": {"source": str(digits), "resize": resize, "augment": augment}})
        built = vtab_config.finalize(build(vtab_config.VtabConfig, vtab_config.resolve(None, layers, {}), "test"))
        with pytest.raises(pytest.fail.Exception, match="said too late"):
            vtab_command.run(built, LaunchOptions(tmp_path / "r", overwrite=True, dry_run=dry_run), Console(quiet=True))
        return lines(capsys, "crops of")

    (svhn,) = choose_tasks(("svhn",), False)
    (line,) = said(svhn, 80, {})
    assert "crops of 16x16 cover 4.0 % of the images, which are cropped at 80x80 (median)" in line
    assert not said(svhn, None, {})
    assert not said(svhn, 80, {"svhn": ["flip"]})  # its images are taken whole


def test_vtab_names_the_task_that_was_not_learned(
    toy: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 86 or 87 of the 797 test images are of the most frequent class.
    for right, said in ((87, 1), (400, 0)):
        monkeypatch.setattr(Trainer, "count_test", lambda self, weights, right=right: [(right, 797)] * len(weights))
        toy(tmp_path / str(right), "lrs=1e-2", "seeds=1", "schedule.steps=2")
        actual = lines(capsys, "NOTHING LEARNT: svhn dpn: test top-1")
        assert len(actual) == said
        assert all("10.92 % of 797 is not above what always naming the most frequent class" in line for line in actual)


def test_lit_warns_that_retrieval_and_zero_shot_are_at_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.lit.final_zeroshot.DEMO_SPLITS", {"train": (0, 32), "val": (1000, 1032)})
    monkeypatch.setattr("tasks.lit.data.DEMO_SPLITS", {"train": (0, 32), "val": (1000, 1032)})
    train_lit(lit_config("demo", lr=1e-9, batch_size=32, schedule={"steps": 1, "warmup": 0}), tmp_path / "run")
    said = lines(capsys, "NOTHING LEARNT")
    assert [line.split(": ")[2].split(" %")[0].rsplit(" ", 1)[0] for line in said] == [
        "held-out image to text R@5",
        "held-out text to image R@5",
        "zero-shot top-1",
    ]
