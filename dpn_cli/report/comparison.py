"""Page section of a sweep, several trainings of one config: means over seeds and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from dpn_cli.errors import DataError
from dpn_cli.report.content import BarChart, Cell, Findings, PageSection, Part, Table, TextBlock
from dpn_cli.report.overview import curves
from dpn_cli.report.reading import Json, RunRecord, read_run
from dpn_cli.run.files import read_object
from dpn_cli.statistics import as_text
from dpn_cli.sweep.score_names import SCORES, score_keys, score_name, score_value

# Returns what a task reads out of a run; the names of its charts begin with the second argument.
Reader = Callable[[RunRecord, str], Findings]
NOTE = (
    "Mean and standard deviation over {} with different seeds; the difference to the first network is the mean "
    "over pairs with the same seed ± its standard error, with the 95 % t-interval."
)


def findings(run: RunRecord, prefix: str, reader: Callable[[RunRecord], Reader]) -> Findings:
    """Return what a page shows of a comparison; the names of its charts begin with `prefix`.

    `reader` returns what reads a training of the comparison.
    """
    inside = _trainings(run)
    trainings = [one for runs in inside.values() for one in runs]
    several = any(len(runs) > 1 for runs in inside.values())
    watched: dict[str, str] = {}
    for one in trainings[:1]:
        watched |= reader(one)(replace(one, result={}), "").watched  # without a result it reads nothing else
    charts = curves(inside, watched, f"{prefix}networks_")
    damage = [f"{one.path.relative_to(run.path)}: {note}" for one in trainings for note in one.notes]
    title = "Learning curves" + (", mean over seeds in a band that holds all of them" if several else "")
    learnt = [PageSection(title, charts)] if charts else []
    compared = run.result.get("compare")
    if not compared:
        return Findings("", {}, [*_so_far(run), *learnt], warnings=damage)
    keys, networks = score_keys(run.result), compared["networks"]
    names = {key: score_name(key) for key in keys}
    drawn = run.result["task"] == "fewshot"
    note = NOTE.format("draws of the images" if drawn else "trainings")
    parts: list[Part] = [_table(key, compared, note) for key in keys]
    parts.append(
        BarChart(
            f"{prefix}networks",
            f"{names[keys[0]] if len(keys) == 1 else 'Scores'} of each network",
            f"{names[keys[0]] if len(keys) == 1 else 'score'} in %",
            list(networks),
            {names[key]: [one[key] and one[key]["mean"] for one in networks.values()] for key in keys},
            {names[key]: [_half(one[key]) for one in networks.values()] for key in keys},
            caption="Mean over seeds, with the 95 % t-interval where there are several.",
        )
    )
    found = [(name, folder, one) for name, network in networks.items() for folder, one in network["runs"].items()]
    parts.append(_trial_table("Every draw" if drawn else "Every training", keys, found, folded=True))
    failed = [f"failed: {line}" for line in run.result["failed"]]
    section = PageSection("Networks compared", [*map(_warn, failed), *parts])
    return Findings(score_name(run.result["score"]), {}, [section, *learnt], warnings=[*failed, *damage])


def _so_far(run: RunRecord) -> list[PageSection]:
    """Return the section of the trainings that are finished, of a comparison without a result."""
    finished = []
    for path in sorted(run.path.glob("**/seed*/result.json")):
        folder = path.parent.relative_to(run.path).as_posix()
        if result := read_object(path):
            finished.append((folder.rpartition("/")[0] or run.name, folder, result))
    config, results = run.config or {}, [result for _, _, result in finished]
    what = "draws" if any(one.get("task") == "fewshot" for one in results) else "trainings"
    planned = len(config.get("compare") or [""]) * len(config.get("seeds") or [0])
    said = f"{len(finished)} of {planned} {what} finished" if config else f"{len(finished)} {what} finished"
    shots = sorted({key for one in results for key in one if key.endswith("-shot")}, key=lambda key: (len(key), key))
    keys = [key for key in (*SCORES, *shots) if any(score_value(one, key) is not None for one in results)]
    return [
        PageSection(
            "Finished so far", [TextBlock(f"{said}."), *([_trial_table("", keys, finished)] if finished else [])]
        )
    ]


def _trial_table(
    title: str, keys: Sequence[str], found: Sequence[tuple[str, str, Json]], *, folded: bool = False
) -> Table:
    """Return the table of networks, folders and their results."""
    steps = any("steps" in one for _, _, one in found)
    columns = ("network", "folder", *(f"{score_name(key)} in %" for key in keys), *(["steps"] if steps else []))
    rows: list[list[Cell]] = [
        [name, folder, *(score_value(one, key) for key in keys), *([one.get("steps")] if steps else [])]
        for name, folder, one in found
    ]
    return Table(title, columns, rows, folded=folded)


def _table(key: str, compared: Json, note: str) -> Table:
    metric, differences = score_name(key), {each["network"]: each[key] for each in compared["differences"]}
    columns = ("network", f"{metric} in %", "std", "n", "difference", "95 %", "pairs")
    rows: list[list[Cell]] = [
        [name, *_mean(network[key]), *_difference(differences.get(name))]
        for name, network in compared["networks"].items()
    ]
    shown = len(columns) if differences else 4
    title = f"{metric} in % of each network"
    return Table(title, columns[:shown], [row[:shown] for row in rows], note=note, name="comparison")


def _warn(line: str) -> TextBlock:
    return TextBlock(line, warning=True)


def _trainings(run: RunRecord) -> dict[str, list[RunRecord]]:
    """Return the trainings of each network from all seeds, by the network's name or its folder while there is none."""
    networks = (run.result.get("compare") or {}).get("networks", {})
    names = {folder.rpartition("/")[0]: name for name, network in networks.items() for folder in network["runs"]}
    found: dict[str, list[RunRecord]] = {name: [] for name in names.values()}
    for path in sorted(run.path.glob("**/seed*/run.json"), key=lambda path: (path.parents[1], path)):
        network = path.parent.parent.relative_to(run.path).as_posix().removeprefix(".")
        with suppress(DataError):
            found.setdefault(names.get(network, network or run.name), []).append(read_run(path.parent))
    return {name: runs for name, runs in found.items() if runs}


def _mean(found: Json | None) -> list[Cell]:
    return [None, None, None] if found is None else [float(found["mean"]), found["std"], found["n"]]


def _difference(found: Json | None) -> list[Cell]:
    if found is None:
        return [None, None, None]
    return [*as_text(found), found["n"]]


def _half(found: Json | None) -> float | None:
    """Return half the length of an interval that is not clipped."""
    return (
        None
        if not found or found["ci95"] is None
        else max(found["ci95"][1] - found["mean"], found["mean"] - found["ci95"][0])
    )
