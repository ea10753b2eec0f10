"""Our numbers next to the paper's: as plain values, as a table, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from dpn_cli.report.content import BarChart, Cell, PageSection, Part, Table, TextBlock
from dpn_cli.report.page import write_page
from dpn_cli.reproduce.experiment import RESULT, Experiment, Locations, Number, PaperTrial, Score
from dpn_cli.run.files import read_object
from dpn_cli.statistics import PERCENT, Summary, as_text, difference_by_key, summarize

# The last digits of what the paper prints: accuracies, and their standard errors.
ACCURACY_DIGIT, ERROR_DIGIT = 0.1, 0.01
NOT_THE_PAPER = "at the demo's size, with its tower for every network: these are not the paper's numbers"
COLUMNS = ("", "", "ours", "n", "paper", "difference", "within")
NOTE = (
    "Ours: mean over n trainings (of a probe: draws) ± its standard error. Difference: ours minus the paper's. Within: "
    "whether ours lies in the 95 % t-interval of the paper's mean, with its spreads taken for standard errors."
)


@dataclass(frozen=True)
class PaperComparison:
    """A number of ours, None where nothing is trained, next to the paper's.

    `within` tells whether it lies in the paper's 95 % interval; None where the paper prints no spread.
    """

    number: Number
    our_summary: Summary | None
    difference: float | None
    is_consistent: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        number = self.number
        return {
            "row": number.row,
            "column": number.column,
            "trainings": [trial.name for trial in number.trials],
            "minus": [trial.name for trial in number.minus],
            "ours": self.our_summary and self.our_summary.to_dict(),
            "paper": number.paper,
            "paper_stderr": number.stderr,
            "difference": None if self.difference is None else round(self.difference, 4),
            "within_paper_interval": self.is_consistent,
        }


def compare(experiment: Experiment, locations: Locations) -> list[PaperComparison]:
    """Return all numbers of an experiment with what its finished trainings give."""
    return [_compare_number(number, locations) for number in experiment.numbers]


def paper_reach(number: Number) -> float | None:
    """Return half the length of the paper's 95 % t-interval around its number, rounding included; None without one.

    The paper's text calls its spreads confidence intervals, but nearly all of them can only be standard errors.
    """
    if number.paper is None or number.stderr is None:
        return None
    quantile = float(stdtrit(number.seeds - 1, 0.975))
    return quantile * (number.stderr + ERROR_DIGIT / 2) + ACCURACY_DIGIT / 2


def _compare_number(number: Number, locations: Locations) -> PaperComparison:
    our_summary = _our_summary(number, locations)
    if our_summary is None or number.paper is None:
        return PaperComparison(number, our_summary, None, None)
    difference, reach = our_summary.mean - number.paper, paper_reach(number)
    return PaperComparison(number, our_summary, difference, None if reach is None else abs(difference) <= reach)


def _our_summary(number: Number, locations: Locations) -> Summary | None:
    scores = _scores(number.trials, number.score, locations)
    if number.minus:
        return difference_by_key(scores, _scores(number.minus, number.score, locations))[1]
    return summarize(list(scores.values()), PERCENT) if scores else None


def _scores(trials: Sequence[PaperTrial], score: Score, locations: Locations) -> dict[tuple[int, int], float]:
    """Return the scores in the results of trials, by the numbers of the trial and of the value in its result."""
    values: dict[tuple[int, int], float] = {}
    for number, trial in enumerate(trials):
        value: Any = read_object(locations.out / trial.name / RESULT)
        for key in score:
            try:
                value = value[key]
            except (LookupError, TypeError):
                value = None
        values_of_trial = value if isinstance(value, list) else [] if value is None else [value]
        values |= {(number, index): value for index, value in enumerate(values_of_trial)}
    return values


def heading(experiment: Experiment, small: bool) -> str:
    """Return the heading of an experiment's tables and pages."""
    end = f" ({NOT_THE_PAPER})" if small else ""
    return f"{experiment.name}, {experiment.title}{end}"


def table_of(experiment: Experiment, compared: Sequence[PaperComparison], small: bool) -> Table:
    """Return all numbers, one row each."""
    rows: list[list[Cell]] = []
    for comparison in compared:
        number, our_summary = comparison.number, comparison.our_summary
        our_cells = (
            (None, None) if our_summary is None else (as_text(our_summary.to_dict())[0], len(our_summary.values))
        )
        paper = None if number.paper is None else _with_error(number.paper, number.stderr)
        is_consistent = None if comparison.is_consistent is None else "yes" if comparison.is_consistent else "no"
        rows.append([number.row, number.column, *our_cells, paper, comparison.difference, is_consistent])
    title = f"{heading(experiment, small)}: {experiment.unit}"
    return Table(title, COLUMNS, rows, note=NOTE, name=experiment.name)


def write(folder: Path, experiment: Experiment, compared: Sequence[PaperComparison], small: bool) -> Path:
    """Write the page of an experiment with numbers and return its path."""
    parts: list[Part] = [TextBlock(f"This is {NOT_THE_PAPER}.", warning=True)] if small else []
    parts.append(table_of(experiment, compared, small))
    columns = list(dict.fromkeys(comparison.number.column for comparison in compared))
    rows = list(dict.fromkeys(comparison.number.row for comparison in compared))
    by_cell = {(comparison.number.row, comparison.number.column): comparison for comparison in compared}
    series, errors, paired_with = dict[str, list[float | None]](), dict[str, list[float | None]](), dict[str, str]()
    for column in columns:
        cells = [by_cell.get((row, column)) for row in rows]
        for name, value, reach in ((column, _mean, _our_reach), (f"{column}, paper", _paper, _paper_reach)):
            values = [value(comparison) for comparison in cells]
            if name == column or any(value is not None for value in values):
                series[name], errors[name] = values, [reach(comparison) for comparison in cells]
        if f"{column}, paper" in series:
            paired_with[f"{column}, paper"] = column
    title, caption = "Ours and the paper's" if paired_with else "Ours", "With 95 % t-intervals of several trainings."
    differences = any(comparison.number.minus for comparison in compared)
    bars = BarChart("numbers", title, experiment.unit, rows, series, errors, paired_with, differences, caption=caption)
    parts.append(bars)
    return write_page(folder, heading(experiment, small), [PageSection("Numbers", parts)])


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def _mean(comparison: PaperComparison | None) -> float | None:
    return comparison.our_summary.mean if comparison and comparison.our_summary else None


def _paper(comparison: PaperComparison | None) -> float | None:
    return comparison.number.paper if comparison else None


def _our_reach(comparison: PaperComparison | None) -> float | None:
    """Return half the length of our interval that is not clipped."""
    our_summary = comparison.our_summary if comparison else None
    if our_summary is None or our_summary.ci95 is None:
        return None
    return max(our_summary.ci95[1] - our_summary.mean, our_summary.mean - our_summary.ci95[0])


def _paper_reach(comparison: PaperComparison | None) -> float | None:
    return paper_reach(comparison.number) if comparison else None
