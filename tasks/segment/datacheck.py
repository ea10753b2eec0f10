"""``dpn data check ade20k`` and ``folder``: all images with their masks, before anything is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dpn_cli.data.decode import decode
from dpn_cli.data.findings import DataFindings
from dpn_cli.data.loader_sizing import check_batch
from dpn_cli.data.validate import ImageRecord, SplitInspection, describe_format, describe_pixels
from dpn_cli.errors import DataError
from tasks.segment.config import SegmentConfig
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.pairs import Pairs, fingerprint, open_pairs, take
from tasks.segment.palette import Class, classes_of, rule_of

# Images of ADE20K's training and validation splits.
ADE20K_IMAGES = {"train": 20_210, "val": 2_000}
# Masks from which on values that never occur say something.
ENOUGH = 100
# Side of crops where the config leaves it to the checkpoint.
CROP = 512


def examine(config: SegmentConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Look at all images and masks of a config; returns the fingerprints that a result carries."""
    data, fingerprints, parts = config.data, dict[str, Any](), list[SplitInspection]()
    classes, rule = classes_of(data), rule_of(data)
    for name in ("train", "val"):
        pairs = findings.open(partial(open_pairs, data, name))
        if pairs is None:
            continue
        whole, pairs = len(pairs), take(pairs, data.fraction) if name == "train" else pairs
        part = findings.images(name, pairs.where, partial(see_pair, pairs, rule), len(pairs))
        _note_labels(part, classes, rule, findings)
        parts.append(part)
        fingerprints[name] = fingerprint(pairs)
        if data.dataset == "ade20k" and not config.demo and whole != ADE20K_IMAGES[name]:
            findings.warnings.append(
                f"{name}: {whole} images, ADE20K has {ADE20K_IMAGES[name]}: the score is not comparable with "
                "published ones"
            )
    findings.same(*parts)
    if "train" in fingerprints:
        size = config.backbone.image_size or CROP
        height, width = (size, size) if isinstance(size, int) else size
        bytes_each = 4 * height * width  # three of the image, one of the mask
        check_batch(findings, len(parts[0].digests), config.batch_size, ranks, config.runtime.workers, bytes_each)
    return fingerprints


def see_pair(pairs: Pairs, rule: LabelRule, row: int) -> ImageRecord:
    """Decode an image and its mask as a training does; `counts` are the pixels by label, 255 for ignored ones.

    Raises `DataError` when the image is unreadable; what is wrong with the mask is in the result.
    """
    image = pairs.open(row)
    stored = describe_format(image)
    pixels = decode(image, pairs.where(row), pairs.reading.decoder)
    try:
        mask = pairs.load_mask(row, (pixels.shape[0], pixels.shape[1]))
    except DataError as error:
        return describe_pixels(pixels, stored, wrong=[str(error)])
    counts = np.bincount(mask.ravel())
    values = np.flatnonzero(counts).tolist()
    if rule.unknown(values):
        return describe_pixels(pixels, stored, wrong=[rule.explain(values, pairs.where_mask(row))])
    by_label: dict[int, int] = {}
    for value in values:
        label = int(rule.table[value])
        by_label[label] = by_label.get(label, 0) + int(counts[value])
    return describe_pixels(pixels, stored, by_label)


def _note_labels(part: SplitInspection, classes: tuple[Class, ...], rule: LabelRule, findings: DataFindings) -> None:
    """Describe the pixels of each class, and warn of classes without any and of labels that look shifted by one."""
    pixels = [part.counts[label] for label in range(len(classes))]
    without = [one.name for one, count in zip(classes, pixels, strict=True) if not count]
    total = sum(pixels) + part.counts[IGNORE]
    findings.splits[part.name]["labels"] = {
        "classes": len(classes),
        "pixels": pixels,
        "masks": [part.holding[label] for label in range(len(classes))],
        "ignored": part.counts[IGNORE] / total if total else 0.0,
        "without": without,
    }
    if without:
        shown = ", ".join(without[:8]) + (f" and {len(without) - 8} more" if len(without) > 8 else "")
        findings.warnings.append(f"{part.name}: classes without a pixel: {shown}")
    if rule.ignore == 0 and len(part.digests) >= ENOUGH and not part.counts[IGNORE] and not pixels[-1]:
        findings.warnings.append(
            f"{part.name}: no mask holds 0, which means ignored, or {rule.offset + len(classes) - 1}, the last class: "
            "the values may have been shifted by one already"
        )
