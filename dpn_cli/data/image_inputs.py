"""Images as Python code passes them: paths, PIL images, or arrays of pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from dpn_cli.data.decode import Pixels, ReadOptions, read_pixels
from dpn_cli.errors import DpnError

ImageInput = str | Path | Image.Image | np.ndarray[Any, Any] | Tensor
"""A file, a PIL image, or uint8 pixels: (h, w, 3) as an array or (3, h, w) as a tensor."""


def iter_pixels(images: ImageInput | Iterable[ImageInput], reading: ReadOptions) -> Iterator[Pixels]:
    """Yield the pixels (h, w, 3), uint8, of one image or of several.

    Files are decoded by `reading`; PIL images are turned by their EXIF orientation if files are. Raises `DpnError` for
    anything else and for pixels of another shape or type, `ImageError` for files that cannot be read.
    """
    one = isinstance(images, str | Path | Image.Image | np.ndarray | Tensor)
    for number, image in enumerate([images] if one else images):  # type: ignore[arg-type]
        if isinstance(image, str | Path):
            yield read_pixels(Path(image), str(image), reading)
        elif isinstance(image, Image.Image):
            turned = ImageOps.exif_transpose(image) if reading.exif else image
            yield np.asarray(turned.convert("RGB"))
        else:
            yield _check_array(image, number)


def _check_array(image: Any, number: int) -> Pixels:
    """Return an array or tensor as pixels (h, w, 3). Raises `DpnError` for another shape or type."""
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.permute(1, 2, 0).cpu().numpy()
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
        kind, shape = getattr(image, "dtype", type(image).__name__), getattr(image, "shape", "none")
        raise DpnError(
            f"image {number}: {kind}, shape {shape}; pass a path, a PIL image, an array (h, w, 3) of uint8, or a "
            "tensor (3, h, w) of uint8"
        )
    return image
