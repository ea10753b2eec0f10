"""Record of the images that a network was trained on, identified by content, not by name."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpn_cli.data.sources.base import LabelledImages, is_remote
from dpn_cli.errors import DataError
from dpn_cli.run import distributed, signals
from dpn_cli.run.distributed import World

# Most images that are read, of a training set and of a split that is looked up: 160 kB of digests.
MAX_IMAGES = 20_000
DIGEST_BYTES = 6  # bytes: with 20,000 images on either side, two unequal ones agree once in 700,000 evaluations


@dataclass(frozen=True)
class Overlap:
    """The number of a split's images that a network was trained on; an estimate when a sample was compared."""

    images: int
    of: int
    estimated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {"images": self.images, "of": self.of, "estimated": self.estimated}

    def warning(self) -> str | None:
        """Warn that the network was trained on some of the images; None when all are new to it."""
        if not self.images:
            return None
        about = "about " if self.estimated else ""
        return (
            f"the network was trained on {about}{self.images} of these {self.of} images (the contents of the files are "
            "equal): the scores do not tell how well it does on new images"
        )


def record(split: LabelledImages) -> dict[str, Any]:
    """Return the description of a training set for a network's file: counts, and digests of the content.

    Describes a sample of sets with more than `MAX_IMAGES` images. Unreadable images are left out.
    """
    rows = _sample(split, 0)
    digests = sorted(filter(None, (_hash_image(split, row) for row in rows)))
    return {
        "images": len(split.labels),
        "described": len(rows),
        "digests": base64.b64encode(b"".join(digests)).decode(),
    }


def count_overlap(split: LabelledImages, described: Mapping[str, Any] | None, world: World) -> Overlap | None:
    """Return how many images of a split are described by a `record`; None without one.

    All ranks share the work and must call it together. Raises `StoppedError` when a signal asks to stop.
    """
    if described is None:
        return None
    digests = base64.b64decode(described["digests"])
    training_digests = {digests[index : index + DIGEST_BYTES] for index in range(0, len(digests), DIGEST_BYTES)}
    rows = _sample(split, 1)  # another seed than the record's: two samples of one data set must be independent
    matches = 0
    for row in rows[world.rank :: world.size]:
        signals.check_here()
        matches += _hash_image(split, row) in training_digests
    matches = int(distributed.reduce_over_ranks(torch.tensor(matches)))
    share = len(rows) * described["described"] / max(1, len(split.labels) * described["images"])
    count = min(len(split.labels), round(matches / share)) if matches else 0
    return Overlap(count, len(split.labels), share < 1)


def _sample(split: LabelledImages, seed: int) -> list[int]:
    """Return the images to read, drawn at random; of shards behind a URL, all images of some."""
    count = len(split.labels)
    if split.shards and is_remote(split):
        turn = np.random.default_rng(seed).permutation(len(split.shards.paths))
        return sorted(np.argsort(turn[split.shards.of], kind="stable")[:MAX_IMAGES].tolist())
    rows: list[int] = np.random.default_rng(seed).permutation(count)[:MAX_IMAGES].tolist()
    return sorted(rows)


def _hash_image(split: LabelledImages, row: int) -> bytes | None:
    try:
        return hashlib.blake2b(split.content(row), digest_size=DIGEST_BYTES).digest()
    except DataError:
        return None
