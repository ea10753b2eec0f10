"""Summaries of repeated measurements: n, mean, standard error and a t-interval, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

# The key of a pair, such as a seed.
K = TypeVar("K")


@dataclass(frozen=True)
class Summary:
    """Values of one quantity with their mean, standard error s/sqrt(n) and two-sided 95 % t-interval.

    Standard error and interval are None for a single value, which says nothing about the spread. Values that are all
    equal have no interval either: a t-interval of no width would claim to be certain.
    """

    values: tuple[float, ...]
    mean: float
    stderr: float | None
    ci95: tuple[float, float] | None

    def to_dict(self) -> dict[str, object]:
        """Return the summary as plain values, rounded to what 20,000 test images can resolve."""

        def short(value: float) -> float:
            return round(value, 4)

        return {
            "values": [short(value) for value in self.values],
            "n": len(self.values),
            "mean": short(self.mean),
            "stderr": None if self.stderr is None else short(self.stderr),
            "ci95": None if self.ci95 is None else [short(end) for end in self.ci95],
        }


# The values that an accuracy in percent can take, and a difference of two of them.
PERCENT = (0.0, 100.0)
PERCENT_DIFFERENCE = (-100.0, 100.0)
# Differences of equal scores differ by the rounding of floating point.
ROUNDING = 1e-9


def summarize(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Summary:
    """Summarize one value or more; the interval is clipped to `within`, the range that the quantity can take."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Summary(tuple(values), mean, None, None)
    stderr = stdev(values) / math.sqrt(n)
    if math.isclose(min(values), max(values), rel_tol=ROUNDING, abs_tol=ROUNDING):
        return Summary(tuple(values), mean, 0.0, None)
    from scipy.special import stdtrit  # which takes longer to load than all that help needs

    half_width = float(stdtrit(n - 1, 0.975)) * stderr
    low, high = bounds
    return Summary(tuple(values), mean, stderr, (max(low, mean - half_width), min(high, mean + half_width)))


def wilson_interval(percent: float, images: int) -> tuple[float, float]:
    """Return the two-sided 95 % interval of an accuracy in percent on so many images, by Wilson's score (1927)."""
    from scipy.stats import binomtest  # which takes longer to load than all that help needs

    interval = binomtest(round(percent / 100 * images), images).proportion_ci(method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


def format_accuracy(percent: float, images: int, kind: str = "images") -> str:
    """Return an accuracy with the number of its images and its 95 % interval."""
    low, high = wilson_interval(percent, images)
    return f"{percent:.2f} % of {images} {kind} (95 % interval {low:.1f} to {high:.1f})"


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Summarize ours - theirs in percent, value by value (same seed, or same task)."""
    return summarize([a - b for a, b in zip(ours, theirs, strict=True)], PERCENT_DIFFERENCE)


def difference_by_key(ours: Mapping[K, float], theirs: Mapping[K, float]) -> tuple[list[K], Summary | None]:
    """Summarize ours - theirs in percent over the keys, such as seeds, that both have, and return these.

    The summary is None where they have no key in common.
    """
    keys = [key for key in ours if key in theirs]
    return keys, paired_difference([ours[key] for key in keys], [theirs[key] for key in keys]) if keys else None


def as_text(summary: Mapping[str, Any], digits: int = 2) -> tuple[str, str]:
    """Return mean ± standard error, and the interval with so many digits, of `Summary.to_dict`."""
    mean, stderr, interval = f"{summary['mean']:.2f}", summary["stderr"], summary["ci95"]
    if stderr is None:
        return mean, "-"
    if not stderr or interval is None:
        return mean, "all equal"
    return f"{mean} ± {stderr:.2f}", " … ".join(f"{end:.{digits}f}" for end in interval)
