"""Data checked before anything is trained: a sample of masks, their values and their sizes, and what crops show."""

from __future__ import annotations

import numpy as np

from dpn_cli.errors import DataError
from dpn_cli.run.baseline_warnings import crop_warning
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.pairs import Pairs
from tasks.segment.transforms import SegmentAugmentation, fit_into

SAMPLE = 200


def check_masks(pairs: Pairs, rule: LabelRule, sample: int = SAMPLE) -> set[int]:
    """Read `sample` masks spread over a split; returns the labels that occur in them, 255 (ignored) left out.

    Raises `DataError` naming the first mask whose values stand for no class, with a guess from the values of all, the
    first mask that is an image in colours, or of another size than its image.
    """
    values: set[int] = set()
    unknown_mask: str | None = None
    for index in _spread_indices(pairs, sample):
        location = pairs.locate_mask(index)
        with pairs.open(index) as image:
            mask = pairs.load_mask(index, (image.height, image.width))
        values_here = np.unique(mask).tolist()
        values.update(values_here)
        unknown_mask = unknown_mask or (location if rule.unknown(values_here) else None)
    if unknown_mask:
        raise DataError(rule.explain(sorted(values), unknown_mask))
    labels = {int(rule.table[value]) for value in values} - {IGNORE}
    if not labels:
        raise DataError(f"{pairs.locate_mask(0)} and the masks after it: every pixel is ignored; allowed are {rule}")
    return labels


def check_crops(pairs: Pairs, augmentation: SegmentAugmentation, sample: int = SAMPLE) -> str | None:
    """Return a warning when training crops show too little of a split's images; reads no more than their sizes.

    The images have the size that they are cropped at, in the middle of the random ratios.
    """
    longest, shortest = (int(cap * sum(augmentation.ratio) / 2) for cap in augmentation.scale)
    sizes = []
    for index in _spread_indices(pairs, sample):
        with pairs.open(index) as image:
            sizes.append(fit_into((image.height, image.width), longest, shortest))
    return crop_warning(augmentation.crop, sizes)


def _spread_indices(pairs: Pairs, sample: int) -> list[int]:
    """Return up to `sample` positions in a split, evenly spread from the first to the last."""
    return sorted({int(index) for index in np.linspace(0, len(pairs) - 1, min(sample, len(pairs)))})
