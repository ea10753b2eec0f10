"""`dpn runs`: which runs there are, and what is known of one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.commands.command import DefaultGroup, Outcome, register_command
from dpn_cli.config.option import argument
from dpn_cli.config.schema import Section
from dpn_cli.errors import DataError
from dpn_cli.report.overview import command
from dpn_cli.report.reading import DEPTH, RunRecord, find_runs, folder_of, hours, moment, read_run
from dpn_cli.run.artifact_kinds import NAMES
from dpn_cli.run.console import Console, cell, print_columns, printable, width_of, wrap_name
from dpn_cli.sweep.score_names import SCORES, score_name, score_value

# The key of a result that is its score in percent, and what to call it; the first that a result has.
METRICS = {**SCORES, "mean19": "mean of 19", "mean_groups": "mean of groups"}

# The fewest characters in which a command can be read.
LEAST_COMMAND = 24


class ListOptions(Section):
    """Options of ``dpn runs``."""

    folder: Annotated[Path, argument("Folder to search for runs.")] = Path("runs")


class ShowOptions(Section):
    """Options of ``dpn runs show``."""

    run: Annotated[Path, argument("A run's folder.")]


class _ListByDefault(DefaultGroup):
    default = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["list"])


app = typer.Typer(
    cls=_ListByDefault,
    epilog="Example: dpn runs runs/highres",
)


def describe_run(run: RunRecord) -> dict[str, Any]:
    """Return what a list says of a run: metric and value in percent are None where there is none yet."""
    metric, value = score_of(run)
    updated = moment(run, "updated")
    return {
        "run": str(run.path),
        "kind": run.kind,
        "status": run.status,
        "metric": metric,
        "value": value,
        "step": max((record["step"] for record in run.records), default=None),
        "steps": (run.config or {}).get("schedule", {}).get("steps"),
        "age_seconds": None if updated is None else round((datetime.now(UTC) - updated).total_seconds()),
        "command": command(run),
    }


def score_of(run: RunRecord) -> tuple[str | None, float | None]:
    """Return the name and the value in percent of a run's score; of a comparison, that of its last network."""
    result = run.result
    if run.kind == "comparison" and result.get("compare"):
        name, network = list(result["compare"]["networks"].items())[-1]
        summary = network[result["score"]]
        return f"{score_name(result['score'])}, {name}", summary and summary["mean"]
    for key, metric in METRICS.items():
        if (value := score_value(result, key)) is not None:
            return metric, value
    test_means = [
        task_result["test"]["mean"] for task_result in result.get("tasks", {}).values() if task_result["test"]
    ]
    return ("mean of its tasks", fmean(test_means)) if test_means else (None, None)


def age(seconds: float | None) -> str:
    """Return a duration in its largest unit: 45 s, 12 min, 3 h, 5 d."""
    if seconds is None:
        return "-"
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _print_list(rows: list[dict[str, Any]]) -> None:
    """Print the list with whole names: where there is no room, without commands, and with names folded at slashes."""
    columns: dict[str, list[str]] = {name: [] for name in ("run", "status", "score", "step", "age", "command")}
    for row in rows:
        score = "-" if row["value"] is None else f"{row['value']:.2f} % {row['metric']}"
        step = "-" if row["step"] is None else f"{row['step']}" + (f"/{row['steps']}" if row["steps"] else "")
        texts = (row["run"], row["status"], score, step, age(row["age_seconds"]), row["command"])
        for column, text in zip(columns.values(), texts, strict=True):
            column.append(printable(text))
    commands, width = columns.pop("command"), RichConsole().width
    room = width - width_of(columns)
    if room >= LEAST_COMMAND:
        columns["command"] = [wrap_name(text, " ", room) for text in commands]
    elif room < 0:
        columns["score"] = [text.replace(", ", ",\n", 1) for text in columns["score"]]
        longest = max(map(len, columns["run"])) + width - width_of(columns)
        columns["run"] = [wrap_name(text, "/", longest) for text in columns["run"]]
    print_columns(columns, right=("score", "step", "age"))


def _print_run(row: dict[str, Any]) -> None:
    table = Table("", Column("", overflow="fold"), box=None, padding=(0, 2, 0, 0), show_header=False)
    for key, value in row.items():
        if isinstance(value, list):
            for line in value:
                table.add_row(key.rstrip("s"), cell(line))
        elif value is not None:
            table.add_row(key.replace("_", " "), cell(f"{value:.4g}" if isinstance(value, float) else value))
    RichConsole(highlight=False).print(table)


@register_command(app, "list", ListOptions, "dpn runs list runs/highres", quiet=False)
def _list(options: ListOptions, console: Console) -> Outcome:
    """List runs below a folder: status, score, step, age, command (the default)."""
    descriptions = [describe_run(read_run(path)) for path in find_runs(folder_of(options.folder))]
    if not descriptions:
        raise DataError(f"{options.folder}: no runs in it or in the {DEPTH} levels below it; name another folder")
    return descriptions, _print_list


@register_command(app, "show", ShowOptions, "dpn runs show runs/highres/B-32-dpn", quiet=False)
def _show(options: ShowOptions, console: Console) -> Outcome:
    """Show a run: command, network, data, versions, score, and missing or damaged files."""
    run = read_run(options.run)
    facts, backbone = run.facts, run.facts.get("backbone", {})
    row = {
        **describe_run(run),
        "kind": NAMES[run.kind][0] if run.kind in NAMES else run.kind,
        "started": facts.get("started"),
        "updated": facts.get("updated"),
        "hours": hours(run),
        "device": facts.get("device"),
        "network": backbone.get("network"),
        "weights": backbone.get("source"),
        "data": str(facts["data"]) if facts.get("data") else None,
        "versions": ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items()) or None,
        "git": facts.get("git"),
        "differs_from_paper": run.result.get("differs_from_paper") or None,
        "notes": list(run.notes),
    }
    return row, _print_run
