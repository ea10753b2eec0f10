"""The config of `dpn segment`: Appendix G's numbers, fractions, durations, labels and classes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml

from dpn_cli.config.load import build, merge, read_config
from dpn_cli.errors import DataError, DpnError
from support.cli import run_dpn
from tasks.segment.config import SegmentConfig, finalize, resolve, resolve_steps
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.pairs import ScenePairs, list_digest, take
from tasks.segment.palette import ade20k, color_of


def test_the_config_is_the_papers() -> None:
    plain = resolve("ade20k", None, {"data": {"source": "ade"}, "backbone": {"arch": "B/16", "checkpoint": "x"}}, {})
    built = build(SegmentConfig, plain, "test")
    optim, schedule = built.optim, built.schedule
    assert (schedule.steps, schedule.warmup, schedule.decay, schedule.power, schedule.end) == (
        128 * (20210 // 16),
        0,
        "polynomial",
        0.9,
        0,
    )
    assert (built.lr, built.batch_size, built.backbone.image_size, built.backbone.drop_path) == (3e-5, 16, 512, 0.1)
    assert (optim.name, optim.betas, optim.eps, optim.weight_decay) == ("adam", (0.9, 0.999), 1e-8, 0.01)
    assert (optim.decay_mask, optim.decay_unit, optim.clip_norm) == ("not_1d", "lr", None)
    assert (built.data.scale, built.augment.ratio, built.augment.cat_max) == ((2048, 512), (0.5, 2.0), 0.75)
    assert (built.evaluation.stride, built.final_norm, built.data.inputs) == (None, False, "imagenet")


@pytest.mark.parametrize(("share", "images"), [("1/16", 1263), ("1/8", 2526), ("0.25", 5052), (0.5, 10105), (1, 20210)])
def test_fractions_are_the_papers_counts(share: object, images: int) -> None:
    fraction = build(SegmentConfig, merge(read_config("ade20k"), {"data": {"fraction": share}}), "test").data.fraction
    assert len(take(_Named(20210), fraction)) == images


class _Named(ScenePairs):
    def __init__(self, count: int) -> None:
        self.names = [f"ADE_train_{number:08d}" for number in range(1, count + 1)]
        self.sizes = [(1, 1)] * count


def test_smaller_fractions_are_subsets_of_larger_ones_and_reproducible() -> None:
    parts = [take(_Named(20210), share) for share in (1 / 16, 1 / 8, 1 / 4)]
    for less, more in itertools.pairwise(parts):
        assert set(less.names) < set(more.names)
    assert list_digest(parts[0]) == "428c67af5b49026b"  # of NumPy's legacy shuffle: the same on every machine


def test_epochs_scale_with_the_images_that_are_left() -> None:
    plain = resolve("ade20k", None, {"data": {"source": "x"}, "epochs": 128}, {})
    built = build(SegmentConfig, plain, "test")
    steps = {images: resolve_steps(built, images).schedule.steps for images in (1263, 2526, 5052, 10105, 20210)}
    assert list(steps.values()) == [9984, 20096, 40320, 80768, 161_664]
    assert resolve("segment", None, {"data": {"source": "x"}, "schedule": {"steps": 5}}, {})["epochs"] is None
    shorter = resolve("ade20k", None, {"data": {"source": "demo"}, "schedule": {"steps": 240}}, {})["schedule"]
    assert (shorter["steps"], shorter["warmup"]) == (240, 10)  # the demo's 50 of 1,200, kept as a share
    with pytest.raises(DpnError, match="--steps 5 and --epochs 2: give one of them"):
        resolve("ade20k", None, {"schedule": {"steps": 5}, "epochs": 2}, {})


def test_flags_reach_the_config() -> None:
    for command, flag, expected in (("folder", "--no-flip", False), ("ade20k", "--flip", True), ("folder", "-q", True)):
        result = run_dpn("segment", command, "--data", "somewhere", "--image-size", "28", flag, "--print-config")
        config = yaml.safe_load(result.stdout)
        assert (config["data"]["flip"], config["backbone"]["image_size"]) == (expected, 28)


def test_without_data_it_is_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built = build(SegmentConfig, resolve("ade20k", None, {"data": {"fraction": "1/4"}}, {}), "test")
    assert built.demo
    assert finalize(built).backbone.checkpoint is None  # the command makes the demo tower
    assert finalize(built, "tower").backbone.checkpoint == "tower"
    scratch = built.model_copy(update={"backbone": built.backbone.model_copy(update={"arch": "mu/8"})})
    assert finalize(scratch, "tower").backbone.checkpoint == "none"
    (tmp_path / "ADEChallengeData2016").mkdir()
    with pytest.raises(DpnError, match="no weights were given. Ways out"):
        finalize(build(SegmentConfig, resolve("ade20k", None, {"backbone": {"arch": "B/16"}}, {}), "test"))


def test_ade20k_has_its_classes_and_colors() -> None:
    classes = ade20k()
    assert [score.name for score in classes[:3]] == ["wall", "building", "sky"]
    assert (classes[-1].name, classes[2].color) == ("flag", (6, 230, 230))
    assert len({one.name for one in classes}) == len(classes) == 150
    assert len({color_of(index) for index in range(60)}) == 60


def test_raw_values_become_labels_in_one_place() -> None:
    rule = LabelRule(150, 1, 0)
    raw = np.array([[0, 1, 150]], np.uint8)
    assert rule.labels(raw, "here").tolist() == [[IGNORE, 0, 149]]
    assert rule.raw(rule.labels(raw[:, 1:], "here")).tolist() == [[1, 150]]
    assert LabelRule(3).labels(np.array([0, 2, 255], np.uint8), "").tolist() == [0, 2, IGNORE]
    assert LabelRule(3, 1000, None).labels(np.array([1000, 1002], np.uint16), "").tolist() == [0, 2]
    with pytest.raises(DpnError, match="2 to 254"):
        LabelRule(300)


@pytest.mark.parametrize(
    ("values", "rule", "message"),
    [
        ([0, 7, 151], LabelRule(150, 1, 0), "holds 151; allowed are 1…150 for the 150 classes, 0 ignored. .*too many"),
        ([0, 149, 255], LabelRule(150, 1, 0), "starts at 0 and ignores 255: .*--label-offset 0 --ignore-label 255"),
        ([0, 1, 150], LabelRule(150, 0, 255), "starts at 1 and ignores 0: .*--label-offset 1 --ignore-label 0"),
        ([0, 255], LabelRule(150, 1, 0), "starts at 0 and ignores 255|black-and-white"),
        ([0, 255], LabelRule(3, 1, None), "black-and-white image of one object|starts at 0"),
        ([3, 90, 200, 201], LabelRule(5, 0, 255), "another data set, or grey images"),
    ],
)
def test_a_mask_of_another_convention_is_reported_with_its_name(
    values: list[int], rule: LabelRule, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        rule.labels(np.array(values, np.uint8), "mask.png")
