"""``dpn data check lit``: all images with their sentences, before anything is encoded."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.loader_sizing import check_batch
from dpn_cli.data.validate import inspect_image
from dpn_cli.run.console import count_noun
from tasks.lit.captions import CaptionedImages
from tasks.lit.config import LitConfig
from tasks.lit.data import open_pairs
from tasks.lit.final_zeroshot import source_of
from tasks.lit.train import fingerprints

# Fraction of the images with the same sentence from which on the loss has too many false negatives.
SHARED_FRACTION = 0.01


def check_data(config: LitConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Inspect all images and sentences of a config; return the fingerprints that a result carries."""
    strict_config = config.model_copy(update={"data": config.data.model_copy(update={"skip_bad_images": False})})
    pairs = findings.open(lambda: open_pairs(source_of(strict_config)))
    if pairs is None:
        return {}
    inspections = []
    for name, split in zip(("train", "val"), pairs, strict=True):
        inspect = partial(inspect_image, split)
        inspections.append(findings.inspect_images(name, split.locate, inspect, len(split.captions)))
        findings.splits[name]["captions"] = _count_captions(name, split, findings)
    findings.add_duplicates(*inspections)
    check_batch(findings, len(pairs[0].captions), config.batch_size, ranks, config.runtime.workers)
    return fingerprints(*pairs)


def _count_captions(name: str, split: CaptionedImages, findings: DataFindings) -> dict[str, int]:
    """Count a split's sentences, and warn of sentences that many images share."""
    numbers = [len(captions) for captions in split.captions]
    findings.notes.append(f"{name}: {sum(numbers)} sentences, {min(numbers)} to {max(numbers)} with an image")
    images_with = Counter(caption for captions in split.captions for caption in set(captions))
    frequent = {
        caption: count for caption, count in images_with.items() if count > max(1, SHARED_FRACTION * len(numbers))
    }
    if frequent:
        caption, count = max(frequent.items(), key=lambda item: item[1])
        findings.warnings.append(
            f"{name}: {count_noun(len(frequent), 'sentence')} with more than {SHARED_FRACTION:.0%} of the images each, "
            f"{caption[:60]!r} with {count}: the loss holds every other image with it for wrong"
        )
    return {"sentences": sum(numbers), "fewest": min(numbers), "most": max(numbers), "different": len(images_with)}
