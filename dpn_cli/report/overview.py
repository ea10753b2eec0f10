"""Page sections of every run: command, curves, differences from the paper."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from dpn_cli.config.provenance import flatten_keys
from dpn_cli.report.content import (
    MOST_POINTS,
    Cell,
    Chart,
    LineChart,
    PageSection,
    Part,
    Table,
    TextBlock,
    mean_with_band,
)
from dpn_cli.report.gradients import layer_charts
from dpn_cli.report.reading import RunRecord, hours, trainings
from dpn_cli.run.console import count_noun

# A config key with its value and where that comes from.
Origins = Sequence[tuple[str, str, str]]
# Axes of the curves that every training has.
CURVES = {
    "loss": ("Loss", "training loss"),
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm before clipping", "L2 norm of the gradient"),
}
MEANS = f"Drawn as {MOST_POINTS} means over neighbouring records; the CSV file has all of them."
UNKNOWN = "-"


def curves(networks: Mapping[str, Sequence[RunRecord]], metric_names: Mapping[str, str], prefix: str) -> list[Chart]:
    """Return learning curves in common charts: the mean over the runs of each network, in a band that holds them all.

    `watched` names the metrics of evaluations and units.
    """
    charts: list[Chart] = []
    keys = dict.fromkeys(key for runs in networks.values() for run in runs for key in run.watched())
    labels = {**CURVES, **{key: (metric_names.get(key, key), metric_names.get(key, key)) for key in keys}}
    for key, (title, axis) in labels.items():
        # Empty ones too: a network has one colour in all charts.
        series = [mean_with_band(name, [run.series(key) for run in runs]) for name, runs in networks.items()]
        if any(line.x for line in series):
            log_y = key == "grad_norm" and min(value for line in series for value in line.low or line.y) > 0
            has_many_points = any(len(line.x) > MOST_POINTS for line in series)
            name, caption = f"{prefix}{key.replace('@', '_at_')}", MEANS if has_many_points else ""
            charts.append(LineChart(name, title, "step", axis, series, log_y=log_y, caption=caption))
    return charts + layer_charts(networks, prefix)


def run_summary(run: RunRecord, origins: Origins) -> PageSection:
    """Return the section of a run's command, versions, data, time and config."""
    facts, result = run.facts, run.result
    timing, time = result.get("timing", {}), hours(run)
    speed = run.series("images_per_second").y
    waiting_fractions = run.series("wait_share").y
    wait_share = timing["wait_seconds"] / timing["train_seconds"] if timing.get("train_seconds") else None
    wait_share = wait_share if wait_share is not None else waiting_fractions[-1] if waiting_fractions else None
    rows: list[tuple[str, Cell]] = [
        ("folder", str(run.path)),
        ("command", command(run)),
        ("status", run.status),
        ("started", facts.get("started", UNKNOWN)),
        ("last written", facts.get("updated", UNKNOWN)),
        ("device", f"{facts.get('device', UNKNOWN)}, {count_noun(facts.get('ranks', 1), 'process')}"),
        ("hours of training", UNKNOWN if time is None else f"{time:.3g}"),
        ("images per second", f"{speed[-1]:.1f}" if speed else UNKNOWN),
        ("share of waiting for data", UNKNOWN if wait_share is None else f"{100 * wait_share:.1f} %"),
        *[(f"data, {name}", str(value)) for name, value in flatten_keys(_data(run))],
        ("weights", str(facts.get("backbone", {}).get("source", UNKNOWN))),
        ("versions", ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items()) or UNKNOWN),
        ("git commit", facts.get("git") or UNKNOWN),
    ]
    if run.kind == "eval":
        keys = ("network", "run", "data", "split", "part", "image_preparation", "images", "skipped", "fingerprint")
        rows = [("folder", str(run.path)), *((key, str(result[key])) for key in keys if result.get(key) is not None)]
    parts: list[Part] = [Table("", ("", ""), rows)]
    if origins:
        columns = ("key", "value", "where it comes from")
        parts.append(Table("Config: every value and where it comes from", columns, origins, folded=True))
    return PageSection("Run", parts)


def command(run: RunRecord) -> str:
    """Return the command line of a run, as a shell takes it."""
    argv = [str(word) for word in run.facts.get("argv", [])]
    return shlex.join(["dpn", *argv[1:]]) if argv else UNKNOWN


def _data(run: RunRecord) -> Mapping[str, object]:
    data = run.facts.get("data") or next((result.get("data") for _, result in trainings(run.result)), None)
    return data if isinstance(data, dict) else {}


def against_paper(run: RunRecord) -> PageSection | None:
    """Return the differences from the paper; None for a run that has none to compare with."""
    if run.kind == "eval" or "differs_from_paper" not in run.result:
        return None
    differs = run.result["differs_from_paper"]
    if differs is None:
        text = "There is nothing to compare with: a demo, your own images, or a network that the paper does not have."
        return PageSection("Differences from the paper", [TextBlock(text)])
    if not differs:
        return PageSection("Differences from the paper", [TextBlock("Nothing that is known.")])
    rows = [_split(line) for line in differs]
    return PageSection("Differences from the paper", [Table("", ("key", "here", "paper"), rows)])


def _split(line: str) -> tuple[str, str, str]:
    """Return the key, the value and the paper's of a difference; a sentence has none."""
    key, colon, values = line.partition(": ")
    our_value, bracket, paper = values.rpartition(" (paper: ")
    return (key, our_value, paper.removesuffix(")")) if colon and bracket else (line, "", "")
