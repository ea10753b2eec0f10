"""What `dpn eval -o` keeps of every image, and what `dpn report` makes of it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

# a fixture
from torchmetrics.classification import MulticlassCalibrationError

from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.metrics import Confusion, ImagePrediction, score
from dpn_cli.report.confusions import cluster_classes
from dpn_cli.report.content import Rows
from dpn_cli.report.tables import as_csv
from dpn_cli.report.thumbnails import SIDE
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.images import write_class_folders
from support.pages import SCRIPT_TAG, make_page, parse_page, read_chart_rows
from tasks.classify.calibration import ClassScores, confusion, reliability
from tasks.classify.predictions_file import (
    COLUMNS,
    MOST_MISTAKES,
    calibration_error,
    per_class,
    worst_pairs,
    write_predictions,
)

ONE = World(0, 1, torch.device("cpu"))


def predictions_of(classes: int, images: int) -> tuple[torch.Tensor, torch.Tensor, list[ImagePrediction]]:
    """Random probabilities, labels that are often right, and what is kept of them."""
    generator = torch.Generator().manual_seed(0)
    probabilities = (3 * torch.randn(images, classes, generator=generator)).softmax(-1)
    predictions = probabilities.argmax(-1)
    kept = torch.rand(images, generator=generator) < 0.6
    labels = torch.where(kept, predictions, torch.randint(classes, (images,), generator=generator))
    sure = probabilities.max(-1).values.tolist()
    answers = list(map(ImagePrediction, range(images), labels.tolist(), predictions.tolist(), sure))
    return probabilities, labels, answers


def test_calibration_is_torchmetrics_and_that_of_the_drawn_bins() -> None:
    probabilities, labels, answers = predictions_of(10, 700)
    expected = 100 * MulticlassCalibrationError(10, n_bins=15)(probabilities, labels).item()
    assert calibration_error(answers) == pytest.approx(expected, rel=1e-5)
    told = [ClassScores(a.row, "", str(a.label), str(a.predicted), a.confidence) for a in answers]
    sample = reliability(told, "x")
    bins = [row for row in zip(sample.images, sample.confidence, sample.accuracy, strict=True) if row[0]]
    error = sum(images * abs((right or 0) - (sure or 0)) for images, sure, right in bins) / 700
    assert 100 * error == pytest.approx(expected, rel=1e-5)
    assert sum(sample.images) == 700
    spans = zip(sample.edges, sample.confidence, sample.edges[1:], strict=False)
    assert all(low <= sure <= high for low, sure, high in spans if sure is not None)


def test_confusions_are_scikit_learns_and_clusters_stand_together() -> None:
    _, labels, answers = predictions_of(12, 500)
    names = [f"c{number}" for number in range(12)]
    told = [ClassScores(a.row, "", names[a.label], names[a.predicted], a.confidence) for a in answers]
    expected = confusion_matrix(labels, [a.predicted for a in answers], labels=range(12))
    assert confusion(told, names) == expected.tolist()
    group = np.random.default_rng(0).permutation(np.repeat(range(6), 10))
    counts = np.where(group[:, None] == group[None], 3, 0) + 20 * np.eye(60, dtype=int)
    order = cluster_classes(counts.tolist())
    assert sorted(order) == list(range(60))
    assert (np.diff(group[order]) != 0).sum() == 5


def test_counted_pairs_are_scikit_learns_matrix() -> None:
    _, labels, answers = predictions_of(12, 500)
    predicted = [prediction.predicted for prediction in answers]
    matrix = confusion_matrix(labels, predicted, labels=range(12))
    counted = Confusion(12, Counter(one.label * 12 + one.predicted for one in answers))
    assert (counted.true, counted.predicted) == (matrix.sum(1).tolist(), matrix.sum(0).tolist())
    assert counted.right == matrix.diagonal().tolist()
    invalid = np.where(np.eye(12, dtype=bool), 0, matrix)
    order = np.argsort(-invalid.flatten(), kind="stable")[:10]
    assert counted.worst(10) == [(*divmod(place, 12), invalid.flat[place]) for place in order.tolist()]
    assert Confusion(2, {0: 3, 3: 4}).worst(10) == []


def test_predictions_keep_their_rows_when_images_are_skipped(tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path / "photos", each=4))
    split.path(5).write_bytes(b"no image")

    def logits_of(images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[2.0, 1.0, 0.0]]).repeat(len(images), 1)

    def small(pixels: Any) -> torch.Tensor:
        return torch.zeros(3, 2, 2, dtype=torch.uint8)

    for loss, sure in (("softmax", np.exp(2) / np.exp([0, 1, 2]).sum()), ("sigmoid", 1 / (1 + np.exp(-2)))):
        options: Any = {"loss": loss, "batch_size": 3, "skip_bad": True, "keep_predictions": True}
        scores = score(logits_of, split, small, 3, ONE, **options)
        assert [prediction.row for prediction in scores.predictions] == [*range(5), *range(6, 12)]
        assert [one.label for one in scores.predictions] == [split.labels[one.row] for one in scores.predictions]
        assert {one.predicted for one in scores.predictions} == {0}
        assert scores.predictions[0].confidence == pytest.approx(sure)


def test_the_most_confident_mistakes_are_saved_as_small_images(tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path / "photos", each=15))
    answers = [ImagePrediction(row, split.labels[row], 0, (row % 15 + 1) / 15) for row in range(45)]
    (tmp_path / "mistakes").mkdir()
    (tmp_path / "mistakes" / "7.jpg").touch()
    (tmp_path / "predictions.csv").touch()
    write_predictions(tmp_path, answers, split.classes, split)
    kept = sorted(int(path.stem) for path in (tmp_path / "mistakes").iterdir())
    invalid = sorted(answers[15:], key=lambda one: -one.confidence)
    assert kept == sorted(one.row for one in invalid[:MOST_MISTAKES])
    with Image.open(tmp_path / "mistakes" / f"{kept[0]}.jpg") as image:
        assert max(image.size) <= SIDE
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert [rows[15][key] for key in COLUMNS[2:]] == ["class1", "class0", "0.066667"]


def test_an_image_in_shards_has_its_name_in_the_data_set(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos/train", each=2).parent
    assert run_dpn("data", "pack", "--data", str(photos), "-o", str(tmp_path / "pack")).exit_code == 0
    split, classes = open_split(ImageSource(str(tmp_path / "pack")), "train")
    write_predictions(tmp_path, [ImagePrediction(row, split.labels[row], 0, 0.5) for row in range(6)], classes, split)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    names = {f"class{label}/00{number}.jpg" for label in range(3) for number in range(2)}
    assert {row[COLUMNS[1]] for row in rows} == names


def evaluated(folder: Path, classes: int, images: int) -> Path:
    """Write what an evaluation leaves: one class is a script, one path as well."""
    _, _, answers = predictions_of(classes, images)
    names = [SCRIPT_TAG, *(f"class{number}" for number in range(1, classes))]
    table = Confusion(classes, Counter(one.label * classes + one.predicted for one in answers))
    pairs = [
        {"true": names[true], "predicted": names[predicted], "images": count, "share": 100 * share}
        for true, predicted, count, share in worst_pairs(table)
    ]
    result = {"task": "eval", "images": images, "classes": classes, "top1": 60.0, "top5": 90.0, "loss": 1.0, "ece": 4.0}
    (folder / "mistakes").mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({**result, "worst_pairs": pairs}))
    (folder / "per_class.csv").write_text(per_class(names, table))
    rows: Rows = [
        [a.row, f"{SCRIPT_TAG}/{a.row}", names[a.label], names[a.predicted], f"{a.confidence:.6f}"] for a in answers
    ]
    (folder / "predictions.csv").write_text(as_csv([list(COLUMNS), *rows]))
    for one in [prediction for prediction in answers if prediction.label != prediction.predicted][:3]:
        Image.new("RGB", (9, 5)).save(folder / "mistakes" / f"{one.row}.jpg")
    return folder


@pytest.mark.parametrize(("classes", "images"), [(6, 60), (20, 100), (1000, 5000)])
def test_an_evaluation_has_its_confusions_classes_calibration_and_mistakes(
    tmp_path: Path, classes: int, images: int
) -> None:
    html = make_page(tmp_path, evaluated(tmp_path / "scores", classes, images))
    tree = parse_page(html)
    assert "<script" not in html
    assert html.count("<img ") == 3
    assert f"is {SCRIPT_TAG}" in "".join(tree.itertext()) or f"{SCRIPT_TAG}/" in "".join(tree.itertext())
    assert sum(int(row[2]) for row in read_chart_rows(tmp_path, "confusion")[1:]) == images
    assert sum(int(row[2]) for row in read_chart_rows(tmp_path, "reliability")[1:]) == images
    assert len(html) < 400_000


def test_an_evaluation_of_an_older_version_is_shown_without_predictions(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "scores", 6, 60)
    text = (folder / "predictions.csv").read_text()
    (folder / "predictions.csv").write_text(text.replace(text.splitlines()[3], "3,x,class1,class2,2.5"))
    result = run_dpn("report", str(folder), "-o", str(tmp_path / "page"))
    assert result.exit_code == 3
    assert "predictions.csv, line 4: damaged (ValueError: confidence 2.5); 'dpn eval -o'" in result.stderr
    (folder / "predictions.csv").unlink()
    assert "predictions.csv is missing" in make_page(tmp_path, folder)


@pytest.mark.usefixtures("without_charts")
def test_damage_in_a_saved_file_is_reported_with_its_name(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "scores", 6, 60)
    answers, classes = folder / "predictions.csv", folder / "per_class.csv"
    kept = {path: path.read_text().splitlines(keepends=True) for path in (answers, classes)}
    answers.write_text("".join(kept[answers][:41]))
    assert "it has 40 predictions, and 60 images were scored" in make_page(tmp_path, folder)
    damages = {
        "predictions.csv, line 61: damaged (ValueError: class 'cla', ": (
            answers,
            [*kept[answers][:-1], "59,x,class1,cla,0.5"],
        ),
        "per_class.csv: damaged (ValueError: 5 classes, ": (classes, kept[classes][:-1]),
        "per_class.csv: damaged (KeyError": (classes, kept[classes][1:]),
    }
    for message, (path, lines) in damages.items():
        path.write_text("".join(lines))
        result = run_dpn("report", str(folder), "-o", str(tmp_path / "page"))
        assert (result.exit_code, message in result.stderr, "result.json" in result.stderr) == (3, True, False), (
            result.stderr
        )
        path.write_text("".join(kept[path]))
    classes.unlink()
    assert "per_class.csv is missing" in make_page(tmp_path, folder)
