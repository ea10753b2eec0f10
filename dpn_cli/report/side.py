"""Runs side by side: one table of them all, and their differences in pairs where a pair says something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpn_cli.config.provenance import flatten_keys, format_value
from dpn_cli.report.content import (
    Cell,
    Findings,
    LineChart,
    PageSection,
    Part,
    Series,
    Table,
    TextBlock,
    mean_with_band,
)
from dpn_cli.report.reading import RunRecord, hours
from dpn_cli.run.environment import MAY_CHANGE
from dpn_cli.statistics import PERCENT, PERCENT_DIFFERENCE, Summary, as_text, paired_difference, summarize

# What two trainings may differ in and still be compared by seed: the network, and what computes the same numbers.
FREE = (*MAY_CHANGE, "about", "backbone", "seed", "seeds", "compare")
# Keys that say where images are; their fingerprints say what they are.
PLACES = ("data.source", "data.val_source", "data.max_pixels")
# Keys in the name of a network; one that differs in more is called like its run.
MOST_KEYS = 3
Pair = tuple[RunRecord, Findings]


def summary(pairs: Sequence[Pair]) -> Table:
    """Return the table of all runs, one a row."""
    columns = ("run", "task", "network", "seed", "score", "", "steps", "hours", "images/s", "waiting", "status")
    rows = [_row(run, findings) for run, findings in pairs]
    filled = [place for place in range(len(columns)) if any(row[place] not in ("", None) for row in rows)]
    return Table(
        "Runs" if len(pairs) > 1 else "Run",
        [columns[place] for place in filled],
        [[row[place] for place in filled] for row in rows],
        name="runs",
    )


def _row(run: RunRecord, findings: Findings) -> list[Cell]:
    result, time, speed = run.result, hours(run), run.series("images_per_second").y
    timing = result.get("timing", {})
    share = timing["wait_seconds"] / timing["train_seconds"] if timing.get("train_seconds") else None
    values = findings.scores.get("", {})
    single = len(values) == 1
    return [
        run.name,
        result.get("task", run.kind),
        " ".join(str(result[key]) for key in ("arch", "stem") if result.get(key)),
        str(next(iter(values))) if single and run.kind != "eval" else "",
        summarize(list(values.values())).mean if values else None,
        f"{findings.metric} in %" if values else "",
        result.get("steps"),
        None if time is None else f"{time:.3g}",
        None if not speed else f"{speed[-1]:.1f}",
        None if share is None else f"{100 * share:.1f} %",
        run.status,
    ]


def paired(pairs: Sequence[Pair]) -> PageSection | None:
    """Return the differences of later networks to the first, in pairs by seed; None for a single run.

    Where runs cannot be paired, one line says why.
    """
    if len(pairs) < 2:
        return None
    groups = _groups(pairs)
    first, *others = groups
    parts: list[Part] = []
    if not others:
        parts = [TextBlock("All of these runs are of one network: there is nothing to take the difference of.")]
        if len(first.seeds) > 1:
            parts.append(_means(first))
    for other in others:
        reason = refusal(first, other)
        parts.append(
            TextBlock(f"{other.name} is not paired with {first.name}: {reason}.") if reason else _table(first, other)
        )
    return PageSection("Differences in pairs", parts)


def over_fractions(pairs: Sequence[Pair]) -> LineChart | None:
    """Return the score of each network over the share of the images that it was trained on, where runs differ in it."""
    points: dict[str, list[Series]] = {}
    metric, keys = "", _differing_keys([run for run, _ in pairs])
    for run, findings in pairs:
        share = (run.config or {}).get("data", {}).get("fraction")
        if share is not None:
            for network, value in _values(run, findings):
                metric, line = metric or findings.metric, network or _describe_network(run, keys) or "all runs"
                points.setdefault(line, []).append(Series("", [100 * share], [value]))
    lines = [mean_with_band(name, several) for name, several in points.items()]
    if len({x for line in lines for x in line.x}) < 2:
        return None
    caption = "Mean over seeds, in a band from the lowest to the highest." if any(line.low for line in lines) else ""
    axis = "share of the training images in %"
    return LineChart("fractions", f"{metric} over the training images", axis, f"{metric} in %", lines, caption=caption)


def _values(run: RunRecord, findings: Findings) -> Iterator[tuple[str, float]]:
    """Yield the scores of a run; a comparison's have the names of their networks."""
    if run.kind == "comparison":
        compare, key = run.result.get("compare", {}), run.result.get("score", "")
        for name, network in compare.get("networks", {}).items():
            for one in network["runs"].values():
                if one.get(key) is not None:
                    yield name, one[key]
        return
    for value in findings.scores.get("", {}).values():
        yield "", value


@dataclass(frozen=True)
class Group:
    """Runs of one network: their score by part of the task and seed."""

    name: str
    runs: Sequence[RunRecord]
    metric: str
    scores: Mapping[str, Mapping[int, float]]

    @property
    def seeds(self) -> set[int]:
        """Every seed of which there is a score."""
        return {seed for values in self.scores.values() for seed in values}


def _groups(pairs: Sequence[Pair]) -> list[Group]:
    """Gather the runs of each network, and name the networks by what they differ in.

    A run with another config than its network's first, or of a seed that is there already, stands alone.
    """
    keys = _differing_keys([run for run, _ in pairs])
    groups: dict[str, Group] = {}
    for run, findings in pairs:
        described = _describe_network(run, keys)
        name = described if 0 < len(keys) <= MOST_KEYS else run.name
        alone = Group(name, [run], findings.metric, findings.scores)
        before = groups.get(described)
        if before is None:
            groups[described] = alone
        elif before.seeds & alone.seeds or _protocol(run) != _protocol(before.runs[0]):
            groups[run.name] = replace(alone, name=run.name)
        else:
            parts = dict.fromkeys([*before.scores, *alone.scores])
            scores = {part: {**before.scores.get(part, {}), **alone.scores.get(part, {})} for part in parts}
            groups[described] = replace(before, runs=[*before.runs, run], scores=scores)
    return list(groups.values())


def _differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys in which the networks of runs differ."""
    networks = [_network(run) for run in runs]
    keys = dict.fromkeys(key for network in networks for key in network)
    return [key for key in keys if len({repr(network.get(key)) for network in networks}) > 1]


def _describe_network(run: RunRecord, keys: Sequence[str]) -> str:
    network = _network(run)
    return ", ".join(f"{key} {format_value(network.get(key))}" for key in keys)


def _network(run: RunRecord) -> dict[str, Any]:
    backbone = (run.config or {}).get("backbone", {})
    compare = (run.config or {}).get("compare") or None
    return {**dict(flatten_keys(backbone)), **({"compare": compare} if compare else {})}


def _protocol(run: RunRecord) -> dict[str, Any]:
    """Return what two trainings must share to be paired: the config but for the network, and fingerprints of data."""
    config = {key: value for key, value in (run.config or {}).items() if key not in FREE}
    keys = {key: value for key, value in flatten_keys(config) if key not in PLACES}
    data = run.facts.get("data")
    return {**keys, **{f"data {key}": value for key, value in flatten_keys(data if isinstance(data, dict) else {})}}


def refusal(first: Group, other: Group) -> str | None:
    """Say why two groups of runs cannot be paired; None when they can."""
    one, two = first.runs[0], other.runs[0]
    if one.kind != two.kind or first.metric != other.metric:
        return f"one is scored by {other.metric} ({two.kind}), the other by {first.metric} ({one.kind})"
    if "eval" in (one.kind, two.kind):
        return "evaluations have no seeds; compare their rows in the table"
    if "comparison" in (one.kind, two.kind):
        return "a comparison of several trainings holds its own pairs; they are below"
    for group in (other, first):
        if not group.scores:
            return f"{group.name} has no score yet"
    for run in (one, two):
        if run.config is None or not run.facts.get("data"):
            return f"it is not known how {run.name} was trained and on what data"
    there, here = _protocol(one), _protocol(two)
    differs = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if differs:
        said = "; ".join(
            f"{key} is {format_value(here.get(key))} and {format_value(there.get(key))}" for key in differs[:3]
        )
        more = f"; and {len(differs) - 3} more" if len(differs) > 3 else ""
        return f"their protocols differ ({said}{more})"
    if not any(set(values) & set(other.scores.get(part, {})) for part, values in first.scores.items()):
        seeds = [", ".join(map(str, sorted(group.seeds))) for group in (other, first)]
        return f"they share no seed ({seeds[0]} and {seeds[1]})"
    return None


def _table(first: Group, other: Group) -> Table:
    """Return the differences part by part over the seeds that both have, and over the parts."""
    rows: list[Sequence[Cell]] = []
    means = []
    for part, values in first.scores.items():
        seeds = sorted(set(values) & set(other.scores.get(part, {})))
        if seeds:
            ours, theirs = ([scores[seed] for seed in seeds] for scores in (other.scores[part], values))
            difference = paired_difference(ours, theirs)
            means.append(difference.mean)
            sides = [summarize(one, PERCENT).mean for one in (theirs, ours)]
            rows.append([part or other.metric, *sides, *describe_summary(difference), ", ".join(map(str, seeds))])
    strong = frozenset[int]()
    if len(means) > 1:
        strong = frozenset({len(rows)})
        rows.append(["over tasks", None, None, *describe_summary(summarize(means, PERCENT_DIFFERENCE)), ""])
    return Table(
        f"{other.name} minus {first.name}",
        (first.metric, first.name, other.name, "difference", "95 %", "n", "seeds"),
        rows,
        note="Points: the mean over pairs with the same seed ± its standard error, with the 95 % t-interval; over "
        "tasks, that of the tasks' means.",
        strong=strong,
        name="differences",
    )


def _means(group: Group) -> Table:
    rows: list[Sequence[Cell]] = []
    for part, values in group.scores.items():
        mean, interval, count = describe_summary(summarize(list(values.values()), PERCENT))
        rows.append([part or group.metric, mean, interval, count])
    title = f"Mean over seeds {', '.join(map(str, sorted(group.seeds)))}"
    return Table(title, (group.metric, "mean", "95 %", "n"), rows, name="means")


def describe_summary(summary: Summary) -> tuple[str, str, int]:
    """Return mean ± standard error, the 95 % interval and n as text."""
    return *as_text(summary.to_dict()), len(summary.values)
