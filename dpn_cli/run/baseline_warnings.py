"""Warnings that a training will not learn or has not learnt, shared by all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

# Smallest share of an image's area that a crop should show; inception crops have the same limit.
LEAST_CROP = 0.05
# A score counts as learnt when guessing reaches it with at most this probability.
SIGNIFICANCE = 0.05


def crop_warning(crop: tuple[int, int], images: Sequence[tuple[int, int]]) -> str | None:
    """Warn before training when crops show too little of the images they are cut from.

    Args:
        crop: (height, width) in pixels.
        images: (height, width) of some images at the scale at which they are cropped.

    Returns:
        The warning, or None when the crop covers at least a twentieth of the median image.
    """
    if not images:
        return None
    share = median(min(crop[0], height) * min(crop[1], width) / (height * width) for height, width in images)
    if share >= LEAST_CROP:
        return None
    typical = sorted(images, key=lambda size: size[0] * size[1])[len(images) // 2]
    return (
        f"crops of {crop[0]}x{crop[1]} cover {100 * share:.1f} % of the images, which are cropped at {typical[0]}x"
        f"{typical[1]} (median): the network hardly sees their content. Crop from smaller images, or use a larger "
        "--image-size"
    )


def class_floors(counts: Sequence[int]) -> dict[str, float]:
    """Return the accuracies in percent of two guessers, from the number of scored images per class."""
    return {"chance": 100 / len(counts), "most_frequent_class": 100 * max(counts) / sum(counts)}


def result_warning(metric: str, value: float, floors: Mapping[str, float], trials: int | None = None) -> str | None:
    """Warn after training when a score does not exceed that of guessing.

    Args:
        metric: the score's name in the message: ``"validation top-1"``.
        value: the score in percent.
        floors: scores in percent that need no learning, by name: ``{"chance": 10.0}``; see `class_floors`.
        trials: the number of independent right-or-wrong predictions behind the score, for a one-sided binomial test at
            5 %: a score that may exceed the floor by luck does not count. None for other scores (mIoU).

    Returns:
        The warning, or None for a score above all floors.
    """
    name, floor = max(floors.items(), key=lambda item: item[1])
    if value > floor and (trials is None or _probability(value, floor, trials) <= SIGNIFICANCE):
        return None
    if value >= floor >= 100:
        return None  # no score exceeds a floor of 100 %
    words = {"most_frequent_class": "what always naming the most frequent class gives"}.get(name, name)
    counted, comparison = "" if trials is None else f" of {trials}", "clearly above" if value > floor else "above"
    return (
        f"NOTHING LEARNT: {metric} {value:.2f} %{counted} is not {comparison} {words} ({floor:.2f} %). Check the "
        "curve of the loss, then change the learning rate, the length of the training or the data"
    )


def _probability(value: float, floor: float, trials: int) -> float:
    """Return the probability that a guesser with a hit rate of `floor` percent scores at least `value` percent."""
    from scipy.special import betainc  # which takes longer to load than all else here

    right = round(value / 100 * trials)
    return float(betainc(right, trials - right + 1, floor / 100)) if right else 1.0
