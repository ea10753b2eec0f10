"""Captioned images that `dpn lit eval` scores: those that a run held out, or a split of another data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpn_cli.data.remote import MissingError
from dpn_cli.errors import DataError
from tasks.lit.cache import data_fingerprint
from tasks.lit.captions import CaptionedImages
from tasks.lit.data import CaptionSource, has_split, open_pairs, open_split

OWN = {"val": "the pairs that the run held out", "train": "the pairs that the run was trained on"}


def open_part(source: CaptionSource, split: str | None, facts: Mapping[str, Any]) -> tuple[CaptionedImages, str | None]:
    """Open the pairs to score; returns them, and which of a run's pairs they are (None for another data set's).

    `facts` are what the towers' file tells of their training. Data that are the run's are split as the run did, with
    ``val`` as the default; ``all`` are those of a data set without splits of its own. Raises `DataError`.
    """
    split_name = split or "val"
    if split_name == "all":
        if has_split(source, "val") or has_split(source, "test"):
            raise DataError(f"--split all: {source.location} has splits of its own; choose train, val or test")
        return open_split(source, "train"), None
    is_run_split = split_name in OWN and not source.val_location
    held_out_pairs = _split_as_run(source, split_name, facts) if is_run_split else None
    if held_out_pairs is not None:
        return held_out_pairs[split_name], OWN[split_name]
    return open_split(source, split_name), None


def _split_as_run(source: CaptionSource, split: str, facts: Mapping[str, Any]) -> dict[str, CaptionedImages] | None:
    """Split `source` as the run split its data; None where these are not the run's pairs, image for image."""
    data_config = (facts.get("config") or {}).get("data") or {}
    if not data_config or (split == "val" and has_split(source, "val") and not data_config.get("val_source")):
        return None
    original = replace(
        source,
        val_location=data_config.get("val_source"),
        val_fraction=data_config.get("val_fraction"),
        images=source.images or data_config.get("images"),
        image_column=source.image_column or data_config.get("image_column"),
        caption_column=source.caption_column or data_config.get("caption_column"),
        skip_bad=bool(data_config.get("skip_bad_images")),
    )
    try:
        pairs = dict(zip(("train", "val"), open_pairs(original), strict=True))
    except (DataError, MissingError):
        return None
    return pairs if {name: data_fingerprint(part) for name, part in pairs.items()} == facts.get("data") else None
