"""COCO's captions from its archives: the folder that `dpn lit train` reads, and whether it is all there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dpn_cli.data.archives import ArchiveLayout
from dpn_cli.run.console import Console
from tasks.lit.caption_files import read_coco

COCO = ArchiveLayout(
    name="COCO",
    archives="train2017.zip, val2017.zip and annotations_trainval2017.zip",
    member=re.compile(r"((?:train|val)2017/[^/]+\.jpg|annotations/[a-z_]+_(?:train|val)2017\.json)"),
    files={"train2017": 118_287, "val2017": 5_000},
)


def captions(out: Path, split: str) -> Path:
    """Return the place of the captions of ``train`` or ``val``."""
    return out / "annotations" / f"captions_{split}2017.json"


def look_at(out: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Find the image of every caption; returns the numbers of both, and a line for all that is not there.

    Raises `DataError` for an unreadable file of captions.
    """
    found, short = dict[str, Any](), list[str]()
    for split in ("train", "val"):
        place = captions(out, split)
        if not place.is_file():
            short.append(f"{place} is missing; it is in annotations_trainval2017.zip")
        elif (out / f"{split}2017").is_dir():  # where it is not, the number of its files says so
            read = read_coco(place, place.parent, None, skip_bad=True)
            found[split] = {"images": len(read.captions), "captions": sum(map(len, read.captions))}
            if read.dropped:
                short.append(f"{place} names {read.dropped} images that are missing or have no text")
    return found, short


def next_step(out: Path) -> str:
    """Return the command that reads the folder."""
    return f"train on it with: dpn lit train --data {captions(out, 'train')} --val-data {captions(out, 'val')}"
