"""Files of a training or of ``dpn eval -o`` for a page: predictions, classes, small images of mistakes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.metrics import Confusion, ImagePrediction, Scores
from dpn_cli.report.content import Cell
from dpn_cli.report.tables import as_csv
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run.files import replace_file, replace_text
from tasks.classify.calibration import BINS
from tasks.classify.classifier import readable

PREDICTIONS, MISTAKES, CLASSES = "predictions.csv", "mistakes", "per_class.csv"
COLUMNS = ("row", "image", "true", "predicted", "confidence")
# Mistakes that are kept as images.
MOST_MISTAKES = 24
WORST_PAIRS = 10


def save_scores(folder: Path, scores: Scores, names: Sequence[str], split: LabelledImages) -> dict[str, Any]:
    """Write a page's files for a scored split with predictions; return the entries for the result.

    `names` are those of the classes. Raises `SaveError`.
    """
    write_predictions(folder, scores.predictions, names, split)
    replace_text(folder / CLASSES, per_class(names, scores.confusion))
    return {
        "ece": calibration_error(scores.predictions),
        "worst_pairs": describe_pairs(names, scores.confusion),
    }


def calibration_error(predictions: Sequence[ImagePrediction]) -> float:
    """Return the expected calibration error in percent points, by torchmetrics (arXiv 1706.04599).

    Confidence is the probability of the best class; the bins are equally wide.
    """
    from torchmetrics.functional.classification import binary_calibration_error

    right = torch.tensor([prediction.label == prediction.predicted for prediction in predictions])
    confidence = torch.tensor([prediction.confidence for prediction in predictions], dtype=torch.float64)
    return 100 * float(binary_calibration_error(confidence, right.int(), n_bins=BINS, norm="l1"))


def most_confident_mistakes(predictions: Sequence[ImagePrediction]) -> list[ImagePrediction]:
    """Return the mistakes with the highest confidence, the surest first."""
    mistakes = [prediction for prediction in predictions if prediction.label != prediction.predicted]
    return sorted(mistakes, key=lambda prediction: (-prediction.confidence, prediction.row))[:MOST_MISTAKES]


def write_predictions(
    folder: Path, predictions: Sequence[ImagePrediction], names: Sequence[str], split: LabelledImages
) -> None:
    """Write predictions.csv, and the most confident mistakes as small images to ``mistakes/ROW.jpg``.

    An image in shards has its name in the data set, any other its file. Images of an earlier evaluation there are
    deleted. Raises `SaveError`.
    """
    if (folder / PREDICTIONS).is_file():
        for path in (folder / MISTAKES).glob("*.jpg"):
            path.unlink()
    rows: list[list[Cell]] = [
        [
            row,
            split.key(row) if split.shards else split.locate(row),
            names[label],
            names[predicted],
            f"{confidence:.6f}",
        ]
        for row, label, predicted, confidence in predictions
    ]
    replace_text(folder / PREDICTIONS, as_csv([COLUMNS, *rows]))
    for prediction in most_confident_mistakes(predictions):
        image = thumbnail(split.pixels(prediction.row))
        replace_file(folder / MISTAKES / f"{prediction.row}.jpg", partial(Path.write_bytes, data=image))


def describe_pairs(names: Sequence[str], confusion: Confusion) -> list[dict[str, Any]]:
    """Return the most frequent confusions with the classes' readable names and the share in percent."""
    words = readable(names)
    return [
        {"true": words[true], "predicted": words[predicted], "images": count, "share": 100 * share}
        for true, predicted, count, share in worst_pairs(confusion)
    ]


def worst_pairs(confusion: Confusion) -> list[tuple[int, int, int, float]]:
    """Return the most frequent confusions as (true, predicted, images, share of the true class)."""
    totals = confusion.true
    return [
        (true, predicted, images, images / totals[true]) for true, predicted, images in confusion.worst(WORST_PAIRS)
    ]


def per_class(names: Sequence[str], confusion: Confusion) -> str:
    """Return a CSV of every class: images, right predictions, recall and precision in percent."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["class", "name", "images", "right", "recall", "precision"])
    rows, columns, right = confusion.true, confusion.predicted, confusion.right
    for index, (name, word) in enumerate(zip(names, readable(names), strict=True)):
        recall = f"{100 * right[index] / rows[index]:.2f}" if rows[index] else ""
        precision = f"{100 * right[index] / columns[index]:.2f}" if columns[index] else ""
        table.writerow([name, word, rows[index], right[index], recall, precision])
    return text.getvalue()
