"""Pairs of images and masks under a shift of the images (``dpn segment eval --shifts``)."""

from __future__ import annotations

from PIL import Image

from dpn_cli.data.decode import Pixels
from dpn_cli.data.shifted_images import image_rng
from dpn_cli.data.shifts import shift_pixels
from tasks.segment.labels import RawMask
from tasks.segment.pairs import Pairs


class ShiftedPairs(Pairs):
    """A split whose images, in their own size, are under a shift; masks stay as they are.

    Random numbers are those of `ShiftedImages`, by the pairs' names.
    """

    def __init__(self, pairs: Pairs, name: str, severity: int, seed: int = 0) -> None:
        self.pairs, self.name, self.severity, self.seed = pairs, name, severity, seed
        self.names, self.sizes, self.reading = pairs.names, pairs.sizes, pairs.reading

    def locate(self, index: int) -> str:
        """Name the location of an image."""
        return self.pairs.locate(index)

    def locate_mask(self, index: int) -> str:
        """Name the location of a mask."""
        return self.pairs.locate_mask(index)

    def open(self, index: int) -> Image.Image:
        """Open an image without the shift, not decoded yet."""
        return self.pairs.open(index)

    def open_mask(self, index: int) -> Image.Image:
        """Open a mask, not decoded yet."""
        return self.pairs.open_mask(index)

    def load(self, index: int) -> tuple[Pixels, RawMask]:
        """Decode a pair and shift its image. Raises `DataError` as `Pairs.load` does."""
        pixels, mask = self.pairs.load(index)
        if self.severity:
            rng = image_rng(self.seed, self.name, self.severity, self.names[index])
            pixels = shift_pixels(pixels, self.name, self.severity, rng)
        return pixels, mask
