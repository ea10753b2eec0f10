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
    """Return the path of the captions of ``train`` or ``val``."""
    return out / "annotations" / f"captions_{split}2017.json"


def verify_folder(out: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Find the image of every caption; return the numbers of both, and a line for each missing thing.

    Raises `DataError` for an unreadable file of captions.
    """
    counts, missing = dict[str, Any](), list[str]()
    for split in ("train", "val"):
        path = captions(out, split)
        if not path.is_file():
            missing.append(f"{path} is missing; it is in annotations_trainval2017.zip")
        elif (out / f"{split}2017").is_dir():  # a missing folder is already counted as missing files
            data = read_coco(path, path.parent, None, skip_bad=True)
            counts[split] = {"images": len(data.captions), "captions": sum(map(len, data.captions))}
            if data.dropped:
                missing.append(f"{path} names {data.dropped} images that are missing or have no text")
    return counts, missing


def next_step(out: Path) -> str:
    """Return the command that reads the folder."""
    return f"train on it with: dpn lit train --data {captions(out, 'train')} --val-data {captions(out, 'val')}"
