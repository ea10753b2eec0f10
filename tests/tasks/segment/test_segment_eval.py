"""`segment eval` and `predict` on a network that nobody trained: places of data, places of reports, signals, memory."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpn_cli.data.decode import decode
from dpn_cli.run import signals
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.segment import CLASS_NAMES, segment_config, train_segment, write_scenes
from tasks.segment.artifact import Segmenter, load_segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.iou import SegmentScores, score
from tasks.segment.labels import LabelRule
from tasks.segment.model import LinearSegmenter, initialize_head
from tasks.segment.palette import Class, color_of
from tasks.segment.predict import STRENGTH, draw_labels, draw_overlay
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.segment.transforms import resize_image


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with data, and a run that was trained on them when they were somewhere else."""
    write_scenes(tmp_path / "data", {"training": 1, "validation": 3})
    vit = load_backbone("mu/16", image_size=64, num_classes=len(CLASS_NAMES), seed=1)
    initialize_head(vit, "lecun_normal", 2)
    classes = tuple(Class(name, color_of(index)) for index, name in enumerate(CLASS_NAMES))
    data = MaskData(source=str(tmp_path / "gone"), label_offset=1, ignore_label=0, scale=(256, 64))
    segmenter = Segmenter(LinearSegmenter(vit, final_norm=False), classes, data, Evaluation(), {})
    save_segmenter(segmenter, tmp_path / "run" / "weights.safetensors")
    (tmp_path / "run" / "run.json").write_text("{}")
    return tmp_path


def test_data_in_another_place_need_no_names_of_their_own(place: Path) -> None:
    command = ["segment", "eval", str(place / "run"), "--data", str(place / "data"), "--json", "-q", "-j", "0"]
    listed = json.loads(run_dpn(*command).stdout)
    (place / "data" / "classes.txt").unlink()
    assert json.loads(run_dpn(*command).stdout) == listed
    (place / "data" / "classes.txt").write_text("sky\nsea\n")
    other_result = run_dpn(*command)
    assert other_result.exit_code == 3
    assert "its 2 classes are not those that the run was trained on" in other_result.stderr
    gone = run_dpn(*command[:3], "-q")
    assert gone.exit_code == 3
    assert f"--data {place / 'gone'}: no such folder" in " ".join(gone.stderr.split())


def test_a_demo_segmenter_has_the_demos_classes_on_other_data_too(place: Path) -> None:
    own = load_segmenter(str(place / "run"))
    own.data = own.data.model_copy(update={"dataset": "ade20k", "source": "demo"})
    save_segmenter(own, place / "run" / "weights.safetensors")
    command = ["segment", "eval", str(place / "run"), "--data", str(place / "data"), "--json", "-q", "-j", "0"]
    listed = run_dpn(*command)
    assert listed.exit_code == 0, listed.stderr
    (place / "data" / "classes.txt").write_text("\n".join(reversed(CLASS_NAMES)))
    other_result = run_dpn(*command)
    assert other_result.exit_code == 3
    assert f"--data {place / 'data'}: its 5 classes are not those" in " ".join(other_result.stderr.split())
    (place / "data" / "classes.txt").unlink()
    assert json.loads(run_dpn(*command).stdout) == json.loads(listed.stdout)


def test_a_run_is_scored_as_the_command_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[WindowPlan] = []

    def score(*arguments: Any, **_: Any) -> SegmentScores:
        observed.append(arguments[3])
        return SegmentScores(torch.eye(5, dtype=torch.int64), 3)

    monkeypatch.setattr("tasks.segment.evaluate.score", score)
    command = ["segment", "eval", str(place / "run"), "--data", str(place / "data"), "--json", "-q"]
    run_dpn(*command)
    run_dpn(*command, "--stride", "9", "--size", "native", "--multi-scale")
    full = json.loads(run_dpn(*command, "--mode", "whole").stdout)
    assert (full["evaluation"]["mode"], full["miou"]) == ("whole", 100)
    plain = WindowPlan(64, 42, (256, 64))
    scales = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # Segmenter's
    many = replace(plain, stride=9, native=True, ratios=scales, flip=True)
    assert observed == [plain, many, replace(plain, stride=None)]


def enlarged(split: Path) -> None:
    """Make the validation images and masks of a data set 150x90."""
    for path in [*(split / "images" / "validation").iterdir(), *(split / "annotations" / "validation").iterdir()]:
        with Image.open(path) as opened:
            larger = opened.resize((150, 90), Image.Resampling.NEAREST)
        larger.save(path)


def test_both_sizes_are_scored_if_that_costs_one_more_pass(place: Path) -> None:
    enlarged(place / "data")
    command = ["segment", "eval", str(place / "run"), "--data", str(place / "data"), "--json", "-q", "-j", "0"]
    native, resized, both, many = (
        json.loads(run_dpn(*command, *arguments).stdout)
        for arguments in (["--size", "native"], ["--size", "resize"], ["--size", "both"], ["--multi-scale"])
    )
    assert native["miou"] != resized["miou"]
    scores = ("miou", "pixel_accuracy", "mean_accuracy")
    assert {key: both[key] for key in scores} == {key: native[key] for key in scores}
    assert both["resized"] == {key: resized[key] for key in scores}
    assert not any("resized" in result for result in (native, resized, many))
    output = run_dpn(*(word for word in command if word != "--json"), "--size", "both").stdout
    assert (
        f"(3 images, slide, native size; all pixels of the most frequent class: mIoU {both['majority_miou']:.2f}"
        in output
    )
    assert f"; resized: mIoU {resized['miou']:.2f} %" in output
    own = load_segmenter(str(place / "run"))
    own.evaluation = Evaluation(size="both")
    save_segmenter(own, place / "run" / "weights.safetensors")
    assert json.loads(run_dpn(*command).stdout)["resized"] == both["resized"]
    assert json.loads(run_dpn(*command, "--multi-scale").stdout)["evaluation"]["size"] == "native"


def test_rescoring_a_run_gives_the_score_after_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enlarged(write_scenes(tmp_path / "data", {"training": 8, "validation": 2}))
    observed: list[WindowPlan] = []

    def scored(*arguments: Any, **options: Any) -> SegmentScores:
        observed.append(arguments[3])
        return score(*arguments, **options)

    monkeypatch.setattr("tasks.segment.evaluate.score", scored)
    way = {"size": "native", "stride": 50, "scales": [0.5, 1.0], "flip": True, "batch_size": 3}
    result = train_segment(segment_config(tmp_path / "data", schedule={"steps": 1}, evaluation=way), tmp_path / "run")
    second = json.loads(run_dpn("segment", "eval", str(tmp_path / "run"), "--json", "-q", "-j", "0").stdout)
    assert observed == [WindowPlan(64, 50, (256, 64), native=True, ratios=(0.5, 1.0), flip=True, batch_size=3)] * 2
    assert second["evaluation"] == result["evaluation"] == {**way, "mode": "slide"}
    assert second["miou"] == result["miou"]
    full = segment_config(tmp_path / "data", schedule={"steps": 1}, evaluation={"mode": "whole"})
    train_segment(full, tmp_path / "whole")
    run_dpn("segment", "eval", str(tmp_path / "whole"), "-q", "-j", "0")
    assert [plan.stride for plan in observed[2:]] == [None, None]


def test_a_training_is_checked_once_and_scored_at_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enlarged(write_scenes(tmp_path / "data", {"training": 8, "validation": 2}))
    observed: list[bool] = []

    def scored(*arguments: Any, **options: Any) -> SegmentScores:
        observed.append(arguments[3].native)
        return score(*arguments, **options)

    monkeypatch.setattr("tasks.segment.evaluate.score", scored)
    settings = {"schedule": {"steps": 2}, "evaluate_every": 1, "evaluation": {"size": "both"}}
    result = train_segment(segment_config(tmp_path / "data", **settings), tmp_path / "run")
    assert observed == [True, True, True, False]  # steps 1 and 2, then the result
    assert set(result["resized"]) == {"miou", "pixel_accuracy", "mean_accuracy"}
    assert result["evaluation"]["size"] == "both"


def test_a_photograph_is_resized_as_in_training_if_a_run_is_scored_at_both_sizes(place: Path) -> None:
    own = load_segmenter(str(place / "run"))
    labels = []
    with Image.open(place / "data" / "images" / "validation" / "0000.jpg") as opened:
        opened.resize((300, 200)).save(place / "large.png")
    for size in ("native", "resize", "both"):
        own.evaluation = Evaluation(size=size)
        save_segmenter(own, place / "run" / "weights.safetensors")
        run_dpn("segment", "predict", str(place / "run"), str(place / "large.png"), "-o", str(place))
        labels.append((place / "large.labels.png").read_bytes())
    assert labels[2] == labels[1] != labels[0]


def test_a_prediction_is_the_label_map_of_the_runs_plan(place: Path) -> None:
    own = load_segmenter(str(place / "run"))
    own.evaluation = Evaluation(scales=(1.0, 1.5), flip=True)
    save_segmenter(own, place / "run" / "weights.safetensors")
    image = place / "data" / "images" / "validation" / "0000.jpg"
    with Image.open(image) as opened:
        opened.resize((150, 90)).save(place / "wide.png")
    done = json.loads(
        run_dpn("segment", "predict", str(place / "run"), str(place / "wide.png"), "-o", str(place), "--json").stdout
    )
    pixels = decode(Image.open(place / "wide.png"), "")
    images = [resize_image(pixels, size) for size in ((64, 107), (96, 160))]
    with torch.inference_mode():
        expected = label_map(own.network, images, (90, 150), own.plan()).numpy() + 1  # raw numbers begin at 1
    with Image.open(place / "wide.labels.png") as written:
        assert np.array_equal(np.asarray(written), expected)
    shares = {score["value"]: score["share"] for score in done[0]["classes"]}
    assert shares == {int(value): pytest.approx((expected == value).mean()) for value in np.unique(expected)}


def test_a_report_never_replaces_a_run(place: Path) -> None:
    (place / "run" / "result.json").write_text("mine")
    result = run_dpn("segment", "eval", str(place / "run"), "--data", str(place / "data"), "-o", str(place / "run"))
    assert result.exit_code == 2
    assert "the folder holds a run, and its result.json would be replaced" in result.stderr
    assert (place / "run" / "result.json").read_text() == "mine"
    shutil.rmtree(place / "data")  # a place that cannot be written is found before anything is read
    result = run_dpn("segment", "eval", str(place / "run"), "-o", str(place / "run" / "run.json" / "report"), "-q")
    assert result.exit_code == 2
    assert "report: the folder cannot be made (Not a directory)" in result.stderr


def test_a_stopped_evaluation_reports_that_it_has_no_result(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "requested_signal", lambda: signal.SIGTERM)
    result = run_dpn("segment", "eval", str(place / "run"), "--data", str(place / "data"), "-j", "0", "-q")
    assert result.exit_code == 75
    assert result.stderr.strip() == "error: stopped by SIGTERM; no result was written"


def test_drawn_masks_have_the_classes_colors() -> None:
    rng = np.random.default_rng(0)
    classes = [Class(str(index), tuple(rng.integers(0, 256, 3).tolist())) for index in range(254)]
    labels = np.arange(254, dtype=np.uint8).repeat(2).reshape(2, 254)
    pixels = rng.integers(0, 256, (2, 254, 3), dtype=np.uint8)
    colors = np.array([mask_class.color for mask_class in classes])[labels]
    overlay = np.asarray(draw_overlay(pixels, labels, classes))
    assert np.abs(overlay - ((1 - STRENGTH) * pixels + STRENGTH * colors)).max() <= 1
    sample = draw_labels(labels, LabelRule(254, 2, 0), classes)
    assert np.array_equal(np.asarray(sample), labels + 2)  # the file holds the data set's numbers
    assert np.array_equal(np.asarray(sample.convert("RGB")), colors)
    wide = draw_labels(labels, LabelRule(254, 1000, 0), classes)
    assert np.array_equal(np.asarray(wide), labels.astype(int) + 1000)


def test_a_run_that_was_killed_after_its_training_leaves_no_checkpoints(tmp_path: Path) -> None:
    config = segment_config(write_scenes(tmp_path / "data", {"training": 8, "validation": 2}), schedule={"steps": 1})
    result = train_segment(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "checkpoints" / "last").mkdir(parents=True)
    assert train_segment(config, tmp_path / "run", resume=True) == result
    assert not (tmp_path / "run" / "checkpoints").exists()
