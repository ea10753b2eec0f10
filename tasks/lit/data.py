"""Captioned images that a run trains on and is scored on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpn_cli.config.paths import CAPTIONS
from dpn_cli.config.urls import is_hub, is_shards
from dpn_cli.data.decode import DEFAULT_READ_OPTIONS, ReadOptions
from dpn_cli.data.sources import synthetic
from dpn_cli.data.sources.hub import load_hub, parse_hub_source
from dpn_cli.data.sources.synthetic import SceneSplit
from dpn_cli.data.splits import hash_order
from dpn_cli.errors import DataError
from tasks.lit.caption_files import find_splits_in_file, read_coco, read_folder, read_table
from tasks.lit.captions import CaptionedImages, HubCaptions, SceneCaptions, ShardCaptions, Subset

# Karpathy's splits: the images that COCO's validation set lends to training are "restval".
KARPATHY = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}
HUB = {"train": ("train",), "val": ("validation", "val", "valid", "test"), "test": ("test", "validation", "val")}
# Held out where a data set has no validation images: a hundredth, at least 50 or a tenth where that is less, and not
# more than COCO's test split has.
HELD_OUT_SHARE, HELD_OUT_LEAST, HELD_OUT_MOST_SHARE, HELD_OUT_MOST = 0.01, 50, 0.1, 5000
# Numbers of scenes; the last ones are far from any that another demo trains on.
DEMO_SPLITS = {"train": (0, 8000), "val": (900_000, 901_000), "test": (900_000, 901_000)}


@dataclass(frozen=True)
class CaptionSource:
    """Location of captioned images, by ``--data`` and related options.

    `location` is a .csv, .tsv or .json file, a folder, ``hf:NAME[:CONFIGURATION]``, ``wds:PATTERN``, the URL of
    shards, or ``demo``.
    """

    location: str
    val_location: str | None = None
    val_fraction: float | None = None
    images: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    skip_bad: bool = False
    reading: ReadOptions = DEFAULT_READ_OPTIONS


def open_pairs(source: CaptionSource) -> tuple[CaptionedImages, CaptionedImages]:
    """Return the images to train on, and the ones to score retrieval on: the data set's own, or held out."""
    if source.val_location or has_split(source, "val"):
        return open_split(source, "train"), open_split(source, "val")
    full_split = open_split(source, "train")
    count = len(full_split.captions)
    share = max(int(count * HELD_OUT_SHARE), min(HELD_OUT_LEAST, int(count * HELD_OUT_MOST_SHARE)))
    held_out = min(share, HELD_OUT_MOST) if source.val_fraction is None else round(count * source.val_fraction)
    if not 0 < held_out < count:
        raise DataError(
            f"--data {source.location}: {count} images are too few to hold some out; name others with --val-data"
        )
    order = hash_order(full_split)
    train = Subset(full_split, np.sort(order[:-held_out]))
    train.dropped = full_split.dropped
    return train, Subset(full_split, np.sort(order[-held_out:]))


def has_split(source: CaptionSource, split: str) -> bool:
    """Return whether a data set itself says which pairs are ``train``, ``val`` or ``test``, and has such pairs."""
    location = source.location
    if location == "demo":
        return True
    if is_hub(location):
        return _hub_split(location, split) is not None
    return location.endswith(".json") and not find_splits_in_file(Path(location).expanduser()).isdisjoint(
        KARPATHY[split]
    )


def open_split(source: CaptionSource, split: str) -> CaptionedImages:
    """Open ``train``, ``val`` or ``test`` of a data set; one without splits is opened whole. Raises `DataError`."""
    captioned = _open(source, split)
    captioned.reading = source.reading
    return captioned


def _open(source: CaptionSource, split: str) -> CaptionedImages:
    location = source.val_location if source.val_location and split != "train" else source.location
    if location == "demo":
        return SceneCaptions(*DEMO_SPLITS[split])
    if is_shards(location):
        return ShardCaptions(location.removeprefix("wds:"), source.skip_bad)
    if is_hub(location):
        name, config = parse_hub_source(location)
        split_name = _hub_split(location, split) or split
        return HubCaptions(name, config, split_name, source.image_column, source.caption_column, source.skip_bad)
    path = Path(location).expanduser()
    root = Path(source.images).expanduser() if source.images else path if path.is_dir() else path.parent
    if path.is_dir():
        return read_folder(path, source.image_column, source.caption_column, source.skip_bad)
    if not path.is_file():
        raise DataError(f"--data {location}: {CAPTIONS}")
    if path.suffix == ".json":
        return read_coco(path, root, KARPATHY[split] if find_splits_in_file(path) else None, source.skip_bad)
    return read_table(path, root, source.image_column, source.caption_column, source.skip_bad)


def _hub_split(location: str, split: str) -> str | None:
    splits = load_hub(*parse_hub_source(location), True)
    return next((name for name in HUB[split] if name in splits), None)


class SceneClasses(SceneSplit):
    """Held-out scenes with what the main object is: one of the 24 pairs of a colour and a shape."""

    classes = tuple(f"{color} {shape}" for color in synthetic.COLORS for shape in synthetic.SHAPES)

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        main_objects = [synthetic.demo_scene(number).objects[0] for number in range(start, stop)]
        self.labels: Sequence[int] = [self.classes.index(f"{main.color} {main.shape}") for main in main_objects]
        self.sizes: Sequence[int] = [3 * synthetic.SCENE_SIZE**2] * len(main_objects)
