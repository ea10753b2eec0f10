"""Accuracy of a classifier under shifts of the data, and its error relative to a baseline (mCE of ImageNet-C)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from dpn_cli.config.shift_options import IMAGENET_C, SHIFTS, ShiftOptions
from dpn_cli.data.shifts import ShiftedImages
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.report.content import Rows
from dpn_cli.report.tables import as_csv
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run.files import replace_file, replace_text
from tasks.classify.classifier import Classifier, resize_for

# File of the scores, and its columns.
SHIFTS_FILE = "shifts.csv"
COLUMNS = ("network", "shift", "kind", "severity", "top1")
# The row of unshifted images, and the folder of an image under every shift.
CLEAN, EXAMPLES = "clean", "shifts"
Json = dict[str, Any]
# Scores a split with the classifier of a name: the percentage of right images.
Top1 = Callable[[str, LabelledImages], float]


def score_shifts(
    classifiers: Mapping[str, Classifier], split: LabelledImages, options: ShiftOptions, top1: Top1
) -> Json:
    """Score classifiers, by name, on the same shifted images.

    All read images of the same size: reduced to the shorter side of the first one, before its crop. Returns the
    percentages of right images: ``clean``, ``scores`` by shift in the order of ``severities``, ``means``, and for a
    second classifier ``mce``, the errors of the first one relative to it.
    """
    side = shift_side(next(iter(classifiers.values())))
    networks: dict[str, Json] = {}
    for name in classifiers:
        scores = {
            shift: [
                top1(name, ShiftedImages(split, shift, severity, side, options.seed)) for severity in options.severities
            ]
            for shift in options.names
        }
        clean = top1(name, ShiftedImages(split, options.names[0], 0, side, options.seed))
        networks[name] = {
            "clean": clean,
            "scores": scores,
            "means": {shift: fmean(row) for shift, row in scores.items()},
        }
    first, *others = networks.values()
    return {
        "side": side,
        "seed": options.seed,
        "severities": list(options.severities),
        "networks": networks,
        "mce": relative_errors(first["scores"], others[0]["scores"]) if others else None,
    }


def shift_side(classifier: Classifier) -> int:
    """Return the shorter side in pixels to which images are reduced before a shift: what the classifier crops from."""
    return classifier.resize_side or resize_for(classifier.model.config.image_size)


def relative_errors(scores: Mapping[str, list[float]], baseline: Mapping[str, list[float]]) -> Json:
    """Return the corruption errors of ImageNet-C in percent, by shift, and their mean (``mce``).

    A corruption error is the sum of the errors over severities, divided by that of the baseline (arXiv 1903.12261,
    section 4.2). The mean is over ImageNet-C's corruptions alone, None without any; an error is None where the
    baseline has none.
    """
    errors = {
        name: 100 * sum(100 - top1 for top1 in row) / total
        if (total := sum(100 - top1 for top1 in baseline[name]))
        else None
        for name, row in scores.items()
    }
    corruptions = [error for name, error in errors.items() if name in IMAGENET_C and error is not None]
    return {"errors": errors, "mce": fmean(corruptions) if corruptions else None}


def save_shifts(folder: Path, shifts: Json, split: LabelledImages, row: int) -> None:
    """Write the scores as CSV, one row per network, shift and severity, and an image under every shift for a page.

    The image is that of `row`, at the highest severity. Images of an earlier evaluation are deleted. Raises
    `SaveError`.
    """
    rows: Rows = [list(COLUMNS)]
    for network, result in shifts["networks"].items():
        rows.append([network, CLEAN, "", 0, result["clean"]])
        rows += [
            [network, shift, SHIFTS[shift], severity, top1]
            for shift, scores in result["scores"].items()
            for severity, top1 in zip(shifts["severities"], scores, strict=True)
        ]
    replace_text(folder / SHIFTS_FILE, as_csv(rows))
    for path in (folder / EXAMPLES).glob("*.jpg"):
        path.unlink()
    names = list(next(iter(shifts["networks"].values()))["scores"])
    for name, severity in {CLEAN: 0, **dict.fromkeys(names, shifts["severities"][-1])}.items():
        shifted = ShiftedImages(split, name if severity else names[0], severity, shifts["side"], shifts["seed"])
        image = thumbnail(shifted.pixels(row))
        replace_file(folder / EXAMPLES / f"{name}.jpg", partial(Path.write_bytes, data=image))


def describe_shifts(shifts: Json) -> list[str]:
    """Return the scores as lines of text: a table for each network, and the relative errors."""
    severities, lines = shifts["severities"], []
    for network, result in shifts["networks"].items():
        lines.append(f"{network}: top-1 in % under shifts, by severity (clean {result['clean']:.2f})")
        header = "".join(f"{severity:>8}" for severity in severities)
        lines.append(f"  {'shift':<18}{header}{'mean':>8}")
        for shift, row in result["scores"].items():
            values = "".join(f"{top1:8.2f}" for top1 in row)
            lines.append(f"  {shift:<18}{values}{result['means'][shift]:8.2f}")
    if shifts["mce"]:
        mce = shifts["mce"]["mce"]
        errors = ", ".join(
            f"{name} {error:.1f}" for name, error in shifts["mce"]["errors"].items() if error is not None
        )
        lines.append(
            f"errors relative to the baseline in %: {errors}" + (f"; mCE {mce:.1f}" if mce is not None else "")
        )
    return lines
