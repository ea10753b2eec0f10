"""What ``dpn eval -o`` keeps of every image: the answer, and small pictures of the most confident mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from dpn_cli.data.labelled import Labelled
from dpn_cli.report.content import Cell
from dpn_cli.report.tables import as_csv
from dpn_cli.run.files import replace_file, replace_text
from dpn_cli.scoring import Answer
from tasks.classify.calibration import BINS

ANSWERS, MISTAKES = "answers.csv", "mistakes"
COLUMNS = ("row", "image", "true", "predicted", "confidence")
# Mistakes that are kept as pictures, and their longer side in pixels.
MOST_MISTAKES, SIDE = 24, 144


def calibration_error(answers: Sequence[Answer]) -> float:
    """Return the expected calibration error in percent points, by torchmetrics (arXiv 1706.04599).

    Confidence is the probability of the best class; the bins are equally wide.
    """
    from torchmetrics.functional.classification import binary_calibration_error

    right = torch.tensor([answer.label == answer.predicted for answer in answers])
    confidence = torch.tensor([answer.confidence for answer in answers], dtype=torch.float64)
    return 100 * float(binary_calibration_error(confidence, right.int(), n_bins=BINS, norm="l1"))


def most_confident_mistakes(answers: Sequence[Answer]) -> list[Answer]:
    """Return the mistakes with the highest confidence, the surest first."""
    wrong = [answer for answer in answers if answer.label != answer.predicted]
    return sorted(wrong, key=lambda answer: (-answer.confidence, answer.row))[:MOST_MISTAKES]


def write_answers(folder: Path, answers: Sequence[Answer], names: Sequence[str], split: Labelled) -> None:
    """Write every answer to answers.csv, and the most confident mistakes as small pictures to ``mistakes/ROW.jpg``.

    Pictures of an earlier evaluation there are deleted. Raises `SaveError`.
    """
    if (folder / ANSWERS).is_file():
        for path in (folder / MISTAKES).glob("*.jpg"):
            path.unlink()
    rows: list[list[Cell]] = [
        [row, split.where(row), names[label], names[predicted], f"{confidence:.6f}"]
        for row, label, predicted, confidence in answers
    ]
    replace_text(folder / ANSWERS, as_csv([COLUMNS, *rows]))
    for answer in most_confident_mistakes(answers):
        image = Image.fromarray(split.pixels(answer.row))
        image.thumbnail((SIDE, SIDE))

        def save(path: Path, image: Image.Image = image) -> None:
            image.save(path, format="JPEG", quality=85)

        replace_file(folder / MISTAKES / f"{answer.row}.jpg", save)
