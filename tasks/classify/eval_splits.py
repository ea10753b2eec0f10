"""Images that `dpn eval` scores: the held-out images of a run, or a split of another data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from dpn_cli.config.paths import DEMOS
from dpn_cli.data.image_source import ImageSource, check_classes, has_split, open_split
from dpn_cli.data.remote import MissingError
from dpn_cli.data.sources.base import Images, LabelledImages, fingerprint
from dpn_cli.data.splits import ClassData, has_validation, open_class_data
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.files import real_path

Split = Literal["train", "val", "test", "all"]
OWN = {
    "val": "the run's own validation images",
    "train": "the images that the run was trained on",
    "all": "all images of the run: trained on, minival and validation",
}
CHANGED = "all images of a data set that has changed since the run: its held-out images are no longer known"


class ConcatImages(Images):
    """The images of several splits, one split after the other."""

    def __init__(self, parts: Sequence[LabelledImages]) -> None:
        self.parts = [part for part in parts if len(part.labels)]
        self.reading = parts[0].reading
        self.starts = [0, *accumulate(len(part.labels) for part in self.parts)]
        self.labels: Sequence[int] = [label for part in self.parts for label in part.labels]
        self.sizes: Sequence[int] = [size for part in self.parts for size in part.sizes]

    def _locate(self, index: int) -> tuple[LabelledImages, int]:
        number = bisect_right(self.starts, index) - 1
        return self.parts[number], index - self.starts[number]

    def locate(self, index: int) -> str:
        """Return the location of an image in its split."""
        part, row = self._locate(index)
        return part.locate(row)

    def key(self, index: int) -> str:
        """Return the name of an image in its split."""
        part, row = self._locate(index)
        return part.key(row)

    def content(self, index: int) -> bytes:
        """Return the stored bytes of an image."""
        part, row = self._locate(index)
        return part.content(row)

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        part, row = self._locate(index)
        return part.open(row)


def run_source(source: ImageSource, facts: Mapping[str, Any], network: str) -> ImageSource:
    """Return the source of the images to score: `source`, or without a location the run's own data.

    ``demo`` stands for the built-in data set that the run was trained on. Raises `DpnError` if neither names a
    location, and `DataError` if the run's data are gone.
    """
    data_config = _data_of_run(facts)
    own_source = data_config.get("source")
    if source.location == "demo" and own_source in DEMOS:
        return replace(source, location=own_source)
    if source.location:
        return source
    if own_source is None:
        raise DpnError(
            f"--data: which images? {network} does not say on which it was trained; name a folder with val/CLASS or "
            "CLASS, hf:OWNER/NAME, wds:PATTERN, or demo"
        )
    if ":" not in own_source and own_source not in DEMOS and not Path(own_source).expanduser().is_dir():
        raise DataError(f"{network}: it was trained on {own_source}, which is not here; name the images with --data")
    return replace(
        source,
        location=own_source,
        image_column=source.image_column or data_config.get("image_column"),
        label_column=source.label_column or data_config.get("label_column"),
    )


def open_part(
    source: ImageSource, split: Split | None, facts: Mapping[str, Any]
) -> tuple[LabelledImages, tuple[str, ...], str | None]:
    """Open the images to score; return them, their classes, and their part of the run's data.

    `facts` are the training's facts in the classifier's file. The run's data are split as in the run, with `val` as the
    default. For other data, None or ``val`` is the validation split, or all images without one; ``all`` is training
    and validation; ``test`` is the test split of any data. Raises `DataError`.
    """
    split_name: Split = split or "val"
    if split_name == "test":
        if not has_split(source, "test"):
            raise DataError(f"--split test: {source.location} has no test split; name its folder with --data")
        images, classes = open_split(source, "test")
        return images, classes, None
    own_part = _open_own_splits(source, split_name, facts)
    if own_part is not None:
        part = (
            ConcatImages([own_part.train, own_part.minival, own_part.val])
            if split_name == "all"
            else getattr(own_part, split_name)
        )
        return part, own_part.classes, OWN[split_name]
    if split_name == "all" and has_split(source, "val"):
        (train, classes), (val, val_classes) = open_split(source, "train"), open_split(source, "val")
        check_classes(source, classes, val_classes)
        return ConcatImages([train, val]), classes, None
    split_images, classes = open_split(source, "train" if split_name == "all" else split_name)
    changed = split_name == "val" and not has_split(source, "val") and _has_same_location(source, facts)
    return split_images, classes, CHANGED if changed else None


def _data_of_run(facts: Mapping[str, Any]) -> dict[str, Any]:
    return (facts.get("config") or {}).get("data") or {}


def _has_same_location(source: ImageSource, facts: Mapping[str, Any]) -> bool:
    sources = source.location, _data_of_run(facts).get("source") or ""
    return sources[0] == sources[1] or len(set(map(real_path, sources))) == 1


def _open_own_splits(source: ImageSource, split: Split, facts: Mapping[str, Any]) -> ClassData | None:
    """Split `source` as the run split its data; None where these are not the run's data, image for image."""
    data_config = _data_of_run(facts)
    run_fraction = replace(source, val_fraction=data_config.get("val_fraction"))
    if not data_config or (split == "val" and has_validation(run_fraction) and not data_config.get("val_source")):
        return None  # its own validation split needs no rule, and counting all training images takes time
    run_data = ImageSource(
        source.location,
        data_config.get("val_source"),
        data_config.get("val_fraction"),
        source.image_column or data_config.get("image_column"),
        source.label_column or data_config.get("label_column"),
        source.reading,
    )
    try:
        chooses = (facts.get("config") or {}).get("select") == "best"
        data = open_class_data(run_data, data_config.get("minival"), chooses=chooses)
    except (DataError, MissingError):
        return None
    fingerprints = {name: fingerprint(getattr(data, name)) for name in ("train", "minival", "val")}
    return data if fingerprints == facts.get("data") else None
