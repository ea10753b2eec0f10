"""Our numbers beside the paper's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from dpn_cli.reproduce.cells import RESULT, Experiment, Number, PaperTrial, Places, Score
from dpn_cli.run.files import read_object
from dpn_cli.statistics import PERCENT, PERCENT_DIFFERENCE, Summary, summarize

# The last digits of what the paper prints: accuracies, and their standard errors.
ACCURACY_DIGIT, ERROR_DIGIT = 0.1, 0.01


@dataclass(frozen=True)
class PaperComparison:
    """A number of ours, None where nothing is trained, beside the paper's.

    `within` tells whether it lies in the paper's 95 % interval; None where the paper prints no spread.
    """

    number: Number
    ours: Summary | None
    difference: float | None
    within: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        number = self.number
        return {
            "row": number.row,
            "column": number.column,
            "trainings": [job.name for job in number.jobs],
            "minus": [job.name for job in number.minus],
            "ours": self.ours and self.ours.to_dict(),
            "paper": number.paper,
            "paper_stderr": number.stderr,
            "difference": None if self.difference is None else round(self.difference, 4),
            "within_paper_interval": self.within,
        }


def compare(experiment: Experiment, places: Places) -> list[PaperComparison]:
    """Return all numbers of an experiment with what its finished trainings give."""
    return [_compared(number, places) for number in experiment.numbers]


def paper_reach(number: Number) -> float | None:
    """Return half the length of the paper's 95 % t-interval around its number, rounding included; None without one.

    The paper's text calls its spreads confidence intervals, but nearly all of them can only be standard errors.
    """
    if number.paper is None or number.stderr is None:
        return None
    quantile = float(stdtrit(number.seeds - 1, 0.975))
    return quantile * (number.stderr + ERROR_DIGIT / 2) + ACCURACY_DIGIT / 2


def _compared(number: Number, places: Places) -> PaperComparison:
    ours = _ours(number, places)
    if ours is None or number.paper is None:
        return PaperComparison(number, ours, None, None)
    difference, reach = ours.mean - number.paper, paper_reach(number)
    return PaperComparison(number, ours, difference, None if reach is None else abs(difference) <= reach)


def _ours(number: Number, places: Places) -> Summary | None:
    if not number.minus:
        values = [value for job in number.jobs for value in _values(job, number.score, places)]
        return summarize(values, PERCENT) if values else None
    differences = [
        one - other
        for job, base in zip(number.jobs, number.minus, strict=True)
        for one, other in zip(_values(job, number.score, places), _values(base, number.score, places), strict=False)
    ]
    return summarize(differences, PERCENT_DIFFERENCE) if differences else None


def _values(job: PaperTrial, score: Score, places: Places) -> list[float]:
    """Return the scores that a job's result has: none without a result."""
    found: Any = read_object(places.out / job.name / RESULT)
    for key in score:
        try:
            found = found[key]
        except (LookupError, TypeError):
            return []
    return found if isinstance(found, list) else [] if found is None else [found]
