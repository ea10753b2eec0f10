"""What a page shows of a classifier's training or evaluation."""

from __future__ import annotations

from dpn_cli.report.content import Cell, Findings, Part, Section, Table
from dpn_cli.report.reading import Json, OpenRun
from dpn_cli.run.sanity import result_warning

WATCHED = {"accuracy": "minival top-1 in %", "minival_loss": "minival loss"}


def findings(run: OpenRun, prefix: str) -> Findings:
    """Return what a page shows of a run of pretrain, highres or distill, or of ``dpn eval``."""
    result = run.result
    if run.recipe and "teacher" in run.recipe:
        return _distilled(run)
    if "top1" not in result:
        return Findings("top-1", {}, [], WATCHED)
    images = result["images"]["val"] if isinstance(result["images"], dict) else result["images"]
    warnings = []
    if floors := result.get("floors"):
        warnings = [result_warning("validation top-1", result["top1"], floors, images)]
    return Findings(
        "top-1",
        {"": {run.seed: result["top1"]}},
        [Section("Scores", _scores(result, images))],
        WATCHED,
        [line for line in warnings if line],
    )


def _scores(result: Json, images: int) -> list[Part]:
    rows: list[list[Cell]] = [
        ["top-1 in %", result["top1"]],
        ["top-5 in %", result["top5"]],
        ["loss", f"{result['loss']:.4g}"],
        ["images scored", images],
        ["classes", result["classes"]],
    ]
    rows += [[f"{name.replace('_', ' ')} in %", value] for name, value in result.get("floors", {}).items()]
    if result.get("minival_top1") is not None:
        rows += [["minival top-1 in %", result["minival_top1"]], ["step that is scored", result["best_step"]]]
    return [Table("Validation images" if "floors" in result else "Scored images", ("", ""), rows, name="scores")]


def _distilled(run: OpenRun) -> Findings:
    result = run.result
    rows: list[list[Cell]] = [
        [key.replace("_", " "), value]
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    sections = (
        [Section("Scores", [Table("Student and teacher", ("", ""), rows, digits=3, name="scores")])] if rows else []
    )
    score = result.get("agreement")
    return Findings("agreement", {} if score is None else {"": {run.seed: score}}, sections)
