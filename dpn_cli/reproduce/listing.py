"""The list of all tables and figures: what each needs, what of it is here, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.reproduce.cells import Experiment, Places
from dpn_cli.reproduce.price import H100, SHARE, flops, gpu_hours, measured
from dpn_cli.reproduce.trainings import DATA_SETS, Trainings
from dpn_cli.run.console import cell, folded, print_columns, width_of

Json = dict[str, Any]
# Characters in a line of the data's names: those of the longest.
LONG = max(map(len, DATA_SETS))


def describe_experiments(experiments: Sequence[Experiment], places: Places) -> list[Json]:
    """Return what is known of each experiment: trainings and those left, data and weights, operations and hours."""
    jobs = {job.name: job for experiment in experiments for job in experiment.jobs(places.weights)}
    rate = measured(list(jobs.values()), places)
    return [_row(experiment, places, rate) for experiment in experiments]


def _row(experiment: Experiment, places: Places, rate: float | None) -> Json:
    jobs = experiment.jobs(places.weights)
    left = [job for job in jobs if not places.done(job)]
    names = dict.fromkeys(name for job in jobs for _, name in job.data if name in DATA_SETS)
    given = [group for group in experiment.networks() if group in places.weights]
    operations = flops(left, places)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "trainings": len(jobs),
        "left": len(left),
        "data": {name: places.data.get(name) for name in names},
        "weights": {group: places.weights[group] for group in given},
        "flops_left": operations,
        "h100_hours_left": gpu_hours(operations),
        "flops_per_second_here": rate,
        "hours_left_here": operations / rate / 3600 if rate else None,
    }


def print_list(rows: Sequence[Json], places: Places, make: Trainings) -> None:
    """Print the list as a table on stdout, and below it where what is missing is looked for."""
    rate = rows[0]["flops_per_second_here"]
    columns = {
        "": [row["name"] for row in rows],
        "shows": [row["title"] for row in rows],
        "data": [_data(row) for row in rows],
        "left": [f"{row['left']} of {row['trainings']}" for row in rows],
        "H100-h": [_hours(row["h100_hours_left"]) for row in rows],
    }
    if rate:
        columns["h here"] = [_hours(row["hours_left_here"]) for row in rows]
    console = RichConsole(highlight=False)
    room = console.width - width_of({**columns, "shows": [""]}) + len("shows")
    columns["shows"] = [folded(text, " ", room) for text in columns["shows"]]
    print_columns(columns, right=("left", "H100-h", "h here"))
    missing = {name for row in rows for name, place in row["data"].items() if not place}
    for name in DATA_SETS:
        if name in missing:
            console.print(cell(f"{name}: {DATA_SETS[name]}; looked for in $DPN_DATA_DIR/{name} and ./{name}"))
    if missing:
        console.print("Other places: --data NAME=PLACE; networks that are here: --weights GROUP=FILE.")
    console.print(
        f"H100-h: hours of an H100, by the operations of what is left, at {SHARE:.0%} of {H100 / 1e12:.0f} TFLOP/s. "
        "Evaluation and loading are not counted; trainings that tables share are counted in each."
    )
    if rate:
        console.print(
            cell(f"h here: hours at {rate / 1e12:.3g} TFLOP/s, as measured in the trainings in {places.out}.")
        )
    if make.small:
        console.print("All of this is at the demo's size.")


def _data(row: Json) -> str:
    """Return the data sets of an experiment, one a line, or two where the name is long."""
    names = (name if place else f"{name} (missing)" for name, place in row["data"].items())
    return "\n".join(folded(name, " ", LONG) for name in names) or "the demo's"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else "<0.1"
