"""Scores by which trials are compared: their keys in a result, and their names. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Names of the scores by their keys; a dot leads into a section of the result.
SCORES = {
    "top1": "top-1",
    "miou": "mIoU",
    "agreement": "agreement",
    "zeroshot.top1": "zero-shot top-1",
    "retrieval.image_to_text@1": "image to text R@1",
    "retrieval.text_to_image@1": "text to image R@1",
}
# The key of a mean over the severities of a shift is "shifts.NAME".
SHIFT_PREFIX = "shifts."


def score_name(key: str) -> str:
    """Return the name of a score, by default its key."""
    if key.startswith(SHIFT_PREFIX):
        return f"under {key.removeprefix(SHIFT_PREFIX).replace('_', ' ')}"
    return SCORES.get(key, key)


def score_keys(result: Mapping[str, Any]) -> list[str]:
    """Return the scores of a sweep's result in the order of its tables, without those under shifts.

    Older results have the headline alone.
    """
    return [key for key in result.get("scores", [result["score"]]) if not key.startswith(SHIFT_PREFIX)]


def shift_keys(scores: Sequence[str]) -> list[str]:
    """Return those of some scores that are means over the severities of a shift."""
    return [key for key in scores if key.startswith(SHIFT_PREFIX)]


def shift_metric(result: Mapping[str, Any]) -> str:
    """Return the name of the score that the networks of a sweep's result have under shifts; it may not be the headline.

    Raises `StopIteration` without scores under shifts.
    """
    runs = (run for network in result["compare"]["networks"].values() for run in network["runs"].values())
    return score_name(next(run["shifts"]["metric"] for run in runs if run.get("shifts")))


def shifts_scored(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of the scores under shifts that results of trainings have."""
    names = [name for result in results if result.get("shifts") for name in _shift_means(result)]
    return [SHIFT_PREFIX + name for name in dict.fromkeys(names)]


def score_value(result: Mapping[str, Any], key: str) -> float | None:
    """Return a score of one trial's result; None where the result does not have it."""
    if key.startswith(SHIFT_PREFIX):
        return _shift_means(result).get(key.removeprefix(SHIFT_PREFIX)) if result.get("shifts") else None
    value: Any = result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)


def _shift_means(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the means over severities of a training's own network, the first of its shifts."""
    means: dict[str, float] = next(iter(result["shifts"]["networks"].values()))["means"]
    return means
