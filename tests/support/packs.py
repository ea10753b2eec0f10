"""A pack of images in several shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources import pack_writer
from dpn_cli.data.sources.pack_writer import PackOptions, pack
from dpn_cli.data.splits import hash_order
from support.images import write_class_folders

SHARDS, SHARD_IMAGES = 8, 12


TINY_RUN = ("--arch", "mu/8", "--checkpoint", "none", "--image-size", "16", "-b", "8", "-j", "0", "-q")


def write_pack(root: Path) -> Path:
    """Pack 96 training images in 8 shards into a folder's ``pack``; returns the folder."""
    for split, item in (("train", 32), ("val", 4)):
        write_class_folders(root / "photos" / split, each=item)
    splits = {name: open_split(ImageSource(str(root / "photos")), name) for name in ("train", "val")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_writer, "SHARD_IMAGES", SHARD_IMAGES)
        ordered = {name: (split, hash_order(split)) for name, (split, _) in splits.items()}
        options: Any = {"workers": 1, "skip_bad": False, "progress": lambda text: None}
        pack(ordered, splits["train"][1], root / "pack", PackOptions(size=None), **options)
    return root
