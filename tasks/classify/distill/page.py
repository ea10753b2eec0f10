"""Page of a distillation: agreement of the student with its teacher, stage by stage."""

from __future__ import annotations

from dpn_cli.report.content import Cell, Findings, PageSection, Table
from dpn_cli.report.reading import RunRecord

WATCHED = {
    "agreement": "agreement with the teacher in %",
    "kl": "KL from the teacher in nats",
    "token_variance": "share of the tokens' variance explained",
}
STAGES = {"start": "before the first step", "stem": "after the stem's stage", "all": "after the last step"}


def findings(run: RunRecord) -> Findings:
    """Return the page's content for a run of ``dpn distill``; its score is the agreement in percent."""
    result = run.result
    if "stages" not in result:
        return Findings("agreement", {}, [], WATCHED)
    rows: list[list[Cell]] = []
    for stage, stage_result in result["stages"].items():
        numbers = [stage_result.get(key) for key in ("agreement", "kl", "token_variance", "top1")]
        kl, share = (None if value is None else f"{value:.4g}" for value in numbers[1:3])
        rows.append([STAGES[stage], numbers[0], kl, share, numbers[3]])
    rows.append([f"the teacher, {result['teacher']['arch']}", None, None, None, result["teacher_top1"]])
    columns = ("", "agreement in %", "KL in nats", "tokens' variance explained", "top-1 in %")
    filled = [column for column in range(len(columns)) if not column or any(row[column] is not None for row in rows)]
    images = result["images"]
    table = Table(
        "Student and teacher",
        [columns[column] for column in filled],
        [[row[column] for column in filled] for row in rows],
        note=f"Compared on {images['held_out']} held-out images"
        + (f"; top-1 is of {images['val']} labelled images." if result["top1"] is not None else "."),
        name="scores",
    )
    score = result["agreement"]
    scores = {} if score is None else {"": {run.seed: score}}
    return Findings("agreement", scores, [PageSection("Scores", [table])], WATCHED)
