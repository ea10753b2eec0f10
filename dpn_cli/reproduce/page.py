"""A page about an experiment: its numbers beside the paper's, as a table, as bars, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpn_cli.report.content import BarChart, Cell, PageSection, Part, Table, TextBlock
from dpn_cli.report.page import write_page
from dpn_cli.reproduce.cells import Experiment
from dpn_cli.reproduce.compare import PaperComparison, paper_reach
from dpn_cli.statistics import as_text

NOT_THE_PAPER = "at the demo's size, with its tower for every network: these are not the paper's numbers"
COLUMNS = ("", "", "ours", "n", "paper", "difference", "within")
NOTE = (
    "Ours: mean over n trainings (of a probe: draws) ± its standard error. Difference: ours minus the paper's. Within: "
    "whether ours lies in the 95 % t-interval of the paper's mean, with its spreads taken for standard errors."
)


def heading(experiment: Experiment, small: bool) -> str:
    """Return the heading of everything that is said of an experiment's results."""
    end = f" ({NOT_THE_PAPER})" if small else ""
    return f"{experiment.name}, {experiment.title}{end}"


def table_of(experiment: Experiment, compared: Sequence[PaperComparison], small: bool) -> Table:
    """Return all numbers, one row each."""
    rows: list[list[Cell]] = []
    for one in compared:
        number, ours = one.number, one.ours
        ours_said = (None, None) if ours is None else (as_text(ours.to_dict())[0], len(ours.values))
        paper = None if number.paper is None else _with_error(number.paper, number.stderr)
        within = None if one.within is None else "yes" if one.within else "no"
        rows.append([number.row, number.column, *ours_said, paper, one.difference, within])
    title = f"{heading(experiment, small)}: {experiment.unit}"
    return Table(title, COLUMNS, rows, note=NOTE, name=experiment.name)


def write(folder: Path, experiment: Experiment, compared: Sequence[PaperComparison], small: bool) -> Path:
    """Write the page of an experiment with numbers and return its path."""
    parts: list[Part] = [TextBlock(f"This is {NOT_THE_PAPER}.", warning=True)] if small else []
    parts.append(table_of(experiment, compared, small))
    columns = list(dict.fromkeys(one.number.column for one in compared))
    rows = list(dict.fromkeys(one.number.row for one in compared))
    place = {(one.number.row, one.number.column): one for one in compared}
    series, errors, beside = dict[str, list[float | None]](), dict[str, list[float | None]](), dict[str, str]()
    for column in columns:
        inside = [place.get((row, column)) for row in rows]
        for name, value, reach in ((column, _mean, _share_of_paper), (f"{column}, paper", _paper, _paper_reach)):
            values = [value(one) for one in inside]
            if name == column or any(each is not None for each in values):
                series[name], errors[name] = values, [reach(one) for one in inside]
        if f"{column}, paper" in series:
            beside[f"{column}, paper"] = column
    title, caption = "Ours and the paper's" if beside else "Ours", "With 95 % t-intervals of several trainings."
    differences = any(one.number.minus for one in compared)
    bars = BarChart("numbers", title, experiment.unit, rows, series, errors, beside, differences, caption=caption)
    parts.append(bars)
    return write_page(folder, heading(experiment, small), [PageSection("Numbers", parts)])


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def _mean(one: PaperComparison | None) -> float | None:
    return one.ours.mean if one and one.ours else None


def _paper(one: PaperComparison | None) -> float | None:
    return one.number.paper if one else None


def _share_of_paper(one: PaperComparison | None) -> float | None:
    ours = one.ours if one else None
    if ours is None or ours.ci95 is None:
        return None
    return max(ours.ci95[1] - ours.mean, ours.mean - ours.ci95[0])


def _paper_reach(one: PaperComparison | None) -> float | None:
    return paper_reach(one.number) if one else None
