"""What a page shows of a comparison, several trainings of one recipe: means over seeds and paired differences."""

from __future__ import annotations

from contextlib import suppress

from dpn_cli.errors import DataError
from dpn_cli.report.common import curves
from dpn_cli.report.content import Bars, Cell, Findings, Part, Section, Table, Text
from dpn_cli.report.reading import Json, OpenRun, open_run

# What a comparison may be scored by, and what to call it.
SCORES = {"top1": "top-1", "miou": "mIoU", "agreement": "agreement"}


def findings(run: OpenRun, prefix: str) -> Findings:
    """Return what a page shows of a comparison; the names of its charts begin with `prefix`."""
    inside = _trainings(run)
    several = any(len(runs) > 1 for runs in inside.values())
    charts = curves(inside, {}, f"{prefix}networks_")
    title = "Learning curves" + (", mean over seeds in a band that holds all of them" if several else "")
    learnt = [Section(title, charts)] if charts else []
    compared = run.result.get("compare")
    if not compared:
        return Findings("", {}, learnt)
    key = run.result["score"]
    metric = SCORES[key]
    differences = {each["network"]: each[key] for each in compared["differences"]}
    networks = compared["networks"]
    rows: list[list[Cell]] = [
        [name, *_mean(network[key]), *_difference(differences.get(name))] for name, network in networks.items()
    ]
    columns = ("network", f"{metric} in %", "std", "n", "difference", "95 %", "pairs")
    parts: list[Part] = [
        Table(
            f"{metric} in % of each network",
            columns if differences else columns[:4],
            rows if differences else [row[:4] for row in rows],
            note="Mean and standard deviation over trainings with different seeds; the difference to the first network "
            "is the mean over pairs with the same seed ± its standard error, with the 95 % t-interval.",
            name="comparison",
        ),
        Bars(
            f"{prefix}networks",
            f"{metric} of each network",
            f"{metric} in %",
            list(networks),
            {metric: [network[key] and network[key]["mean"] for network in networks.values()]},
            {metric: [_half(network[key]) for network in networks.values()]},
            caption="Mean over seeds, with the 95 % t-interval where there are several.",
        ),
    ]
    per_seed = [
        [name, folder, one.get(key), one.get("steps")]
        for name, network in networks.items()
        for folder, one in network["runs"].items()
    ]
    parts.append(Table("Every training", ("network", "folder", f"{metric} in %", "steps"), per_seed, folded=True))
    failed = [f"failed: {line}" for line in run.result["failed"]]
    return Findings(metric, {}, [Section("Networks compared", [*map(_warn, failed), *parts]), *learnt], warnings=failed)


def _warn(line: str) -> Text:
    return Text(line, warning=True)


def _trainings(run: OpenRun) -> dict[str, list[OpenRun]]:
    """Return the trainings of each network from all seeds, by the network's name or its folder while there is none."""
    networks = (run.result.get("compare") or {}).get("networks", {})
    names = {folder.rpartition("/")[0]: name for name, network in networks.items() for folder in network["runs"]}
    found: dict[str, list[OpenRun]] = {name: [] for name in names.values()}
    for path in sorted(run.path.glob("**/seed*/run.json"), key=lambda path: (path.parents[1], path)):
        network = path.parent.parent.relative_to(run.path).as_posix().removeprefix(".")
        with suppress(DataError):
            found.setdefault(names.get(network, network or run.name), []).append(open_run(path.parent))
    return {name: runs for name, runs in found.items() if runs}


def _mean(found: Json | None) -> list[Cell]:
    return [None, None, None] if found is None else [float(found["mean"]), found["std"], found["n"]]


def _difference(found: Json | None) -> list[Cell]:
    if found is None:
        return [None, None, None]
    error = "" if found["stderr"] is None else f" ± {found['stderr']:.2f}"
    interval = "-" if found["ci95"] is None else f"{found['ci95'][0]:.2f} … {found['ci95'][1]:.2f}"
    return [f"{found['mean']:.2f}{error}", interval, found["n"]]


def _half(found: Json | None) -> float | None:
    """Return half the length of an interval that is not clipped."""
    return (
        None
        if not found or found["ci95"] is None
        else max(found["ci95"][1] - found["mean"], found["mean"] - found["ci95"][0])
    )
