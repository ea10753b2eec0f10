"""What a page shows of segmentation: mIoU, and the IoU of every class."""

from __future__ import annotations

import csv
from pathlib import Path

from dpn_cli.report.content import Bars, Cell, Findings, Lines, Part, Section, Series, Table, Text
from dpn_cli.report.reading import OpenRun
from dpn_cli.run.sanity import result_warning

# Classes of which each has a bar; the IoUs of more are one line.
MOST_BARS = 60


def findings(run: OpenRun, prefix: str) -> Findings:
    """Return what a page shows of a run of ``dpn segment``, or of ``dpn segment eval``."""
    result = run.result
    if "miou" not in result:
        return Findings("mIoU", {}, [], {"miou": "mIoU in %"})
    names = {
        "miou": "mIoU in %",
        "pixel_accuracy": "pixel accuracy in %",
        "mean_accuracy": "mean class accuracy in %",
        "majority_miou": "mIoU of calling every pixel the most frequent class, in %",
    }
    rows: list[list[Cell]] = [[name, float(result[key])] for key, name in names.items() if key in result]
    rows += [[f"{names[key]}, at the other size", value] for key, value in result.get("resized", {}).items()]
    counts = {"images": "images scored", "train_images": "images trained on", "passes": "passes over them"}
    rows += [[name, result[key]] for key, name in counts.items() if key in result]
    warning = None
    if "majority_miou" in result:
        floor = {"calling every pixel the most frequent class": result["majority_miou"]}
        warning = result_warning("validation mIoU", result["miou"], floor)
    sections = [
        Section("Scores", [Table("Validation images", ("", ""), rows, name="scores")]),
        Section("Classes", _classes(run.path / "per_class.csv", prefix)),
    ]
    scores = {"": {run.seed: result["miou"]}}
    return Findings("mIoU", scores, sections, {"miou": "mIoU in %"}, [warning] if warning else [])


def _classes(path: Path, prefix: str) -> list[Part]:
    """Return the chart and the table of all classes, best IoU first."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = list(csv.DictReader(file))
        found = [(row["name"], float(row["iou"])) for row in read if row["iou"]]
    except (OSError, ValueError, KeyError, csv.Error):
        return [Text("per_class.csv is missing or damaged: the classes' IoU is not known.", warning=True)]
    if not found:
        return [Text("No class occurs in the scored images.")]
    found.sort(key=lambda one: -one[1])
    rows: list[list[Cell]] = [
        [row["name"], *(float(row[key]) if row[key] else None for key in ("iou", "recall", "precision"))]
        for row in sorted(read, key=lambda row: -float(row["iou"] or -1))
    ]
    columns = ("class", "IoU in %", "recall in %", "precision in %")
    table = Table("Every class", columns, rows, folded=len(rows) > 12)
    names, values = [name for name, _ in found], [value for _, value in found]
    title, axis = "IoU by class", "IoU in %"
    if len(found) <= MOST_BARS:
        return [Bars(f"{prefix}iou", title, axis, names, {axis: values}), table]
    line = Series(axis, range(1, len(values) + 1), values)
    return [Lines(f"{prefix}iou", title, "class, best first", axis, [line]), table]
