"""Result of a sweep: means over seeds, paired differences between networks, and their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.table import Table

from dpn_cli.run.console import cell
from dpn_cli.statistics import PERCENT, Summary, as_text, difference_by_key, summarize
from dpn_cli.sweep.grid import Trial, settings_of
from dpn_cli.sweep.score_names import score_keys, score_name, score_value, shift_keys, shift_metric, shifts_scored

Result = dict[str, Any]
LEGEND = (
    "Mean and standard deviation over n {trials} with different seeds. The difference is the mean over pairs with "
    "the same seed ± its standard error, with the 95 % t-interval."
)


ONE_SEED = "Each network has one seed: such a difference shows nothing about the networks; --seeds 3 repeats them."


def build_result(
    scores: Sequence[str],
    trials: Sequence[Trial],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
    *,
    compared: bool,
) -> Result:
    """Return the content of result.json; `results` and `failed`, the reasons, are by folder, and scores in percent.

    Scores that no result has are left out. With `compared` the settings of networks are read from their names.
    """
    keys = [*scores, *shifts_scored(results.values())]
    keys = [key for key in keys if any(score_value(result, key) is not None for result in results.values())]
    keys = keys or list(scores[:1])
    networks: dict[str, Any] = {}
    for trial in trials:
        settings = settings_of(trial.network) if compared else {}
        network = networks.setdefault(trial.network, {"network": settings, "runs": {}})
        if trial.folder in results:
            network["runs"][trial.folder] = results[trial.folder]
    first, *others = networks
    differences: list[Result] = [{"network": name, "minus": first} for name in others]
    for key in keys:
        values: dict[str, dict[int, float]] = {name: {} for name in networks}
        for trial in trials:
            value = score_value(results.get(trial.folder, {}), key)
            if value is not None:
                values[trial.network][trial.seed] = value
        for name, by_seed in values.items():
            networks[name][key] = _describe_summary(summarize(list(by_seed.values()), PERCENT)) if by_seed else None
        for difference in differences:
            seeds, summary = difference_by_key(values[difference["network"]], values[first])
            difference.setdefault("seeds", seeds)
            difference[key] = summary and _describe_summary(summary)
    return {
        "task": next((result["task"] for result in results.values()), None),
        "score": keys[0],
        "scores": keys,
        "unit": "percent",
        "seeds": list(dict.fromkeys(trial.seed for trial in trials)),
        "compare": {"networks": networks, "differences": differences},
        "failed": list(failed.values()),
    }


def _describe_summary(summary: Summary) -> dict[str, Any]:
    deviation = None if summary.stderr is None else round(summary.stderr * math.sqrt(len(summary.values)), 4)
    return {**summary.to_dict(), "std": deviation}


def print_tables(result: Result, trials: str = "trainings") -> None:
    """Print the tables of a sweep on stdout, one for each score; `trials` is the plural noun for them."""
    console = RichConsole(highlight=False)
    for key in score_keys(result):
        console.print(_table(result, [key]))
    if keys := shift_keys(result.get("scores", ())):
        console.print(_table(result, keys))
    for line in result["failed"]:
        console.print(f"[red]failed:[/] {cell(line)}")
    console.print(LEGEND.format(trials=trials))
    if result["compare"]["differences"] and len(result["seeds"]) == 1:
        console.print(ONE_SEED)


def _table(result: Result, keys: Sequence[str]) -> Table:
    """Return the table of a score, or of the scores under shifts, which have a row each."""
    compared, under_shifts = result["compare"], bool(shift_keys(keys))
    differences = {(entry["network"], key): entry[key] for entry in compared["differences"] for key in keys}
    minus = f", and the difference to {next(iter(compared['networks']))}, paired by seed" if differences else ""
    score = f"{shift_metric(result)} under shifts" if under_shifts else score_name(keys[0])
    means = " (means over severities)" if under_shifts else ""
    title = f"{result['task']}: {score} in %{means}{minus}"
    table = Table(box=box.SIMPLE_HEAD, title=cell(title), title_justify="left")
    table.add_column("network", overflow="fold")
    if under_shifts:
        table.add_column("shift", no_wrap=True)
    for name in ("mean" if under_shifts else score, "std", "n", *(("difference", "95 %", "n") if differences else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for name, network in compared["networks"].items():
        for key in keys:
            mean, difference = network[key], differences.get((name, key))
            row = ["-"] * 3 if mean is None else [f"{mean['mean']:.2f}", _format_std(mean["std"]), str(mean["n"])]
            if difference:
                row += [*as_text(difference, digits=1), str(difference["n"])]
            table.add_row(cell(name), *([cell(score_name(key).removeprefix("under "))] if under_shifts else []), *row)
    return table


def _format_std(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
