"""`dpn segment eval --shifts`: the mIoU under a shift is that on images that were shifted before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.data.shifted_images import image_rng
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.cli import run_dpn
from support.segment import CLASS_NAMES, write_scenes
from tasks.segment.artifact import Segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.model import LinearSegmenter
from tasks.segment.palette import Class


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shifts")
    scenes = write_scenes(root / "scenes", {"training": 2, "validation": 4})
    classes = tuple(Class(name, (1, 2, 3)) for name in CLASS_NAMES)
    data = MaskData(source=str(scenes), label_offset=1, ignore_label=0)
    for seed, name in enumerate(("own", "other")):
        vit = perturb(load_backbone("mu/8", image_size=32, num_classes=len(CLASS_NAMES), seed=seed))
        segmenter = Segmenter(LinearSegmenter(vit, final_norm=False), classes, data, Evaluation(), {})
        save_segmenter(segmenter, root / name / "weights.safetensors")
        (root / name / "run.json").write_text("{}")
    return root


def evaluate(folder: Path, run: str, *options: str) -> dict[str, Any]:
    result = run_dpn("segment", "eval", str(folder / run), "--device", "cpu", "-j", "0", "-q", "--json", *options)
    assert result.exit_code == 0, result.output
    scores: dict[str, Any] = json.loads(result.stdout)
    return scores


def test_the_miou_under_a_shift_is_that_on_shifted_images(folder: Path) -> None:
    levels = ["--shifts", "gain,gaussian_noise", "--severity", "1,5", "--baseline", str(folder / "other")]
    shifts = evaluate(folder, "own", *levels, "--shift-seed", "7", "-o", str(folder / "report"))["shifts"]
    assert (shifts["metric"], shifts["severities"]) == ("miou", [1, 5])
    for run, network in zip(("own", "other"), shifts["networks"].values(), strict=True):
        assert network["clean"] == evaluate(folder, run)["miou"]
        for shift, severity in (("gain", 1), ("gaussian_noise", 5)):
            shifted = folder / shift
            shutil.rmtree(shifted, ignore_errors=True)
            shutil.copytree(folder / "scenes", shifted)
            for path in sorted((shifted / "images/validation").iterdir()):
                pixels = read_pixels(folder / "scenes/images/validation" / path.name, "x", ReadOptions())
                rng = image_rng(7, shift, severity, path.stem)
                path.unlink()
                Image.fromarray(shift_pixels(pixels, shift, severity, rng)).save(path.with_suffix(".png"))
            assert network["scores"][shift][severity == 5] == evaluate(folder, run, "--data", str(shifted))["miou"]
    rows = [row for network in shifts["networks"].values() for row in network["scores"].values()]
    assert len(np.unique(rows)) > 4
    page = run_dpn("report", str(folder / "report"), "-o", str(folder / "page"))
    assert page.exit_code == 0, page.output
    assert "mIoU under shifts: gaussian noise" in (folder / "page/report.html").read_text()
    text = run_dpn("segment", "eval", str(folder / "own"), "--device", "cpu", "-j", "0", *levels[:2], "--severity", "5")
    assert "mIoU in % under shifts, by severity" in text.stdout


def test_a_training_is_scored_as_an_evaluation_scores_it(folder: Path, tmp_path: Path) -> None:
    shifts = ["--shifts", "gain,gaussian_noise", "--severity", "4", "--shift-seed", "3"]
    data = ["--data", str(folder / "scenes"), "--label-offset", "1", "--ignore-label", "0", "--checkpoint", "none"]
    small = ["--arch", "mu/8", "--image-size", "16", "--steps", "2", "-b", "2", "-j", "0", "--device", "cpu", "-q"]
    result = run_dpn("segment", "folder", *data, *small, *shifts, "-o", str(tmp_path / "run"), "--json")
    assert result.exit_code == 0, result.output
    trained = json.loads(result.stdout)["shifts"]
    assert list(trained["networks"]) == ["mu/8 dpn"]
    evaluated = evaluate(tmp_path, "run", *shifts)["shifts"]
    assert list(trained["networks"].values()) == list(evaluated["networks"].values())
    assert len(list((tmp_path / "run/shifts").iterdir())) == 3
