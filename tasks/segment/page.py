"""The sections of a segmentation page: mIoU, and the IoU of every class."""

from __future__ import annotations

import csv
from pathlib import Path

from dpn_cli.report.confusions import confusion_chart
from dpn_cli.report.content import (
    BarChart,
    Cell,
    Findings,
    Gallery,
    Legend,
    LineChart,
    PageImage,
    PageSection,
    Part,
    Series,
    Table,
    TextBlock,
)
from dpn_cli.report.reading import RunRecord
from dpn_cli.report.shift_section import shift_sections
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.files import read_object

# Classes of which each has a bar; the IoUs of more are one line.
MOST_BARS = 60
WORST_PAIRS = 10
# An image's files: itself, truth, prediction, errors.
ENDINGS = ("jpg", "truth.png", "predicted.png", "errors.png")
ERROR_NOTE = (
    "Errors: wrong pixels are orange, right ones grey, and those that no label judges white. An image's mIoU is the "
    "mean over the classes in its truth or its prediction."
)
ADVICE = "'dpn segment eval -o' writes it"


def findings(run: RunRecord, prefix: str) -> Findings:
    """Return what a page shows of a run of ``dpn segment``, or of ``dpn segment eval``."""
    result = run.result
    if "miou" not in result:
        return Findings("mIoU", {}, [], {"miou": "mIoU in %"})
    names = {
        "miou": "mIoU in %",
        "pixel_accuracy": "pixel accuracy in %",
        "mean_accuracy": "mean class accuracy in %",
        "mean_precision": "mean precision in %",
        "mdice": "mean Dice in %",
        "mfscore": "mean F score in %",
        "boundary_miou": "mean boundary IoU in %",
        "boundary_mf": "mean boundary F score in %",
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
        PageSection("Scores", [Table("Validation images", ("", ""), rows, name="scores")]),
        *shift_sections(run, prefix),
        PageSection("Classes", _classes(run.path / "per_class.csv", prefix)),
        *_confusions(run.path, prefix),
        *_images(run.path),
    ]
    scores = {"": {run.seed: result["miou"]}}
    return Findings("mIoU", scores, sections, {"miou": "mIoU in %"}, [warning] if warning else [])


def _classes(path: Path, prefix: str) -> list[Part]:
    """Return the chart and the table of all classes, best IoU first."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = list(csv.DictReader(file))
        ious = [(row["name"], float(row["iou"])) for row in read if row["iou"]]
    except (OSError, ValueError, KeyError, csv.Error):
        return [TextBlock("per_class.csv is missing or damaged: the classes' IoU is not known.", warning=True)]
    if not ious:
        return [TextBlock("No class occurs in the scored images.")]
    ious.sort(key=lambda class_iou: -class_iou[1])
    columns = {
        "iou": "IoU in %",
        "recall": "recall in %",
        "precision": "precision in %",
        "dice": "Dice in %",
        "fscore": "F score in %",
        "boundary_iou": "boundary IoU in %",
        "boundary_f": "boundary F in %",
    }
    columns = {key: title for key, title in columns.items() if key in read[0]}  # older files have fewer
    rows: list[list[Cell]] = [
        [row["name"], *(float(row[key]) if row[key] else None for key in columns)]
        for row in sorted(read, key=lambda row: -float(row["iou"] or -1))
    ]
    table = Table("Every class", ("class", *columns.values()), rows, folded=len(rows) > 12)
    names, values = [name for name, _ in ious], [value for _, value in ious]
    title, axis = "IoU by class", "IoU in %"
    if len(ious) <= MOST_BARS:
        return [BarChart(f"{prefix}iou", title, axis, names, {axis: values}), table]
    line = Series(axis, range(1, len(values) + 1), values)
    return [LineChart(f"{prefix}iou", title, "class, best first", axis, [line]), table]


def _confusions(folder: Path, prefix: str) -> list[PageSection]:
    """Return the confusion matrix of pixels, and the pairs of classes that are most often taken for each other."""
    try:
        with (folder / "per_class.csv").open(encoding="utf-8", newline="") as file:
            names = [row["name"] for row in csv.DictReader(file)]
        with (folder / "confusion.csv").open(encoding="utf-8", newline="") as file:
            cells = [tuple(int(row[key]) for key in ("true", "predicted", "pixels")) for row in csv.DictReader(file)]
        counts = [[0] * len(names) for _ in names]
        for true, predicted, pixels in cells:
            counts[true][predicted] = pixels
    except (OSError, ValueError, KeyError, IndexError, csv.Error):
        return [PageSection("Confusions", [TextBlock(f"confusion.csv is missing or damaged; {ADVICE}.")])]
    total = sum(pixels for _, _, pixels in cells) or 1
    confusions = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])[:WORST_PAIRS]
    rows: list[list[Cell]] = [
        [names[true], names[predicted], 100 * pixels / total, 100 * pixels / sum(counts[true])]
        for true, predicted, pixels in confusions
    ]
    columns = ("true", "taken for", "% of all pixels", "% of the true class")
    table = Table("Most frequent confusions", columns, rows)
    return [PageSection("Confusions", [confusion_chart(f"{prefix}confusion", names, counts, "pixels"), table])]


def _images(folder: Path) -> list[PageSection]:
    """Return the best, median and worst images, each in one row with truth, prediction and errors."""
    samples = read_object(folder / "samples.json")
    if samples is None:
        return [PageSection("Images", [TextBlock(f"samples.json is missing or damaged; {ADVICE}.")])]
    parts: list[Part] = []
    for kind in ("best", "median", "worst"):
        images = []
        for sample in samples["images"]:
            files = [folder / "samples" / f"{sample['row']}.{end}" for end in ENDINGS]
            if sample["kind"] == kind and all(file.is_file() for file in files):
                lines = [[f"mIoU {sample['miou']:.1f} %", sample["image"]], ["truth"], ["prediction"], ["errors"]]
                images += [PageImage(file.read_bytes(), caption) for file, caption in zip(files, lines, strict=True)]
        if images:
            parts.append(Gallery(f"The {kind} images", images, across=len(ENDINGS)))
    if not parts:
        return []
    legend = Legend("Classes in these images", samples["colours"])
    return [PageSection("Images", [legend, *parts, TextBlock(ERROR_NOTE)])]
