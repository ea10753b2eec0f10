"""ADE20K from its archive: the folder that `dpn segment ade20k` reads, and whether it is all there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from dpn_cli.data.archives import ArchiveLayout
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from tasks.segment.labels import LabelRule, read_mask
from tasks.segment.pairs import FolderPairs

# Segmenter, segm/scripts/prepare_ade20k.py; MMSegmentation, mmseg/datasets/ade.py.
ADE20K = ArchiveLayout(
    name="ADE20K",
    archives="ADEChallengeData2016.zip",
    member=re.compile(
        r"(?:ADEChallengeData2016/)?"
        r"((?:images/(?:training|validation)/[^/]+\.jpg|annotations/(?:training|validation)/[^/]+\.png)"
        r"|objectInfo150\.txt|sceneCategories\.txt)"
    ),
    files={
        "images/training": 20_210,
        "annotations/training": 20_210,
        "images/validation": 2_000,
        "annotations/validation": 2_000,
    },
)
RULE = LabelRule(150, 1, 0)


def verify_folder(out: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Pair images with masks, and count the classes of the validation masks.

    Returns the counts, and a line when there are classes without a pixel. Raises `DataError` for an image
    without its mask, a mask without its image, and a mask that is unreadable or has values of no class.
    """
    pairs = {split: FolderPairs(out, split) for split in ("training", "validation")}
    validation, is_used = pairs["validation"], np.zeros(2**16, bool)
    with console.counting("masks of validation", len(validation)) as on_progress:
        for row in range(len(validation)):
            signals.check_here()
            mask = read_mask(validation.open_mask(row), validation.locate_mask(row))
            RULE.labels(mask, validation.locate_mask(row))
            is_used[np.unique(mask)] = True
            on_progress(1)
    classes = int(is_used[1 : 1 + RULE.classes].sum())
    missing = [f"the masks in {out / 'annotations' / 'validation'} have {classes} of the {RULE.classes} classes"]
    counts = {"training": len(pairs["training"]), "validation": len(validation), "classes": classes}
    return counts, missing if classes < RULE.classes else []


def next_step(out: Path) -> str:
    """Return the command that reads the folder."""
    return f"train on it with: dpn segment ade20k --data {out}"
