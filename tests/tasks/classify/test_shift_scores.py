"""`dpn eval --shifts`: scores, relative errors, files and page."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.data.shifted_images import image_rng, reduce_to
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.report.content import LineChart
from dpn_cli.report.reading import read_run
from dpn_cli.report.shift_scores import relative_errors
from dpn_cli.report.shift_section import shift_sections
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.cli import run_dpn
from support.images import write_class_folders
from tasks.classify.classifier import Classifier, load_classifier, save_classifier


def write_classifier(path: Path, stem: Any, seed: int, images: Path) -> Path:
    """Save a random network that predicts each class for half of the images, with any version of torch."""
    model = perturb(load_backbone("mu/16", stem=stem, checkpoint="none", image_size=32, num_classes=2, seed=seed))
    paths = sorted(images.rglob("*.jpg"))
    pixels = np.stack([reduce_to(read_pixels(path, "x", ReadOptions()), 32)[:32, :32] for path in paths])
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
        model.get_parameter("head.bias")[0] += (logits[:, 1] - logits[:, 0]).median()
    save_classifier(Classifier(model, ("class0", "class1"), "softmax", None, {}), path)
    return path


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    folder = tmp_path_factory.mktemp("shifts")
    write_class_folders(folder / "photos/val", classes=2, each=8)
    command = [
        *(
            "eval",
            str(write_classifier(folder / "dpn.safetensors", "dpn", 1, folder / "photos")),
            "--data",
            str(folder / "photos"),
        ),
        *("--shifts", "gain,gaussian_noise", "--severity", "5,1", "--device", "cpu", "-q"),
        *("--baseline", str(write_classifier(folder / "none.safetensors", "none", 2, folder / "photos"))),
    ]
    return folder, folder / "report", [*command, "-o", str(folder / "report")]


def test_scores_are_saved_and_those_of_the_baseline_are_its_own(evaluated: tuple[Path, Path, list[str]]) -> None:
    folder, report, command = evaluated
    result = json.loads(run_dpn(*command, "--json", "-j", "0").stdout)["shifts"]
    assert result["severities"] == [1, 5]
    own, baseline = result["networks"].values()
    assert list(own["scores"]) == ["gain", "gaussian_noise"]
    assert own["means"]["gain"] == pytest.approx(np.mean(own["scores"]["gain"]))
    assert result["mce"] == relative_errors(own["scores"], baseline["scores"])
    alone = [word if "dpn.safetensors" not in word else str(folder / "none.safetensors") for word in command[:-4]]
    assert json.loads(run_dpn(*alone, "--json").stdout)["shifts"]["networks"].popitem()[1] == baseline
    with (report / "shifts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["top1"]) for row in rows if row["shift"] == "gain"] == [
        *own["scores"]["gain"],
        *baseline["scores"]["gain"],
    ]
    assert {path.name for path in (report / "shifts").iterdir()} == {"clean.jpg", "gain.jpg", "gaussian_noise.jpg"}


def test_workers_do_not_change_the_scores(evaluated: tuple[Path, Path, list[str]]) -> None:
    command = evaluated[2][:-2]
    first, second = (json.loads(run_dpn(*command, "--json", "-j", workers).stdout)["shifts"] for workers in ("0", "2"))
    assert first == second


def test_the_page_has_charts_of_both_networks_and_examples(
    evaluated: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    _, report, command = evaluated
    run_dpn(*command)
    run_dpn("report", str(report), "-o", str(tmp_path / "page"))
    page = (tmp_path / "page/report.html").read_text()
    assert "top-1 under shifts: gaussian noise" in page
    assert "One image under every shift, severity 5" in page
    with (tmp_path / "page/figures/shifts_gain.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 2 * 3  # two networks at severities 0, 1 and 5


def test_relative_errors_are_those_of_imagenet_c() -> None:
    scores = {"fog": [80.0, 60.0], "gain": [50.0, 50.0], "snow": [100.0, 90.0]}
    baseline = {"fog": [70.0, 50.0], "gain": [0.0, 0.0], "snow": [100.0, 100.0]}
    errors = relative_errors(scores, baseline)
    assert errors["errors"] == {"fog": pytest.approx(75.0), "gain": pytest.approx(50.0), "snow": None}
    assert errors["mce"] == pytest.approx(75.0)  # gain is none of ImageNet-C's corruptions


def test_a_dpn_stem_does_not_see_gain_and_contrast() -> None:
    """The stem normalises each patch, so a positive scale and a shift of its values leave the tokens as they are."""
    model = perturb(load_backbone("mu/16", stem="dpn", checkpoint="none", image_size=32, num_classes=2, seed=0))
    image = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    model = model.double().eval()
    torch.testing.assert_close(model(2 * image - 1), model(0.25 * (2 * image - 1) + 0.1), rtol=1e-3, atol=1e-3)


def test_a_baseline_with_its_classes_in_another_order_is_the_same_network(
    evaluated: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    own = load_classifier(str(evaluated[0] / "dpn.safetensors"))
    with torch.no_grad():
        for parameter in own.model.get_submodule("head").parameters():
            parameter.copy_(parameter.flip(0))
    swapped = tmp_path / "swapped.safetensors"
    save_classifier(replace(own, classes=own.classes[::-1]), swapped)
    command = [str(swapped) if "none.safetensors" in word else word for word in evaluated[2][:-2]]
    scores, baseline = json.loads(run_dpn(*command, "--json").stdout)["shifts"]["networks"].values()
    assert scores == baseline


def test_the_accuracy_under_a_shift_is_that_on_shifted_images(
    evaluated: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    folder, _, command = evaluated
    both = json.loads(run_dpn(*command[:-2], "--shift-seed", "3", "--json").stdout)["shifts"]
    assert both["side"] == 37  # of the network's 32 pixels, as 256 is of 224
    for shift, severity in (("gain", 5), ("gaussian_noise", 1), ("gaussian_noise", 5)):
        shifted = tmp_path / f"{shift}{severity}"
        for path in sorted((folder / "photos").rglob("*.jpg")):
            rng = image_rng(3, shift, severity, f"{path.parent.name}/{path.name}")
            pixels = shift_pixels(reduce_to(read_pixels(path, "x", ReadOptions()), 37), shift, severity, rng)
            target = shifted / path.relative_to(folder / "photos").with_suffix(".png")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(target)
        for network, scores in both["networks"].items():
            alone = json.loads(run_dpn("eval", network, "--data", str(shifted), "--device", "cpu", "--json").stdout)
            assert scores["scores"][shift][severity == 5] == alone["top1"]
    rows = [score for scores in both["networks"].values() for row in scores["scores"].values() for score in row]
    assert len(set(rows)) > 1


def test_charts_of_shifts_begin_at_zero(evaluated: tuple[Path, Path, list[str]]) -> None:
    _, report, command = evaluated
    run_dpn(*command)
    (section,) = shift_sections(read_run(report), "")
    assert {part.from_zero for part in section.parts if isinstance(part, LineChart)} == {True}
