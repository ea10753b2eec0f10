"""Samples of scored images for a page: classes, confusions, and thumbnails of the best, median and worst images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dpn_cli.config.schema import Runtime
from dpn_cli.report.content import Rows
from dpn_cli.report.tables import as_csv
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run.distributed import World
from dpn_cli.run.files import replace_file, replace_json, replace_text
from dpn_cli.run.precision import autocast
from tasks.segment.artifact import Segmenter
from tasks.segment.config import Evaluation
from tasks.segment.iou import ImageScore, SegmentScores, predict_row
from tasks.segment.labels import IGNORE, Labels
from tasks.segment.pairs import Pairs
from tasks.segment.palette import Class

SAMPLES, FOLDER, CONFUSION = "samples.json", "samples", "confusion.csv"
# Images of each kind, and the longer side of their images in pixels.
PER_KIND, SIDE = 3, 176
# Colours of an error map: right, wrong, ignored.
ERRORS = ((216, 221, 227), (213, 94, 0), (255, 255, 255))
Palette = Sequence[tuple[int, int, int]]


def save_samples(
    folder: Path,
    segmenter: Segmenter,
    pairs: Pairs,
    scores: SegmentScores,
    evaluation: Evaluation,
    runtime: Runtime,
    world: World,
) -> None:
    """Write what a page shows of a scored split to a folder; for the leading rank.

    ``per_class.csv`` and ``confusion.csv`` hold the classes, ``per_image.csv`` the mIoU of every image,
    ``samples.json`` and ``samples/`` the best, median and worst images, which go through the network once more. Raises
    `SaveError`.
    """
    replace_text(folder / "per_class.csv", scores.per_class(segmenter.classes))
    replace_text(folder / CONFUSION, as_csv(_confusions(segmenter.classes, scores)))
    rows: Rows = [["row", "image", "miou"]]
    rows += [[score.row, pairs.locate(score.row), score.miou] for score in scores.per_image]
    replace_text(folder / "per_image.csv", as_csv(rows))
    if (folder / SAMPLES).is_file():
        for path in (folder / FOLDER).glob("*.*"):
            path.unlink()
    labels, entries = set[int](), []
    with autocast(runtime, world.device, segmenter.network):
        for kind, scores_of_kind in select_extremes(scores.per_image).items():
            for score in scores_of_kind:
                labels |= _draw(folder / FOLDER, segmenter, pairs, score.row, evaluation, world.device)
                entries.append({"kind": kind, "row": score.row, "image": pairs.locate(score.row), "miou": score.miou})
    classes_shown = [segmenter.classes[label] for label in sorted(labels)]
    colours = [[score.name, f"#{bytes(score.color).hex()}"] for score in classes_shown]
    replace_json(folder / SAMPLES, {"images": entries, "colours": colours})


def select_extremes(scores: Sequence[ImageScore]) -> dict[str, list[ImageScore]]:
    """Return the best, median and worst images, the best first; an image is in one of the three."""
    order = sorted(scores, key=lambda score: (-score.miou, score.row))
    count = max(1, min(PER_KIND, len(order) // 3))
    best, remaining = order[:count], order[count:]
    middle, worst = remaining[:-count], remaining[-count:]
    start = max(0, (len(middle) - count) // 2)
    return {"best": best, "median": middle[start : start + count], "worst": worst}


def _confusions(classes: Sequence[Class], scores: SegmentScores) -> Rows:
    """Return the counts of pixels that are not zero, with a header; classes by their numbers."""
    rows: Rows = [["true", "predicted", "pixels"]]
    return rows + [[*cell, int(scores.confusion[tuple(cell)])] for cell in scores.confusion.nonzero().tolist()]


def _draw(
    folder: Path, segmenter: Segmenter, pairs: Pairs, row: int, evaluation: Evaluation, device: torch.device
) -> set[int]:
    """Write an image with truth, prediction and errors as small images; return the labels in them."""
    plan = segmenter.plan(evaluation)
    predicted, truth = (
        labels.cpu().numpy() for labels in predict_row(segmenter.network, pairs, row, segmenter.rule, plan, device)
    )
    colours = [label_class.color for label_class in segmenter.classes]
    errors = np.where(truth == IGNORE, 2, predicted != truth).astype(np.uint8)
    for name, labels, palette in (
        ("truth", truth, colours),
        ("predicted", predicted, colours),
        ("errors", errors, ERRORS),
    ):
        image = _colour_labels(labels, palette)
        replace_file(folder / f"{row}.{name}.png", partial(image.save, format="PNG", optimize=True))
    small = thumbnail(pairs.load(row)[0], SIDE)
    replace_file(folder / f"{row}.jpg", partial(Path.write_bytes, data=small))
    return {*np.unique(truth).tolist(), *np.unique(predicted).tolist()} - {IGNORE}


def _colour_labels(labels: Labels, palette: Palette) -> Image.Image:
    """Return labels (h, w) as a small image with a palette; ignored pixels are white."""
    image = Image.fromarray(labels)
    values = [value for colour in palette for value in colour]
    image.putpalette(values + [255] * (768 - len(values)))
    scale = min(1.0, SIDE / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.NEAREST)
