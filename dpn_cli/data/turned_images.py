"""Images that are stored in another orientation than their EXIF data give, as phones store them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image

from dpn_cli.data.decode import is_stored_turned
from dpn_cli.errors import DataError

SAMPLE = 100


class OpenableImages(Protocol):
    """Images that are opened by their index."""

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet. Raises `DataError`."""


def describe_turned(turned: int, images: int, exif: bool) -> str | None:
    """Return how many of some images are stored turned, and what happens to them; None without any."""
    if not turned:
        return None
    treatment = "are turned; --no-exif leaves them" if exif else "stay so; --exif turns them"
    return f"{turned} of {images} inspected images are stored turned, by their EXIF orientation, and {treatment}"


def describe_turned_sample(images: OpenableImages, count: int, exif: bool) -> str | None:
    """Open up to `SAMPLE` of `count` images, evenly spread, and describe those that are stored turned.

    Unreadable images are left out.
    """
    indices = sorted({int(index) for index in np.linspace(0, count - 1, min(SAMPLE, count))})
    turned, opened = 0, 0
    for index in indices:
        try:
            with images.open(index) as image:
                turned += is_stored_turned(image)
                opened += 1
        except DataError:
            continue
    return describe_turned(turned, opened, exif)
