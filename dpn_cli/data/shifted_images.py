"""A split of labelled images under a shift, computed as each image is read."""

from __future__ import annotations

import hashlib
import os

import numpy as np
from PIL import Image

from dpn_cli.config.shift_options import SEVERITIES, SHIFTS
from dpn_cli.data.crops import scale_to_short_side
from dpn_cli.data.decode import Pixels
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.data.sources.base import Images, LabelledImages, ShardIndex
from dpn_cli.engine.seeds import fold


class ShiftedImages(Images):
    """A split under a shift: each image is reduced to a shorter side of `side` pixels at most, and shifted.

    The random numbers of an image depend on `seed`, the shift, the severity and the image's name alone. The severity 0
    leaves images as they are, but for their size.
    """

    def __init__(self, split: LabelledImages, name: str, severity: int, side: int, seed: int = 0) -> None:
        self.split, self.name, self.severity, self.side, self.seed = split, name, severity, side, seed
        self.reading, self.labels, self.sizes = split.reading, split.labels, split.sizes

    @property
    def shards(self) -> ShardIndex | None:
        """Return the file of each image; None for images in files of their own."""
        return self.split.shards

    def locate(self, index: int) -> str:
        """Name the location of an image for messages."""
        return self.split.locate(index)

    def key(self, index: int) -> str:
        """Return the name of an image inside the data set."""
        return self.split.key(index)

    def open(self, index: int) -> Image.Image:
        """Open the image without the shift, not decoded yet."""
        return self.split.open(index)

    def pixels(self, index: int) -> Pixels:
        """Decode an image and shift it. Raises `DataError` with its location when it is unreadable."""
        pixels = reduce_to(self.split.pixels(index), self.side)
        if not self.severity:
            return pixels
        return shift_pixels(
            pixels, self.name, self.severity, image_rng(self.seed, self.name, self.severity, self.key(index))
        )


def image_rng(seed: int, name: str, severity: int, image: str) -> np.random.Generator:
    """Return the random numbers of an image, by its name inside the data set, under a shift and a severity."""
    stream = list(SHIFTS).index(name) * len(SEVERITIES) + severity
    digest = hashlib.blake2b(os.fsencode(image), digest_size=7).digest()
    return np.random.Generator(np.random.PCG64(fold(seed, stream, int.from_bytes(digest))))


def shift_side(size: tuple[int, int], resize_side: int | None = None) -> int:
    """Return the shorter side in pixels to which images are reduced before a shift: what a network crops from.

    Without a side of its own it is in the proportion of 256 to 224 of the network's size.
    """
    return resize_side or round(max(size) * 256 / 224)


def reduce_to(pixels: Pixels, side: int) -> Pixels:
    """Return an image whose shorter side is `side` pixels at most, reduced by averaging."""
    height, width = pixels.shape[:2]
    if min(height, width) <= side:
        return pixels
    new_height, new_width = scale_to_short_side((height, width), side)
    return np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BOX))
