"""Page of a VTAB sweep: its tables compared with the paper's, every trial, and the uses of the test split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from dpn_cli.report.content import (
    BarChart,
    Cell,
    Chart,
    Findings,
    HeatMap,
    LineChart,
    PageSection,
    Panel,
    Part,
    Table,
    TextBlock,
)
from dpn_cli.report.reading import Json, RunRecord
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.records import read_records
from dpn_cli.statistics import as_text
from dpn_cli.sweep.grid import folders_of
from tasks.vtab.tasks import GROUPS, PAPER_COLUMNS, TASKS

NOTE = "Test accuracy in %: mean ± standard error over n seeds, with the 95 % t-interval, clipped to 0 … 100."


def findings(run: RunRecord, prefix: str) -> Findings:
    """Return what a page shows of a run of ``dpn finetune vtab``; the scores are those of its last network."""
    result = run.result
    ledger = PageSection("Ledger of the test split", _ledger(run))
    if "tasks" not in result:
        return Findings("test accuracy", {}, [ledger])
    networks: dict[str, Json] = result.get("compare", {}).get("stems") or {result["stem"]: result}
    sections, warnings = [], []
    if result["demo"]:
        warnings.append(result["note"])
    folders = folders_of(list(networks))
    for number, (name, part) in enumerate(networks.items(), 1):
        warnings += [f"failed: {line}" for line in part["failed"]]
        edges = [
            f"{task} ({task_result['edge']})" for task, task_result in part["tasks"].items() if task_result["edge"]
        ]
        if edges:
            warnings.append(
                f"{name}: the chosen learning rate is at the edge of the grid for {', '.join(edges)}: a better one may "
                "lie beyond (--lrs)."
            )
        warnings += _list_not_learnt(name, part)
        charts: list[Part] = [_cells(result, part, f"{prefix}network{number}_cells")]
        charts += _losses(run, folders[name], part, f"{prefix}network{number}_loss")
        sections.append(PageSection(f"Network {name}", [_tasks(result, name, part), *charts]))
    bars = _bars(result, networks, prefix)
    differences = [_differences(one) for one in result.get("compare", {}).get("differences", [])]
    scores = {
        task: dict(zip(result["seeds"], task_result["test"]["values"], strict=True))
        for task, task_result in networks[result["stem"]]["tasks"].items()
        if task_result["test"]
    }
    first = PageSection("Groups of tasks", [*differences, *bars])
    return Findings("test accuracy", scores, [first, *sections, ledger], warnings=warnings)


def _list_not_learnt(network: str, part: Json) -> list[str]:
    lines = []
    for task, one in part["tasks"].items():
        if one["test"]:
            floor = {"chance": one["chance"]}
            lines.append(
                result_warning(f"{task} {network}: test top-1", one["test"]["mean"], floor, one["test_images"])
            )
    return [line for line in lines if line]


def paper_of(result: Json, network: str) -> Mapping[str, float]:
    """Return Table 3's accuracies by task; nothing for demos and for networks that are not in it."""
    column = (result["arch"], network)
    if result["demo"] or column not in PAPER_COLUMNS:
        return {}
    return {task.name: task.paper[PAPER_COLUMNS.index(column)] for task in TASKS}


def _tasks(result: Json, network: str, part: Json) -> Table:
    paper = paper_of(result, network)
    rows: list[list[Cell]] = []
    bold_rows = []

    def add(name: str, score: Json | None, *middle: Cell) -> None:
        rows.append([name, *middle, *_format_score(score)])

    for group in GROUPS:
        members = {task: entry for task, entry in part["tasks"].items() if entry["group"] == group}
        for task, entry in members.items():
            chosen = [v for v in entry["val"].get(f"{entry['lr']:g}", ()) if v is not None] if entry["lr"] else []
            lr = f"{entry['lr']:g}" if entry["lr"] else None
            add(task, entry["test"], lr, fmean(chosen) if chosen else None)
            rows[-1] += [paper.get(task), entry["chance"]]
        if members:
            bold_rows.append(len(rows))
            add(group, part["groups"][group], None, None)
            paper_scores = [paper[task] for task in members if task in paper]
            rows[-1] += [fmean(paper_scores) if len(paper_scores) == len(members) else None, None]
    for name, words in (("mean19", "mean of 19 tasks"), ("mean_groups", "mean of the groups")):
        if part[f"{name}_over_seeds"]:
            bold_rows.append(len(rows))
            add(words, part[f"{name}_over_seeds"], None, None)
            rows[-1] += [_paper_mean(paper, name), None]
    columns = ["task", "lr", "val200", "test", "95 %", "n", "paper", "chance"]
    if not paper:
        rows, columns = [[*row[:6], row[7]] for row in rows], [*columns[:6], columns[7]]
    title = f"{result['arch']} {network}, protocol {result['protocol']}"
    return Table(title, columns, rows, note=NOTE, strong=frozenset(bold_rows), name="tasks", digits=1)


def _paper_mean(paper: Mapping[str, float], name: str) -> float | None:
    if not paper:
        return None
    if name == "mean19":
        return fmean(paper.values())
    return fmean(fmean(paper[task.name] for task in TASKS if task.group == group) for group in GROUPS)


def _format_score(score: Json | None) -> tuple[Cell, Cell, Cell]:
    if score is None:
        return None, None, None
    return *as_text(score, digits=1), score["n"]


def _differences(difference: Json) -> Table:
    rows: list[list[Cell]] = [[task, *_format_score(score)] for task, score in difference["tasks"].items()]
    rows.append(["over tasks", *_format_score(difference["over_tasks"])])
    return Table(
        f"{difference['stem']} minus {difference['minus']}",
        ("task", "difference", "95 %", "n"),
        rows,
        note="Points of test accuracy, in pairs by seed; over tasks, the mean of the tasks' means.",
        strong=frozenset({len(rows) - 1}),
        name="vtab-differences",
    )


def _bars(result: Json, networks: Mapping[str, Json], prefix: str) -> list[Chart]:
    """Return the bars of the groups and of the tasks, each network next to its result in the paper."""
    charts: list[Chart] = []
    tasks = networks[result["stem"]]["tasks"]
    members = {group: [task for task, category in tasks.items() if category["group"] == group] for group in GROUPS}
    groups = [group for group in GROUPS if members[group]]
    for name, title, categories in (
        ("groups", "Mean test accuracy by group", groups),
        ("tasks", "Test accuracy by task", [task for group in groups for task in members[group]]),
    ):
        series: dict[str, Sequence[float | None]] = {}
        errors: dict[str, Sequence[float | None]] = {}
        paired_with: dict[str, str] = {}
        for network, part in networks.items():
            values = [
                part["groups"][category] if name == "groups" else part["tasks"][category]["test"]
                for category in categories
            ]
            series[network] = [summary and summary["mean"] for summary in values]
            errors[network] = [summary and summary["stderr"] for summary in values]
            if paper := paper_of(result, network):
                paired_with[f"{network}, paper"] = network
                series[f"{network}, paper"] = [
                    fmean(paper[task] for task in (members[category] if name == "groups" else [category]))
                    for category in categories
                ]
        caption = "Thin lines: standard error over seeds." if len(result["seeds"]) > 1 else ""
        axis = "test accuracy in %"
        charts.append(
            BarChart(f"{prefix}{name}", title, axis, categories, series, errors, paired_with, caption=caption)
        )
    return charts


def _cells(result: Json, part: Json, name: str) -> HeatMap:
    seeds = [str(seed) for seed in result["seeds"]]
    panels = [
        Panel(
            task,
            list(entry["val"]),
            seeds,
            list(entry["val"].values()),
            frozenset(index for index, lr in enumerate(entry["val"]) if entry["lr"] and lr == f"{entry['lr']:g}"),
        )
        for task, entry in part["tasks"].items()
    ]
    return HeatMap(
        name,
        "Every cell: accuracy on val200 in %",
        "learning rate",
        "seed",
        "val200 in %",
        panels,
        caption="The chosen learning rate, that of the best mean over the seeds, has a frame.",
    )


def _losses(run: RunRecord, folder: str, part: Json, name: str) -> list[Chart]:
    """Return the loss of the chosen learning rate's first seed by task, one chart per group."""
    charts: list[Chart] = []
    for group in GROUPS:
        series = []
        for task, entry in part["tasks"].items():
            if entry["group"] == group and entry["lr"]:
                logs = sorted(run.path.glob(f"trials/{folder}/{task}/train800*_lr{entry['lr']:g}_seed*/metrics.jsonl"))
                cells = [replace(run, name=task, records=read_records(log)[0]).series("loss") for log in logs[:1]]
                series += [one for one in cells if one.x]
        if series:
            title = f"Loss, {group}" if len(series) > 1 else f"Loss, {series[0].name}"
            charts.append(LineChart(f"{name}_{group}", title, "step", "training loss", series))
    return charts


def _ledger(run: RunRecord) -> list[Part]:
    rows, damaged = read_records(run.path / "ledger.jsonl")
    parts: list[Part] = []
    if damaged:
        parts.append(
            TextBlock(
                f"ledger.jsonl: {damaged} damaged line(s); test evaluations may be missing.",
                warning=True,
            )
        )
    if not rows:
        return [*parts, TextBlock("No network has been scored on the test split.")]
    keys = ("time", "stem", "task", "lr", "seed", "trained_on", "images", "accuracy")
    table: list[list[Cell]] = []
    for row in rows:
        lr = row.get("lr")
        cells = {**row, "lr": f"{lr:g}" if isinstance(lr, float) else lr}
        if row.get("accuracy") is None:
            cells["accuracy"] = "begun"
        table.append([cells.get(key) for key in keys])
    columns = ("time", "network", "task", "lr", "seed", "trained on", "test images", "accuracy in %")
    evaluations = sum(row.get("accuracy") is not None for row in rows)
    return [
        *parts,
        TextBlock(f"{evaluations} scorings of the test split, each with a line when it began and one with its result."),
        Table("Every evaluation on the test split", columns, table, folded=True),
    ]
