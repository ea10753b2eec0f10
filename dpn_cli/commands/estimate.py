"""Costs of trainings, from a dry run or a plan, as a table or as JSON, and a check of the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from dpn_cli.config.cost import Cost, total_disk, total_hours
from dpn_cli.errors import SaveError
from dpn_cli.run.console import Console, count_noun, gigabytes, print_columns, show, wrap_name

# Longest line of a network's name, so that the table has 80 columns.
NAME = 19
NUMBERS = ("memory", "s/step", "steps", "runs", "hours", "no step", "disk")


def show_costs(costs: Sequence[Cost], folder: Path, console: Console, *, as_json: bool) -> None:
    """Print what a dry run has found, if there was one, for a run in `folder`.

    Raises `SaveError` where the disk has less space than the run needs.
    """
    if not costs:
        return
    free, needed = disk_free_and_used(folder)[0], total_disk(costs)
    if as_json:
        totals = {"hours": total_hours(costs), "disk": needed, "disk_free": free}
        show(json.dumps({"task": "dry run", "networks": [cost.to_dict() for cost in costs], **totals}, indent=2))
    else:
        print_costs(costs)
    check_space(costs, folder)
    trainings = sum(cost.trainings for cost in costs)
    console.info(
        f"dry run passed: {count_noun(trainings, 'training')} in about {format_hours(total_hours(costs))} hours one "
        f"after the "
        f"other on this machine, and at most {gigabytes(needed)} on the disk, which has {gigabytes(free)} free"
    )


def print_costs(costs: Sequence[Cost]) -> None:
    """Print a table of what the trainings of each network take."""
    rows = [
        (
            gigabytes(cost.memory),
            f"{cost.step_seconds:.3g}",
            f"{cost.steps:,}",
            f"{cost.trainings}",
            format_hours(cost.hours),
            f"{1 - cost.steps * cost.step_seconds / 3600 / cost.hours:.0%}",
            gigabytes(cost.disk),
        )
        for cost in costs
    ]
    names = [wrap_name(", ".join(filter(None, (cost.name, cost.part))), ",", NAME) for cost in costs]
    columns = dict(zip(("network", *NUMBERS), (names, *map(list, zip(*rows, strict=True))), strict=True))
    print_columns(columns, right=NUMBERS)


def format_hours(hours: float) -> str:
    """Return hours in three digits, or as many as there are before the point."""
    return f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}"


def check_space(costs: Sequence[Cost], folder: Path) -> None:
    """Raise `SaveError` where the disk of a run's folder has less space than the trainings need."""
    (free, used), needed = disk_free_and_used(folder), total_disk(costs)
    if needed > free + used:
        raise SaveError(
            f"-o {folder}: the trainings need {gigabytes(needed)}, at most {_format_parts(costs)}, and the disk has "
            f"{gigabytes(free)} free; free some space or pass another -o"
        )


def disk_free_and_used(folder: Path) -> tuple[int, int]:
    """Return the bytes that are free on the disk of a folder, which need not be there, and those that it holds."""
    existing_folder = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    files = folder.rglob("*") if folder.is_dir() else ()
    return shutil.disk_usage(existing_folder).free, sum(file.stat().st_size for file in files if file.is_file())


def _format_parts(costs: Sequence[Cost]) -> str:
    parts = {
        "weights": sum(cost.kept for cost in costs),
        "states of a training": max(cost.passing for cost in costs),
        "caches": sum(cost.cached for cost in costs),
    }
    return ", ".join(f"{gigabytes(size)} of {name}" for name, size in parts.items() if size)
