"""Page sections that compare trainings: trials of one sweep, or several runs, with means and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dpn_cli.errors import DataError
from dpn_cli.report.content import (
    BarChart,
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
from dpn_cli.report.overview import curves
from dpn_cli.report.reading import Json, RunRecord, hours, read_run
from dpn_cli.report.run_groups import (
    RunFindings,
    RunGroup,
    describe_network,
    differing_keys,
    group_runs,
    reason_not_paired,
)
from dpn_cli.report.shift_section import compared_shift_charts
from dpn_cli.run.files import read_object
from dpn_cli.statistics import PERCENT, PERCENT_DIFFERENCE, as_text, difference_by_key, summarize
from dpn_cli.sweep.score_names import (
    SCORES,
    SHIFT_PREFIX,
    score_keys,
    score_name,
    score_value,
    shift_keys,
    shift_metric,
)

# Reads the findings of a task from a run; the names of its charts begin with the second argument.
Reader = Callable[[RunRecord, str], Findings]
# A trial of a sweep: network, folder and result.
TrialResult = tuple[str, str, Json]
PAIRED = "the mean over pairs with the same seed ± its standard error, with the 95 % t-interval"
SWEEP_NOTE = (
    f"Mean and standard deviation over {{}} with different seeds; the difference to the first network is {PAIRED}."
)
RUNS_NOTE = f"Points: {PAIRED}; over tasks, that of the tasks' means."


def sweep_findings(run: RunRecord, prefix: str, reader: Callable[[RunRecord], Reader]) -> Findings:
    """Return the findings of a sweep's page; the names of its charts begin with `prefix`.

    `reader` returns the reader of a trial's run.
    """
    trials_by_network = _trial_runs(run)
    trial_runs = [trial for trials in trials_by_network.values() for trial in trials]
    metric_names: dict[str, str] = {}
    for trial in trial_runs[:1]:
        metric_names |= reader(trial)(replace(trial, result={}), "").watched  # without a result it reads nothing else
    charts = curves(trials_by_network, metric_names, f"{prefix}networks_")
    has_seeds = any(len(trials) > 1 for trials in trials_by_network.values())
    title = "Learning curves" + (", mean over seeds in a band that holds all of them" if has_seeds else "")
    curve_sections = [PageSection(title, charts)] if charts else []
    warnings = [f"{trial.path.relative_to(run.path)}: {warning}" for trial in trial_runs for warning in trial.notes]
    if not run.result.get("compare"):
        return Findings("", {}, [_finished_trials(run), *curve_sections], warnings=warnings)
    failed = [f"failed: {line}" for line in run.result["failed"]]
    section = PageSection(
        "Networks compared", [*(TextBlock(line, warning=True) for line in failed), *_networks_compared(run, prefix)]
    )
    metric = score_name(run.result["score"])
    sections = [section, *_shift_sections(run, prefix), *curve_sections]
    return Findings(metric, {}, sections, warnings=[*failed, *warnings])


def runs_table(runs_with_findings: Sequence[RunFindings]) -> Table:
    """Return the table of all runs, one a row, without empty columns."""
    columns = ("run", "task", "network", "seed", "score", "", "steps", "hours", "images/s", "waiting", "status")
    rows = [_run_row(run, findings) for run, findings in runs_with_findings]
    filled = [number for number in range(len(columns)) if any(row[number] not in ("", None) for row in rows)]
    return Table(
        "Runs" if len(runs_with_findings) > 1 else "Run",
        [columns[number] for number in filled],
        [[row[number] for number in filled] for row in rows],
        name="runs",
    )


def paired_section(runs_with_findings: Sequence[RunFindings]) -> PageSection | None:
    """Return the differences of later networks to the first, paired by seed; None for a single run.

    Groups that cannot be paired get one line with the reason.
    """
    if len(runs_with_findings) < 2:
        return None
    first, *others = group_runs(runs_with_findings)
    parts: list[Part] = []
    if not others:
        parts = [TextBlock("All of these runs are of one network: there is nothing to take the difference of.")]
        if len(first.seeds) > 1:
            parts.append(_group_means(first))
    for other in others:
        if reason := reason_not_paired(first, other):
            parts.append(TextBlock(f"{other.name} is not paired with {first.name}: {reason}."))
        else:
            parts.append(_group_differences(first, other))
    return PageSection("Differences in pairs", parts)


def fraction_chart(runs_with_findings: Sequence[RunFindings]) -> LineChart | None:
    """Return the score of each network over the fraction of training images; None unless runs differ in it."""
    points: dict[str, list[Series]] = {}
    metric, keys = "", differing_keys([run for run, _ in runs_with_findings])
    for run, findings in runs_with_findings:
        fraction = (run.config or {}).get("data", {}).get("fraction")
        if fraction is not None:
            for network, value in _network_scores(run, findings):
                metric, line = metric or findings.metric, network or describe_network(run, keys) or "all runs"
                points.setdefault(line, []).append(Series("", [100 * fraction], [value]))
    lines = [mean_with_band(name, series) for name, series in points.items()]
    if len({x for line in lines for x in line.x}) < 2:
        return None
    caption = "Mean over seeds, in a band from the lowest to the highest." if any(line.low for line in lines) else ""
    axis = "share of the training images in %"
    return LineChart("fractions", f"{metric} over the training images", axis, f"{metric} in %", lines, caption=caption)


def _networks_compared(run: RunRecord, prefix: str) -> list[Part]:
    """Return a table of each score by network, a chart of all, and the table of trials."""
    compared, keys = run.result["compare"], score_keys(run.result)
    networks, names = compared["networks"], {key: score_name(key) for key in keys}
    is_fewshot = run.result["task"] == "fewshot"
    note = SWEEP_NOTE.format("draws of the images" if is_fewshot else "trainings")
    chart = BarChart(
        f"{prefix}networks",
        f"{names[keys[0]] if len(keys) == 1 else 'Scores'} of each network",
        f"{names[keys[0]] if len(keys) == 1 else 'score'} in %",
        list(networks),
        {names[key]: [network[key] and network[key]["mean"] for network in networks.values()] for key in keys},
        {names[key]: [_interval_half_width(network[key]) for network in networks.values()] for key in keys},
        caption="Mean over seeds, with the 95 % t-interval where there are several.",
    )
    trials = [
        (name, folder, result) for name, network in networks.items() for folder, result in network["runs"].items()
    ]
    trial_table = _trial_table("Every draw" if is_fewshot else "Every training", keys, trials, folded=True)
    return [*(_network_table(key, compared, note) for key in keys), chart, trial_table]


def _network_table(key: str, compared: Json, note: str) -> Table:
    metric, differences = score_name(key), {entry["network"]: entry[key] for entry in compared["differences"]}
    columns = ("network", f"{metric} in %", "std", "n", "difference", "95 %", "pairs")
    rows = [
        [name, *_summary_cells(network[key]), *_difference_cells(differences.get(name))]
        for name, network in compared["networks"].items()
    ]
    width = len(columns) if differences else 4
    title = f"{metric} in % of each network"
    return Table(title, columns[:width], [row[:width] for row in rows], note=note, name="comparison")


def _shift_sections(run: RunRecord, prefix: str) -> list[PageSection]:
    """Return the scores of the networks under shifts as charts, and as a table of the means; none without them."""
    keys, compared = shift_keys(run.result.get("scores", ())), run.result["compare"]
    if not keys:
        return []
    differences = {(entry["network"], key): entry[key] for entry in compared["differences"] for key in keys}
    columns = ("network", "shift", f"{shift_metric(run.result)} in %", "std", "n", "difference", "95 %", "pairs")
    rows = [
        [
            name,
            key.removeprefix(SHIFT_PREFIX),
            *_summary_cells(network[key]),
            *_difference_cells(differences.get((name, key))),
        ]
        for name, network in compared["networks"].items()
        for key in keys
    ]
    width = len(columns) if differences else 5
    note = f"Means over severities. {SWEEP_NOTE.format('trainings')}"
    table = Table("Under shifts", columns[:width], [row[:width] for row in rows], note, name="shifts")
    return [PageSection("Shifts", [*compared_shift_charts(run, prefix), table])]


def _summary_cells(summary: Json | None) -> list[Cell]:
    return [float(summary["mean"]), summary["std"], summary["n"]] if summary else [None, None, None]


def _difference_cells(summary: Mapping[str, Any] | None) -> list[Cell]:
    """Return the cells of mean ± standard error, 95 % interval and n of a `Summary.to_dict`."""
    return [*as_text(summary), summary["n"]] if summary else [None, None, None]


def _interval_half_width(summary: Json | None) -> float | None:
    """Return half the length of an interval, measured on the side that is not clipped."""
    if not summary or summary["ci95"] is None:
        return None
    low, high = summary["ci95"]
    return float(max(high - summary["mean"], summary["mean"] - low))


def _trial_table(title: str, keys: Sequence[str], trials: Sequence[TrialResult], *, folded: bool = False) -> Table:
    """Return the table of trials: network, folder, scores and steps."""
    has_steps = any("steps" in result for _, _, result in trials)
    columns = ("network", "folder", *(f"{score_name(key)} in %" for key in keys), *(["steps"] if has_steps else []))
    rows: list[list[Cell]] = [
        [name, folder, *(score_value(result, key) for key in keys), *([result.get("steps")] if has_steps else [])]
        for name, folder, result in trials
    ]
    return Table(title, columns, rows, folded=folded)


def _finished_trials(run: RunRecord) -> PageSection:
    """Return the section of the finished trials of a sweep without a result."""
    trials: list[TrialResult] = []
    for path in sorted(run.path.glob("**/seed*/result.json")):
        folder = path.parent.relative_to(run.path).as_posix()
        if result := read_object(path):
            trials.append((folder.rpartition("/")[0] or run.name, folder, result))
    config, results = run.config or {}, [result for _, _, result in trials]
    unit = "draws" if any(result.get("task") == "fewshot" for result in results) else "trainings"
    trial_count = f" of {len(config.get('compare') or ['']) * len(config.get('seeds') or [0])}" if config else ""
    shots = {key for result in results for key in result if key.endswith("-shot")}
    known_keys = (*SCORES, *sorted(shots, key=lambda key: (len(key), key)))
    keys = [key for key in known_keys if any(score_value(result, key) is not None for result in results)]
    text = TextBlock(f"{len(trials)}{trial_count} {unit} finished.")
    return PageSection("Finished so far", [text, *([_trial_table("", keys, trials)] if trials else [])])


def _trial_runs(run: RunRecord) -> dict[str, list[RunRecord]]:
    """Return the runs of all seeds by network: its name in the result, else its folder."""
    networks = (run.result.get("compare") or {}).get("networks", {})
    names = {folder.rpartition("/")[0]: name for name, network in networks.items() for folder in network["runs"]}
    runs: dict[str, list[RunRecord]] = {name: [] for name in names.values()}
    for path in sorted(run.path.glob("**/seed*/run.json"), key=lambda path: (path.parents[1], path)):
        network = path.parent.parent.relative_to(run.path).as_posix().removeprefix(".")
        with suppress(DataError):
            runs.setdefault(names.get(network, network or run.name), []).append(read_run(path.parent))
    return {name: seeds for name, seeds in runs.items() if seeds}


def _run_row(run: RunRecord, findings: Findings) -> list[Cell]:
    result, time, speed = run.result, hours(run), run.series("images_per_second").y
    timing = result.get("timing", {})
    wait_share = timing["wait_seconds"] / timing["train_seconds"] if timing.get("train_seconds") else None
    values = findings.scores.get("", {})
    return [
        run.name,
        result.get("task", run.kind),
        " ".join(str(result[key]) for key in ("arch", "stem") if result.get(key)),
        str(next(iter(values))) if len(values) == 1 and run.kind != "eval" else "",
        summarize(list(values.values())).mean if values else None,
        f"{findings.metric} in %" if values else "",
        result.get("steps"),
        None if time is None else f"{time:.3g}",
        None if not speed else f"{speed[-1]:.1f}",
        None if wait_share is None else f"{100 * wait_share:.1f} %",
        run.status,
    ]


def _network_scores(run: RunRecord, findings: Findings) -> Iterator[tuple[str, float]]:
    """Yield the network's name, empty for a single training, and each score of a run."""
    if run.kind == "comparison":
        key = run.result.get("score", "")
        for name, network in run.result.get("compare", {}).get("networks", {}).items():
            for result in network["runs"].values():
                if result.get(key) is not None:
                    yield name, result[key]
    else:
        for value in findings.scores.get("", {}).values():
            yield "", value


def _group_differences(first: RunGroup, other: RunGroup) -> Table:
    """Return the differences by part of the task, over the seeds that both groups have, and over the parts."""
    rows: list[Sequence[Cell]] = []
    means = []
    for part, values in first.scores.items():
        other_values = other.scores.get(part, {})
        seeds, difference = difference_by_key(other_values, values)
        if difference:
            means.append(difference.mean)
            group_means = [
                summarize([scores[seed] for seed in seeds], PERCENT).mean for scores in (values, other_values)
            ]
            cells = _difference_cells(difference.to_dict())
            rows.append([part or other.metric, *group_means, *cells, ", ".join(map(str, sorted(seeds)))])
    has_mean = len(means) > 1
    if has_mean:
        mean = summarize(means, PERCENT_DIFFERENCE)
        rows.append(["over tasks", None, None, *_difference_cells(mean.to_dict()), ""])
    return Table(
        f"{other.name} minus {first.name}",
        (first.metric, first.name, other.name, "difference", "95 %", "n", "seeds"),
        rows,
        note=RUNS_NOTE,
        strong=frozenset({len(rows) - 1}) if has_mean else frozenset(),
        name="differences",
    )


def _group_means(group: RunGroup) -> Table:
    rows = [
        [part or group.metric, *_difference_cells(summarize(list(values.values()), PERCENT).to_dict())]
        for part, values in group.scores.items()
    ]
    title = f"Mean over seeds {', '.join(map(str, sorted(group.seeds)))}"
    return Table(title, (group.metric, "mean", "95 %", "n"), rows, name="means")
