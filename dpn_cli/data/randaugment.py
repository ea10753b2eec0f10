"""RandAugment with the operations of big_vision (pp/archive/autoaugment.py), on TensorFlow, quirks and all.

Sixteen operations, each drawn with the same probability and always applied. Where torchvision and timm differ:
geometric operations take the nearest pixel and fill with grey, translation is in pixels, Contrast blends with a grey
that depends on the image's area and not on its content, the threshold of Solarize wraps at 256, Posterize keeps at
least one bit, and magnitude 0 is not the identity. Images are uint8 (3, h, w); pixels are (row, column).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Image = npt.NDArray[np.uint8]
Centre = tuple[int, int]

SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
FILL = 128
# distort_image_with_randaugment's level range and constants.
MAX_LEVEL, TRANSLATE, CUTOUT = 10, 100, 40
_levels = np.arange(256, dtype=np.float32)


def rand_augment(image: Tensor, layers: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """Apply `layers` random operations of a magnitude (0 to 10, or above) to a uint8 image (3, h, w)."""
    pixels = image.numpy()
    names = tuple(OPERATIONS)
    for operation_draw, sign_draw, row, column in torch.rand(layers, 4, generator=generator).tolist():
        centre = int(row * pixels.shape[1]), int(column * pixels.shape[2])
        pixels = apply(
            pixels, names[int(operation_draw * len(names))], magnitude, negative=sign_draw < 0.5, centre=centre
        )
    return torch.from_numpy(np.ascontiguousarray(pixels))


def apply(image: Image, name: str, magnitude: float, *, negative: bool, centre: Centre) -> Image:
    """Apply one of `OPERATIONS`; `negative` turns the `SIGNED` ones around, `centre` is where Cutout cuts."""
    share = magnitude / MAX_LEVEL
    return OPERATIONS[name](image, -share if negative and name in SIGNED else share, centre)


def _lookup(table: npt.NDArray[Any], image: Image) -> Image:
    """Map grey levels by a table of 256 values, truncated to bytes."""
    mapped: Image = np.clip(table, 0, 255).astype(np.uint8)[image]
    return mapped


def _posterize(image: Image, share: float) -> Image:
    bits = min(max(int(share * 4), 1), 8)  # TensorFlow shifts a byte by at most seven
    return image & np.uint8(256 - (1 << (8 - bits)))


def _solarize(image: Image, share: float) -> Image:
    threshold = int(share * 256) % 256
    return _lookup(np.where(_levels >= threshold, 255 - _levels, _levels), image)


def _solarize_add(image: Image, share: float) -> Image:
    return _lookup(np.where(_levels >= 128, _levels, _levels + int(share * 110)), image)


def _autocontrast(channel: Image) -> Image:
    """Stretch a channel's values to 0 ... 255."""
    low, high = np.float32(channel.min()), np.float32(channel.max())
    if high <= low:
        return channel
    scale = np.float32(255) / (high - low)
    return _lookup(_levels * scale - low * scale, channel)


def _equalize(channel: Image) -> Image:
    """Make a channel's histogram flat, as PIL.ImageOps.equalize computes it."""
    counts = np.bincount(channel.ravel(), minlength=256)
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if step == 0:
        return channel
    return _lookup(np.concatenate([[0], (counts.cumsum() + step // 2)[:-1] // step]), channel)


def _cutout(image: Image, half: int, centre: Centre) -> Image:
    cut = image.copy()
    (row, column), (height, width) = centre, image.shape[1:]
    rows = slice(max(0, row - half), min(height, row + half))
    cut[:, rows, max(0, column - half) : min(width, column + half)] = FILL
    return cut


def _factor(share: float) -> float:
    return share * 1.8 + 0.1


def _contrast(image: Image, share: float) -> Image:
    grey = min(image.shape[1] * image.shape[2] // 256, 255)  # "the mean" of a histogram's 256 counts
    return _lookup(_blend(np.float32(grey), _levels, _factor(share)), image)


def _sharpness(image: Image, share: float) -> Image:
    return _blend(_smooth(image).astype(np.float32), image.astype(np.float32), _factor(share))


def _blend(first: npt.NDArray[np.float32] | np.float32, second: npt.NDArray[np.float32], factor: float) -> Image:
    """Return first + factor * (second - first), truncated to uint8; factors above 1 extrapolate."""
    mixed = second - first
    mixed *= np.float32(factor)
    mixed += first
    if not 0 < factor < 1:
        np.clip(mixed, 0, 255, out=mixed)
    return mixed.astype(np.uint8)


def _grey(image: Image) -> npt.NDArray[np.float32]:
    """Return tf.image.rgb_to_grayscale's whole grey levels (h, w), as float32."""
    red, green, blue = image.astype(np.float32) * np.float32(1 / 255)
    grey = red * np.float32(0.2989) + green * np.float32(0.587) + blue * np.float32(0.114)
    levels: npt.NDArray[np.float32] = np.floor(grey * np.float32(255.5))
    return levels


def _smooth(image: Image) -> Image:
    """Smooth the inner pixels as PIL does: neighbours count one, the pixel itself five, of thirteen."""
    wide_pixels = image.astype(np.uint16)
    rows = wide_pixels[:, :-2] + wide_pixels[:, 1:-1] + wide_pixels[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * wide_pixels[:, 1:-1, 1:-1]
    mean = total // 13
    smooth = image.copy()
    smooth[:, 1:-1, 1:-1] = mean
    # TensorFlow convolves in float32: where thirteen divides the total, rounding may leave it just below.
    is_even = np.zeros(image.shape, dtype=np.bool_)
    is_even[:, 1:-1, 1:-1] = mean * 13 == total
    positions, values = np.flatnonzero(is_even), image.ravel()
    floats = np.zeros(len(positions), dtype=np.float32)
    for row, column in itertools.product((-1, 0, 1), repeat=2):
        weight = float(np.float32(1 if row or column else 5) / np.float32(13))
        products = values[positions + row * image.shape[2] + column].astype(np.float64) * weight
        floats = (floats + products).astype(np.float32)  # rounded once, as a fused multiply-add is
    smooth.ravel()[positions] = floats
    return smooth


def _rotate(image: Image, degrees: float) -> Image:
    """Rotate about the middle, as tensorflow_addons does."""
    angle = np.float32(degrees * math.pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    bottom, right = np.float32(image.shape[1] - 1), np.float32(image.shape[2] - 1)
    x = (right - (cos * right - sin * bottom)) / np.float32(2)
    y = (bottom - (sin * right + cos * bottom)) / np.float32(2)
    return _affine(image, (cos, -sin, x), (sin, cos, y))


def _affine(image: Image, to_x: tuple[Any, Any, Any], to_y: tuple[Any, Any, Any]) -> Image:
    """Take every pixel (x, y) from the one nearest to (a x + b y + c) with (a, b, c) `to_x` and `to_y`.

    Halves are rounded away from zero, as C rounds them.
    """
    _, height, width = image.shape
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    half = np.float32(0.5)
    from_x, from_y = (
        np.float32(a) * x + np.float32(b) * y + np.float32(c) for a, b, c in (to_x, to_y)
    )  # each (h, w) or, where it depends on one of them alone, (1, w) or (h, 1)
    is_inside = (from_x > -half) & (from_x < width - half) & (from_y > -half) & (from_y < height - half)
    position = (from_y + half).astype(np.intp) * width + (from_x + half).astype(np.intp)
    position[~is_inside] = height * width
    filled = np.full((3, height * width + 1), FILL, dtype=np.uint8)
    filled[:, :-1] = image.reshape(3, -1)
    return np.stack([channel.take(position) for channel in filled])


OPERATIONS: dict[str, Callable[[Image, float, Centre], Image]] = {
    "AutoContrast": lambda image, share, centre: np.stack([_autocontrast(channel) for channel in image]),
    "Equalize": lambda image, share, centre: np.stack([_equalize(channel) for channel in image]),
    "Invert": lambda image, share, centre: 255 - image,
    "Rotate": lambda image, share, centre: _rotate(image, share * 30),
    "Posterize": lambda image, share, centre: _posterize(image, share),
    "Solarize": lambda image, share, centre: _solarize(image, share),
    "Color": lambda image, share, centre: _blend(_grey(image), image.astype(np.float32), _factor(share)),
    "Contrast": lambda image, share, centre: _contrast(image, share),
    "Brightness": lambda image, share, centre: _lookup(_blend(np.float32(0), _levels, _factor(share)), image),
    "Sharpness": lambda image, share, centre: _sharpness(image, share),
    "ShearX": lambda image, share, centre: _affine(image, (1, share * 0.3, 0), (0, 1, 0)),
    "ShearY": lambda image, share, centre: _affine(image, (1, 0, 0), (share * 0.3, 1, 0)),
    "TranslateX": lambda image, share, centre: _affine(image, (1, 0, share * TRANSLATE), (0, 1, 0)),
    "TranslateY": lambda image, share, centre: _affine(image, (1, 0, 0), (0, 1, share * TRANSLATE)),
    "Cutout": lambda image, share, centre: _cutout(image, int(share * CUTOUT), centre),
    "SolarizeAdd": lambda image, share, centre: _solarize_add(image, share),
}
"""The sixteen operations by name, of an image, the share of the full level, and a centre."""
