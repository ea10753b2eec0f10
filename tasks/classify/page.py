"""Page of a classifier's training or evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpn_cli.report.confusions import MOST_DRAWN, MOST_NAMED, confusion_chart
from dpn_cli.report.content import (
    BarChart,
    Cell,
    Findings,
    Gallery,
    LineChart,
    PageImage,
    PageSection,
    Part,
    Series,
    Table,
    TextBlock,
)
from dpn_cli.report.reading import Json, RunRecord
from dpn_cli.report.shift_section import shift_sections
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.statistics import wilson_interval
from tasks.classify.calibration import (
    ClassCalibration,
    ClassScores,
    confusion,
    read_classes,
    read_predictions,
    reliability,
)
from tasks.classify.distill import page as distilled

WATCHED = {"accuracy": "minival top-1 in %", "minival_loss": "minival loss"}
# Rows of the table of the worst classes.
WORST = 25


def findings(run: RunRecord, prefix: str) -> Findings:
    """Return the page's content for a run of pretrain, highres or distill, or of ``dpn eval``."""
    result = run.result
    if run.config and "teacher" in run.config:
        distill_findings = distilled.findings(run)
        scored, damage = _prediction_sections(run, prefix) if result.get("top1") is not None else ([], [])
        return replace(
            distill_findings,
            sections=[*distill_findings.sections, *shift_sections(run, prefix), *scored],
            warnings=damage,
        )
    if "top1" not in result:
        return Findings("top-1", {}, [], WATCHED)
    images = result["images"]["val"] if isinstance(result["images"], dict) else result["images"]
    sections, damage = _prediction_sections(run, prefix)
    warnings: list[str | None] = [*damage]
    if floors := result.get("floors"):
        warnings.append(result_warning("validation top-1", result["top1"], floors, images))
    if overlap := result.get("trained_on"):
        from dpn_cli.data.leakage import Overlap  # loads torch

        warnings.append(Overlap(**overlap).warning())
    sections = [PageSection("Scores", _scores(result, images)), *shift_sections(run, prefix), *sections]
    scores = {"": {run.seed: result["top1"]}}
    return Findings("top-1", scores, sections, WATCHED, [line for line in warnings if line])


def _scores(result: Json, images: int) -> list[Part]:
    rows: list[list[Cell]] = [
        ["top-1 in %", result["top1"]],
        ["95 % interval of top-1", " … ".join(f"{end:.1f}" for end in wilson_interval(result["top1"], images))],
        ["top-5 in %", result["top5"]],
        ["loss", f"{result['loss']:.4g}"],
        ["images scored", images],
        ["classes", result["classes"]],
    ]
    rows += [[f"{name.replace('_', ' ')} in %", value] for name, value in result.get("floors", {}).items()]
    if result.get("minival_top1") is not None:
        rows += [["minival top-1 in %", result["minival_top1"]], ["step that is scored", result["best_step"]]]
    if "real" in result:
        rows.append([f"ReaL top-1 in %, {result['real']['images']} images", result["real"]["top1"]])
    if "ece" in result:
        rows.append(["expected calibration error in points", result["ece"]])
    return [Table("Validation images" if "floors" in result else "Scored images", ("", ""), rows, name="scores")]


def _prediction_sections(run: RunRecord, prefix: str) -> tuple[list[PageSection], list[str]]:
    """Return calibration, classes, confusions and mistakes of the saved predictions, and warnings.

    Raises `DataError` when the saved files are damaged.
    """
    folder = run.path / Path(run.result.get("weights", "")).parent  # of a search, its last training
    if missing := next((name for name in ("predictions.csv", "per_class.csv") if not (folder / name).is_file()), None):
        message = f"{missing} is missing: calibration, confusions and mistakes are unknown. 'dpn eval -o' writes it."
        return [PageSection("Predictions", [TextBlock(message, warning=run.kind == "eval")])], []
    classes = read_classes(folder / "per_class.csv", run.result["classes"])
    names = {scores.name: scores.readable for scores in classes}
    predictions = read_predictions(folder / "predictions.csv", names)
    image_count, warnings = sum(scores.images for scores in classes), []
    if len(predictions) != image_count:
        warnings = [
            f"predictions.csv is damaged: it has {len(predictions)} predictions, and {image_count} images were scored. "
            "Calibration, confusions and mistakes are of these predictions alone."
        ]
    sections = [
        PageSection("Calibration", [reliability(predictions, f"{prefix}reliability")]),
        PageSection("Classes", _classes(classes, f"{prefix}classes")),
        PageSection("Confusions", _confusions(run.result, predictions, names, f"{prefix}confusion")),
    ]
    if images := _mistakes(folder / "mistakes", predictions, names):
        sections.append(PageSection("Most confident mistakes", [Gallery("Wrong and sure of it", images)]))
    return sections, warnings


def _classes(classes: Sequence[ClassCalibration], name: str) -> list[Part]:
    """Return the accuracy of every class, best first, and a table of the worst ones."""
    recalls = {scores: scores.recall for scores in classes if scores.recall is not None}
    ranked = sorted(((scores.readable, recall) for scores, recall in recalls.items()), key=lambda scores: -scores[1])
    axis, values = "accuracy in %", [value for _, value in ranked]
    chart = (
        BarChart(name, "Accuracy by class", axis, [word for word, _ in ranked], {axis: values})
        if len(ranked) <= MOST_NAMED
        else LineChart(
            name, "Accuracy by class", "class, best first", axis, [Series(axis, range(1, len(ranked) + 1), values)]
        )
    )
    worst = sorted(recalls, key=lambda scores: recalls[scores])[:WORST]
    rows: list[list[Cell]] = [
        [scores.readable, scores.images, scores.right, scores.recall, scores.precision] for scores in worst
    ]
    title = (
        "Every class, worst first" if len(worst) == len(ranked) else f"The {len(worst)} worst of {len(ranked)} classes"
    )
    columns = ("class", "images", "right", "accuracy (recall) in %", "precision in %")
    return [chart, Table(title, columns, rows, folded=True)]


def _confusions(result: Json, predictions: Sequence[ClassScores], names: dict[str, str], name: str) -> list[Part]:
    rows: list[list[Cell]] = [
        [pair["true"], pair["predicted"], pair["images"], pair["share"]] for pair in result["worst_pairs"]
    ]
    columns = ("true", "taken for", "images", "% of the true class")
    table = Table("Most frequent confusions", columns, rows, digits=1, name="confusions")
    if len(names) > MOST_DRAWN:
        return [TextBlock(f"A matrix of {len(names)} classes is too large to be drawn."), table]
    return [confusion_chart(name, list(names.values()), confusion(predictions, list(names)), "images"), table]


def _mistakes(folder: Path, predictions: Sequence[ClassScores], names: dict[str, str]) -> list[PageImage]:
    """Return the saved images of mistakes, the most confident first."""
    mistakes = [prediction for prediction in predictions if prediction.true != prediction.predicted]
    images = []
    for prediction in sorted(mistakes, key=lambda prediction: (-prediction.confidence, prediction.row)):
        path = folder / f"{prediction.row}.jpg"
        if path.is_file():
            caption = f"{names[prediction.predicted]} ({prediction.confidence:.1%})"
            lines = [f"is {names[prediction.true]}", f"taken for {caption}", prediction.image]
            images.append(PageImage(path.read_bytes(), lines))
    return images
