"""Predictions and classes that an evaluation saved: reading them, their reliability and confusion."""

from __future__ import annotations

import csv
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpn_cli.errors import DataError
from dpn_cli.report.content import Reliability

ADVICE = "'dpn eval -o' scores again, for a page of its folder; once the file is deleted, this page goes without it"
# Bins of the expected calibration error, as in arXiv 1706.04599.
BINS = 15


@dataclass(frozen=True)
class ClassScores:
    """One line of predictions.csv."""

    row: int
    image: str
    true: str
    predicted: str
    confidence: float


@dataclass(frozen=True)
class ClassCalibration:
    """One line of per_class.csv: recall and precision in percent, None where they are not defined."""

    name: str
    readable: str
    images: int
    right: int
    recall: float | None
    precision: float | None


def read_predictions(path: Path, names: Container[str]) -> list[ClassScores]:
    """Read predictions.csv, whose classes are `names`. Raises `DataError` naming the line that is damaged."""
    predictions = []
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        try:
            for line in lines:
                class_scores = ClassScores(
                    int(line["row"]), line["image"], line["true"], line["predicted"], float(line["confidence"])
                )
                if not 0 <= class_scores.confidence <= 1:
                    raise ValueError(f"confidence {class_scores.confidence}")
                if unknown := [name for name in (class_scores.true, class_scores.predicted) if name not in names]:
                    raise ValueError(f"class {unknown[0]!r}, which per_class.csv lacks")
                predictions.append(class_scores)
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise DataError(
                f"{path}, line {lines.line_num}: damaged ({type(error).__name__}: {error}); {ADVICE}"
            ) from error
    return predictions


def read_classes(path: Path, count: int) -> list[ClassCalibration]:
    """Read per_class.csv, which has `count` classes. Raises `DataError` when it is damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            classes = [
                ClassCalibration(
                    line["class"],
                    line["name"],
                    int(line["images"]),
                    int(line["right"]),
                    *(float(line[key]) if line[key] else None for key in ("recall", "precision")),
                )
                for line in csv.DictReader(file)
            ]
        if len(classes) != count:
            raise ValueError(f"{len(classes)} classes, and the network has {count}")
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error}); {ADVICE}") from error
    return classes


def reliability(predictions: Sequence[ClassScores], name: str) -> Reliability:
    """Return accuracy and mean confidence in bins of equal width."""
    edges = np.linspace(0, 1, BINS + 1)
    sure = np.array([prediction.confidence for prediction in predictions])
    right = np.array([prediction.true == prediction.predicted for prediction in predictions], dtype=float)
    bins = np.clip(np.searchsorted(edges, sure, side="right") - 1, 0, BINS - 1)
    images = np.bincount(bins, minlength=BINS)

    def mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float | None]:
        sums = np.bincount(bins, weights=values, minlength=BINS)
        return [float(total / count) if count else None for total, count in zip(sums, images, strict=True)]

    return Reliability(
        name,
        "Reliability",
        edges.tolist(),
        images.tolist(),
        mean(sure),
        mean(right),
        caption="Images by the probability of their best class: a bar below the dashed line is a network that is surer "
        "than it is right.",
    )


def confusion(predictions: Sequence[ClassScores], classes: Sequence[str]) -> list[list[int]]:
    """Return counts (classes, classes); rows are true classes."""
    index_of = {name: index for index, name in enumerate(classes)}
    pairs = np.array(
        [(index_of[prediction.true], index_of[prediction.predicted]) for prediction in predictions]
    ).reshape(-1, 2)
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    rows: list[list[int]] = counts.tolist()
    return rows
