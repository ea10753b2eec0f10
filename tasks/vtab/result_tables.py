"""The result of a sweep: numbers for machines (`build_result`), tables for people (`print_result`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dpn_cli.data.decode import ReadOptions
from dpn_cli.run.console import cell
from dpn_cli.run.files import replace_text
from dpn_cli.statistics import PERCENT, PERCENT_DIFFERENCE, Summary, as_text, paired_difference, summarize
from dpn_cli.sweep.grid import format_network
from tasks.vtab.config import VtabConfig
from tasks.vtab.tasks import GROUPS, PAPER_COLUMNS, TASKS
from tasks.vtab.trials import TaskOutcome

Json = dict[str, Any]

DEMO_NOTE = (
    "DEMO: generated scenes, and a network from scratch unless --checkpoint names one. These are no "
    "VTAB scores. For those give data (--data DIR with one folder per task, $DPN_DATA_DIR/vtab-1k, or "
    "hf:OWNER/NAME) and weights (--checkpoint FILE)."
)
TOY_NOTE = (
    "From scratch, the plain stem often wins at this size: Dual PatchNorm hides brightness and contrast from "
    "the network, and its gains in the paper come from long pre-training. The difference is what came out."
)
LEGEND = "Accuracy in %: mean ± standard error over n seeds, and the 95 % t-interval of the mean, clipped to 0 … 100."


def build_result(
    config: VtabConfig,
    outcomes: Sequence[TaskOutcome],
    arch: str,
    fingerprints: Mapping[str, Any],
    timing: Json,
    differs: Sequence[str] | None = None,
) -> Json:
    """Return what result.json holds; accuracies in percent. With several networks, the top level is the last one's."""
    by_network = {name: _result_of([o for o in outcomes if o.network == name], config) for name in config.networks}
    main = config.networks[-1]
    result: Json = {
        "task": "vtab",
        "demo": config.demo,
        "note": DEMO_NOTE if config.demo else "",
        "arch": arch,
        "stem": main,
        "checkpoint": config.backbone.checkpoint,
        "image_size": config.backbone.image_size,
        "protocol": config.protocol,
        "steps": config.schedule.steps,
        "lrs": list(config.lrs),
        "seeds": list(config.seeds),
        "unit": "percent",
        **by_network[main],
        "data": {"source": config.data.source, "fingerprints": dict(fingerprints)},
        "decoder": ReadOptions(config.data.decode).versions(),
        "differs_from_paper": differs,
        "timing": timing,
    }
    if config.compare:
        result["compare"] = {"stems": by_network, "differences": _differences(config.networks, by_network)}
    return result


def _result_of(outcomes: Sequence[TaskOutcome], config: VtabConfig) -> Json:
    tasks: Json = {}
    for outcome in outcomes:
        test = [outcome.test[seed] for seed in config.seeds if seed in outcome.test]
        complete = len(test) == len(config.seeds)
        tasks[outcome.task.name] = {
            "group": outcome.task.group,
            "lr": outcome.lr,
            "edge": _edge(outcome.lr, config.lrs),
            "val": {f"{lr:g}": [outcome.val.get(lr, {}).get(seed) for seed in config.seeds] for lr in config.lrs},
            "test": summarize(test, PERCENT).to_dict() if complete else None,
            "test_images": outcome.test_images,
            "test_images_in_vtab": outcome.task.test,
            "chance": round(100 / outcome.task.classes, 2),
            "failed": outcome.failed,
        }
    groups = {
        group: _mean_of(tasks, [name for name, task in tasks.items() if task["group"] == group]) for group in GROUPS
    }
    mean_of_tasks = _mean_of(tasks, list(tasks)) if set(tasks) == {task.name for task in TASKS} else None
    group_means = [part for part in groups.values() if part is not None]
    mean_groups = None
    if len(group_means) == len(GROUPS):
        mean_groups = summarize(
            [fmean(values) for values in zip(*(part.values for part in group_means), strict=True)], PERCENT
        )
    return {
        "mean19": mean_of_tasks and round(mean_of_tasks.mean, 4),
        "mean_groups": mean_groups and round(mean_groups.mean, 4),
        "mean19_over_seeds": mean_of_tasks and mean_of_tasks.to_dict(),
        "mean_groups_over_seeds": mean_groups and mean_groups.to_dict(),
        "groups": {name: group and group.to_dict() for name, group in groups.items()},
        "failed": [line for outcome in outcomes for line in outcome.failed],
        "tasks": tasks,
    }


def _mean_of(tasks: Json, names: Sequence[str]) -> Summary | None:
    """Average tasks seed by seed. None when a task has no score: the mean of the others is not comparable."""
    scores = [tasks[name]["test"] for name in names]
    if not scores or any(score is None for score in scores):
        return None
    return summarize([fmean(values) for values in zip(*(score["values"] for score in scores), strict=True)], PERCENT)


def _edge(lr: float | None, lrs: Sequence[float]) -> str | None:
    """Return which edge of the grid the chosen lr is, beyond which a better one may lie; None inside the grid."""
    if lr is None or len(lrs) < 2:
        return None
    return "highest" if lr == max(lrs) else "lowest" if lr == min(lrs) else None


def _differences(networks: Sequence[str], by_network: Mapping[str, Json]) -> list[Json]:
    """Compare every later network with the first: per task over the seeds, and over the tasks' means."""
    base, rows = by_network[networks[0]]["tasks"], []
    for network in networks[1:]:
        tasks: dict[str, Summary] = {}
        for name, task in by_network[network]["tasks"].items():
            if task["test"] and base[name]["test"]:
                tasks[name] = paired_difference(task["test"]["values"], base[name]["test"]["values"])
        overall = summarize([d.mean for d in tasks.values()], PERCENT_DIFFERENCE) if tasks else None
        rows.append(
            {
                "stem": network,
                "minus": networks[0],
                "tasks": {name: d.to_dict() for name, d in tasks.items()},
                "over_tasks": overall and overall.to_dict(),
            }
        )
    return rows


def write_csv(path: Path, outcomes: Iterable[TaskOutcome]) -> None:
    """Write every raw value: one row per network, task, lr and seed, with test where it was scored."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["stem", "task", "group", "lr", "seed", "val200", "chosen", "test"])
    for outcome in outcomes:
        for lr, by_seed in outcome.val.items():
            for seed, value in by_seed.items():
                chosen = lr == outcome.lr
                test = outcome.test.get(seed, "") if chosen else ""
                task = outcome.task
                rows.writerow([outcome.network, task.name, task.group, f"{lr:g}", seed, value, int(chosen), test])
    replace_text(path, text.getvalue())


def print_result(result: Json, console: Console) -> None:
    """Print the tables of a result: one per network, and the differences of a comparison."""
    if result["demo"]:
        console.print(f"[bold]{DEMO_NOTE}[/]\n")
    networks = result.get("compare", {}).get("stems") or {result["stem"]: result}
    for network, part in networks.items():
        console.print(_table(result, network, part))
        for line in _remarks(result, part):
            console.print(line, highlight=False)
        console.print()
    for difference in result.get("compare", {}).get("differences", []):
        console.print(_difference_table(difference))
        is_toy = result["demo"] or result["checkpoint"] == "none"
        if is_toy and (difference["stem"], difference["minus"]) == ("dpn", "none"):
            console.print(TOY_NOTE, highlight=False)
        console.print()
    console.print(LEGEND, highlight=False)


def _remarks(result: Json, part: Json) -> list[str]:
    """Return what a reader of the table should not overlook."""
    lines = [f"[red]failed:[/] {cell(line)}" for line in part["failed"]]
    edges = [f"{name} ({task['edge']})" for name, task in part["tasks"].items() if task["edge"]]
    if edges:
        lines.append(
            f"The chosen lr is at the edge of the grid for {', '.join(edges)}: a better one may lie beyond (--lrs)."
        )
    scored = {name: task for name, task in part["tasks"].items() if task["test"]}
    if result["demo"] and scored:
        gains = (f"{name} {task['test']['mean'] - task['chance']:+.1f}" for name, task in scored.items())
        lines.append(f"Points above chance: {', '.join(gains)}.")
    return lines


def _table(result: Json, network: str, part: Json) -> Table:
    column = PAPER_COLUMNS.index((result["arch"], network)) if (result["arch"], network) in PAPER_COLUMNS else None
    paper = {} if column is None or result["demo"] else {task.name: task.paper[column] for task in TASKS}
    kind = "VTAB demo" if result["demo"] else "VTAB-1k"
    shown_name = network if "=" in network else f"{result['arch']} · {format_network(network)}"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{kind} · {shown_name} · protocol {result['protocol']}",
        title_justify="left",
    )
    table.add_column("task")
    for name in ("lr", "val200", "test", "95 %", "n", "chance", *(("paper",) if paper else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for group in GROUPS:
        members = {name: task for name, task in part["tasks"].items() if task["group"] == group}
        for name, task in members.items():
            values = [v for v in task["val"].get(f"{task['lr']:g}", []) if v is not None] if task["lr"] else []
            table.add_row(
                name,
                f"{task['lr']:g}" if task["lr"] else "-",
                f"{fmean(values):.1f}" if values else "-",
                *_trials(task["test"]),
                f"{task['chance']:.1f}",
                *([f"{paper[name]:.1f}"] if paper else []),
            )
        if members:
            table.add_row(
                f"[bold]{group}[/]",
                "",
                "",
                *_trials(part["groups"][group]),
                "",
                *([""] if paper else []),
                end_section=True,
            )
    for name in ("mean19", "mean_groups"):
        if part[f"{name}_over_seeds"]:
            table.add_row(
                f"[bold]{name}[/]", "", "", *_trials(part[f"{name}_over_seeds"]), "", *([""] if paper else [])
            )
    return table


def _trials(summary: Json | None) -> tuple[str, str, str]:
    if summary is None:
        return "-", "-", "-"
    return *as_text(summary, digits=1), str(summary["n"])


def _difference_table(difference: Json) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{difference['stem']} minus {difference['minus']}, paired by seed",
        title_justify="left",
    )
    table.add_column("task")
    for name in ("difference", "95 %", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in difference["tasks"].items():
        table.add_row(name, *_trials(summary))
    table.add_section()
    table.add_row("[bold]over tasks[/]", *_trials(difference["over_tasks"]))
    return table
