"""The section of a page about scores under shifts of the data."""

from __future__ import annotations

from collections.abc import Sequence

from dpn_cli.config.shift_options import SHIFTS
from dpn_cli.report.content import (
    Cell,
    Gallery,
    LineChart,
    PageImage,
    PageSection,
    Part,
    Series,
    Table,
    mean_with_band,
)
from dpn_cli.report.reading import Json, RunRecord
from dpn_cli.report.shift_scores import CLEAN, EXAMPLES
from dpn_cli.sweep.score_names import SHIFT_PREFIX, score_name, shift_keys, shift_metric


def shift_sections(run: RunRecord, prefix: str) -> list[PageSection]:
    """Return the scores under shifts as charts and a table, and an image under every shift.

    There is a chart for each kind of shift, and for each shift where several networks are compared. Without scores
    under shifts there is no section.
    """
    if not (shifts := run.result.get("shifts")):
        return []
    metric = score_name(shifts["metric"])
    networks, severities, several = shifts["networks"], shifts["severities"], len(shifts["networks"]) > 1
    names = list(next(iter(networks.values()))["scores"])
    parts: list[Part] = []
    groups = {name: [name] for name in names} if several else _group_by_kind(names)
    for group, shift_names in groups.items():
        series = [
            Series(network if several else name, [0, *severities], [result["clean"], *result["scores"][name]])
            for name in shift_names
            for network, result in networks.items()
        ]
        title = f"{metric} under shifts: {group.replace('_', ' ')}"
        axes = "severity, 0 is unshifted", f"{metric} in %"
        # From zero: on an axis of a point, one image looks like a fall.
        parts.append(LineChart(f"{prefix}shifts_{group}", title, *axes, series, from_zero=True))
    rows: list[list[Cell]] = [
        [network, name, *result["scores"][name], result["means"][name]]
        + ([shifts["mce"]["errors"][name] if network == next(iter(networks)) else None] if several else [])
        for network, result in networks.items()
        for name in names
    ]
    columns = ["network", "shift", *map(str, severities), "mean", *(["relative error in %"] if several else [])]
    note = f"{metric} in %."
    if shifts["side"]:
        note += f" Images were reduced to a shorter side of {shifts['side']} pixels at most."
    if several and shifts["mce"]["mce"] is not None:
        note += f" mCE: {shifts['mce']['mce']:.1f} % of the second network's errors, without frost."
    parts.append(Table(f"{metric} under shifts", columns, rows, note, name="shifts"))
    files = [(name, run.path / EXAMPLES / f"{name}.jpg") for name in (CLEAN, *names)]
    images = [PageImage(path.read_bytes(), [name]) for name, path in files if path.is_file()]
    gallery = [Gallery(f"One image under every shift, severity {severities[-1]}", images)] if images else []
    return [PageSection("Shifts", [*parts, *gallery])]


def compared_shift_charts(run: RunRecord, prefix: str) -> list[Part]:
    """Return a chart for each shift under which the networks of a sweep were scored."""
    keys = shift_keys(run.result.get("scores", ()))
    results = {name: list(network["runs"].values()) for name, network in run.result["compare"]["networks"].items()}
    charts: list[Part] = []
    for key in keys:
        shift, metric = key.removeprefix(SHIFT_PREFIX), shift_metric(run.result)
        curves = {name: [_curve(result["shifts"], shift) for result in found] for name, found in results.items()}
        series = [mean_with_band(name, lines) for name, lines in curves.items() if lines]
        caption = "Mean over seeds, in a band that holds all of them." if any(line.low for line in series) else ""
        title, axes = f"{metric} {score_name(key)}", ("severity, 0 is unshifted", f"{metric} in %")
        charts.append(LineChart(f"{prefix}shifts_{shift}", title, *axes, series, from_zero=True, caption=caption))
    return charts


def _curve(shifts: Json, shift: str) -> Series:
    """Return the scores of a training's own network over the severities of a shift."""
    network = next(iter(shifts["networks"].values()))
    return Series("", [0, *shifts["severities"]], [network["clean"], *network["scores"][shift]])


def _group_by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(SHIFTS[name], []).append(name)
    return groups
