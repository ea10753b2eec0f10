"""Scores by which trials are compared: their keys in a result, and their names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
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


def score_name(key: str) -> str:
    """Return the name of a score, by default its key."""
    return SCORES.get(key, key)


def score_keys(result: Mapping[str, Any]) -> list[str]:
    """Return the scores of a sweep's result in the order of its tables; older results have the headline alone."""
    return list(result.get("scores", [result["score"]]))


def score_value(result: Mapping[str, Any], key: str) -> float | None:
    """Return a score of one trial's result; None where the result does not have it."""
    value: Any = result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)
