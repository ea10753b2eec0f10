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
# Fewest masks that show whether a value is in use.
ENOUGH_MASKS = 100
# Side of crops where the config leaves it to the checkpoint.
CROP = 512


def check_data(config: SegmentConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Inspect all images and masks of a config; return the fingerprints that a result carries."""
    data, fingerprints, inspections = config.data, dict[str, Any](), list[SplitInspection]()
    classes, rule = classes_of(data), rule_of(data)
    for name in ("train", "val"):
        pairs = findings.open(partial(open_pairs, data, name))
        if pairs is None:
            continue
        count, pairs = len(pairs), take(pairs, data.fraction) if name == "train" else pairs
        inspection = findings.inspect_images(name, pairs.locate, partial(inspect_pair, pairs, rule), len(pairs))
        _describe_labels(inspection, classes, rule, findings)
        inspections.append(inspection)
        fingerprints[name] = fingerprint(pairs)
        if data.dataset == "ade20k" and not config.demo:
            findings.compare_count(name, "images", count, "ADE20K", ADE20K_IMAGES[name])
    findings.add_duplicates(*inspections)
    if "train" in fingerprints:
        size = config.backbone.image_size or CROP
        height, width = (size, size) if isinstance(size, int) else size
        pair_bytes = 4 * height * width  # three of the image, one of the mask
        count = len(inspections[0].digests)
        check_batch(findings, count, config.batch_size, ranks, config.runtime.workers, pair_bytes)
    return fingerprints


def inspect_pair(pairs: Pairs, rule: LabelRule, row: int) -> ImageRecord:
    """Decode an image and its mask as a training does; `counts` are the pixels by label, 255 for ignored ones.

    Raises `DataError` when the image is unreadable; problems with the mask are in the result.
    """
    image = pairs.open(row)
    image_format = describe_format(image)
    pixels = decode(image, pairs.locate(row), pairs.reading.decoder)
    try:
        mask = pairs.load_mask(row, (pixels.shape[0], pixels.shape[1]))
    except DataError as error:
        return describe_pixels(pixels, image_format, problems=[str(error)])
    counts = np.bincount(mask.ravel())
    values = np.flatnonzero(counts).tolist()
    if rule.unknown(values):
        return describe_pixels(pixels, image_format, problems=[rule.explain(values, pairs.locate_mask(row))])
    by_label: dict[int, int] = {}
    for value in values:
        label = int(rule.table[value])
        by_label[label] = by_label.get(label, 0) + int(counts[value])
    return describe_pixels(pixels, image_format, by_label)


def _describe_labels(
    split: SplitInspection, classes: tuple[Class, ...], rule: LabelRule, findings: DataFindings
) -> None:
    """Describe the pixels of each class, and warn of classes without any and of labels that look shifted by one."""
    pixels = [split.counts[label] for label in range(len(classes))]
    absent_classes = [label_class.name for label_class, count in zip(classes, pixels, strict=True) if not count]
    total = sum(pixels) + split.counts[IGNORE]
    findings.splits[split.name]["labels"] = {
        "classes": len(classes),
        "pixels": pixels,
        "masks": [split.images_with[label] for label in range(len(classes))],
        "ignored": split.counts[IGNORE] / total if total else 0.0,
        "without": absent_classes,
    }
    if absent_classes:
        names = ", ".join(absent_classes[:8]) + (
            f" and {len(absent_classes) - 8} more" if len(absent_classes) > 8 else ""
        )
        findings.warnings.append(f"{split.name}: classes without a pixel: {names}")
    if rule.ignore == 0 and len(split.digests) >= ENOUGH_MASKS and not split.counts[IGNORE] and not pixels[-1]:
        findings.warnings.append(
            f"{split.name}: no mask holds 0, which means ignored, or {rule.offset + len(classes) - 1}, the last class: "
            "the values may have been shifted by one already"
        )
