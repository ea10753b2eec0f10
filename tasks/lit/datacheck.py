"""``dpn data check lit``: all images with their sentences, before anything is encoded."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.validate import inspect_image
from dpn_cli.run.console import count_noun
from tasks.lit.captions import CaptionedImages
from tasks.lit.config import LitConfig
from tasks.lit.data import open_pairs
from tasks.lit.final_zeroshot import source_of
from tasks.lit.train import fingerprints

# Share of the images with one sentence from which on the loss takes many right answers for wrong ones.
SHARED = 0.01


def examine(config: LitConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Look at all images and sentences of a config; returns the fingerprints that a result carries."""
    strict = config.model_copy(update={"data": config.data.model_copy(update={"skip_bad_images": False})})
    pairs = findings.open(lambda: open_pairs(source_of(strict)))
    if pairs is None:
        return {}
    parts = []
    for name, split in zip(("train", "val"), pairs, strict=True):
        parts.append(findings.images(name, split.where, partial(inspect_image, split), len(split.captions)))
        findings.splits[name]["captions"] = _describe(name, split, findings)
    findings.same(*parts)
    if config.batch_size > len(pairs[0].captions):
        count = count_noun(len(pairs[0].captions), "image")
        findings.warnings.append(f"a batch of {config.batch_size} is more than the {count} to train on")
    if config.batch_size % ranks:
        findings.problem("batch", f"--batch-size {config.batch_size}: {ranks} ranks do not divide it")
    return fingerprints(*pairs)


def _describe(name: str, split: CaptionedImages, findings: DataFindings) -> dict[str, int]:
    """Count a split's sentences, and warn of one that stands with many images."""
    numbers = [len(captions) for captions in split.captions]
    findings.notes.append(f"{name}: {sum(numbers)} sentences, {min(numbers)} to {max(numbers)} with an image")
    same = Counter(caption for captions in split.captions for caption in set(captions))
    often = {caption: count for caption, count in same.items() if count > max(1, SHARED * len(numbers))}
    if often:
        caption, count = max(often.items(), key=lambda item: item[1])
        findings.warnings.append(
            f"{name}: {count_noun(len(often), 'sentence')} with more than {SHARED:.0%} of the images each, "
            f"{caption[:60]!r} with {count}: the loss holds every other image with it for wrong"
        )
    return {"sentences": sum(numbers), "fewest": min(numbers), "most": max(numbers), "different": len(same)}
