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
    chosen = split or "val"
    if chosen == "all":
        if has_split(source, "val") or has_split(source, "test"):
            raise DataError(f"--split all: {source.place} has splits of its own; choose train, val or test")
        return open_split(source, "train"), None
    own = _own_pairs(source, chosen, facts) if chosen in OWN else None
    if own is not None:
        return own[chosen], OWN[chosen]
    return open_split(source, chosen), None


def _own_pairs(source: CaptionSource, split: str, facts: Mapping[str, Any]) -> dict[str, CaptionedImages] | None:
    """Split `source` as the run split its data; None where these are not the run's pairs, image for image."""
    before = (facts.get("config") or {}).get("data") or {}
    if not before or (split == "val" and has_split(source, "val") and not before.get("val_source")):
        return None
    again = replace(
        source,
        val_place=before.get("val_source"),
        val_fraction=before.get("val_fraction"),
        images=source.images or before.get("images"),
        image_column=source.image_column or before.get("image_column"),
        caption_column=source.caption_column or before.get("caption_column"),
        skip_bad=bool(before.get("skip_bad_images")),
    )
    try:
        pairs = dict(zip(("train", "val"), open_pairs(again), strict=True))
    except (DataError, MissingError):
        return None
    return pairs if {name: data_fingerprint(part) for name, part in pairs.items()} == facts.get("data") else None
