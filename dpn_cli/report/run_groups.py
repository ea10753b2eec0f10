"""Runs grouped by network, and the conditions under which two groups are compared in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpn_cli.config.provenance import flatten_keys, format_value
from dpn_cli.report.content import Findings
from dpn_cli.report.reading import RunRecord
from dpn_cli.run.environment import MAY_CHANGE

# Keys in which paired runs may differ: the network, the seed, and settings that compute the same numbers.
UNPAIRED_KEYS = (*MAY_CHANGE, "about", "backbone", "seed", "seeds", "compare")
# Locations of images are no part of a protocol: fingerprints identify the images.
LOCATION_KEYS = ("data.source", "data.val_source", "data.max_pixels")
# Networks that differ in more keys than this are named after their runs.
MOST_NAME_KEYS = 3
RunFindings = tuple[RunRecord, Findings]


@dataclass(frozen=True)
class RunGroup:
    """Runs of one network, with their scores by part of the task and seed."""

    name: str
    runs: Sequence[RunRecord]
    metric: str
    scores: Mapping[str, Mapping[int, float]]

    @property
    def seeds(self) -> set[int]:
        """The seeds that have a score."""
        return {seed for values in self.scores.values() for seed in values}


def group_runs(pairs: Sequence[RunFindings]) -> list[RunGroup]:
    """Group runs by network, and name each network by the keys in which it differs.

    A run stands alone when its protocol differs from its network's first run, or its seed is there already.
    """
    keys = differing_keys([run for run, _ in pairs])
    groups: dict[str, RunGroup] = {}
    for run, findings in pairs:
        network = describe_network(run, keys)
        name = network if 0 < len(keys) <= MOST_NAME_KEYS else run.name
        new = RunGroup(name, [run], findings.metric, findings.scores)
        group = groups.get(network)
        if group is None:
            groups[network] = new
        elif group.seeds & new.seeds or _protocol(run) != _protocol(group.runs[0]):
            groups[run.name] = replace(new, name=run.name)
        else:
            parts = dict.fromkeys([*group.scores, *new.scores])
            scores = {part: {**group.scores.get(part, {}), **new.scores.get(part, {})} for part in parts}
            groups[network] = replace(group, runs=[*group.runs, run], scores=scores)
    return list(groups.values())


def reason_not_paired(first: RunGroup, other: RunGroup) -> str | None:
    """Return the reason why two groups cannot be compared in pairs; None when they can."""
    first_run, other_run = first.runs[0], other.runs[0]
    if first_run.kind != other_run.kind or first.metric != other.metric:
        return f"one is scored by {other.metric} ({other_run.kind}), the other by {first.metric} ({first_run.kind})"
    if first_run.kind == "eval":
        return "evaluations have no seeds; compare their rows in the table"
    if first_run.kind == "comparison":
        return "a comparison of several trainings holds its own pairs; they are below"
    for group in (other, first):
        if not group.scores:
            return f"{group.name} has no score yet"
    for run in (first_run, other_run):
        if run.config is None or not run.facts.get("data"):
            return f"it is not known how {run.name} was trained and on what data"
    first_protocol, other_protocol = _protocol(first_run), _protocol(other_run)
    keys = {**first_protocol, **other_protocol}
    differing_keys = [key for key in keys if first_protocol.get(key) != other_protocol.get(key)]
    if differing_keys:
        texts = [
            f"{key} is {format_value(other_protocol.get(key))} and {format_value(first_protocol.get(key))}"
            for key in differing_keys[:3]
        ]
        more = f"; and {len(differing_keys) - 3} more" if len(differing_keys) > 3 else ""
        return f"their protocols differ ({'; '.join(texts)}{more})"
    if not any(set(values) & set(other.scores.get(part, {})) for part, values in first.scores.items()):
        seeds = [", ".join(map(str, sorted(group.seeds))) for group in (other, first)]
        return f"they share no seed ({seeds[0]} and {seeds[1]})"
    return None


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys in which the networks of runs differ."""
    networks = [_network_keys(run) for run in runs]
    keys = dict.fromkeys(key for network in networks for key in network)
    return [key for key in keys if len({repr(network.get(key)) for network in networks}) > 1]


def describe_network(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the values of some keys of a run's network as text."""
    network = _network_keys(run)
    return ", ".join(f"{key} {format_value(network.get(key))}" for key in keys)


def _network_keys(run: RunRecord) -> dict[str, Any]:
    backbone = (run.config or {}).get("backbone", {})
    compare = (run.config or {}).get("compare") or None
    return {**dict(flatten_keys(backbone)), **({"compare": compare} if compare else {})}


def _protocol(run: RunRecord) -> dict[str, Any]:
    """Return the part of a config that paired runs share, and the fingerprints of the data."""
    config = {key: value for key, value in (run.config or {}).items() if key not in UNPAIRED_KEYS}
    keys = {key: value for key, value in flatten_keys(config) if key not in LOCATION_KEYS}
    data = run.facts.get("data")
    return {**keys, **{f"data {key}": value for key, value in flatten_keys(data if isinstance(data, dict) else {})}}
