"""Small images for pages."""

from __future__ import annotations

import io

from PIL import Image

from dpn_cli.data.decode import Pixels

# Longer side in pixels; qualities of the JPEG, the first of which that gives so few bytes a pixel. Photographs of
# this side have 3 to 7 kB.
SIDE, QUALITIES, DENSITY = 144, (80, 50, 20), 0.4


def thumbnail(pixels: Pixels, side: int = SIDE) -> bytes:
    """Return an image (height, width, 3) as JPEG, its longer side at most `side` pixels.

    Its bytes number at most 0.4 a pixel of a square of that side, for any image.
    """
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    file = io.BytesIO()
    for quality in QUALITIES:
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality)
        if file.tell() <= DENSITY * side**2:
            break
    return file.getvalue()
