"""Crops and resizing as in big_vision's preprocessing on TensorFlow.

Sizes are (height, width), boxes (top, left, height, width), all in pixels; images are uint8 (h, w, 3).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dpn_cli.data.decode import Pixels, decode, decoder_of
from dpn_cli.data.resize import Size, resize, to_batch

Box = tuple[int, int, int, int]
Decode = Literal["exact", "fast", "pillow"]

# inception_crop's arguments: share of the area, width over height.
AREA, RATIO = (0.05, 1.0), (0.75, 1.33)
TRIES = 100
# How many numbers, and at least how many columns of a channel, evaluation resizes at once.
FLOATS, LEAST_COLUMNS = 2**19, 96


def inception_box(size: Size, generator: torch.Generator, least_area: float = AREA[0]) -> Box:
    """Draw a crop as TensorFlow's sample_distorted_bounding_box does for a whole image.

    `least_area` is the smallest share of the image's area. The aspect ratio and then the height are uniform, so crops
    are smaller than torchvision's, which draws the area.
    The last possible offset is never drawn. After 100 misfits (extreme images) the crop is the whole image.
    """
    height, width = size
    for ratio, *draws in torch.rand(TRIES, 4, generator=generator).tolist():
        box = _fit(height, width, RATIO[0] + ratio * (RATIO[1] - RATIO[0]), draws, least_area)
        if box is not None:
            return box
    return 0, 0, height, width


def _fit(height: int, width: int, ratio: float, draws: list[float], least_area: float) -> Box | None:
    smallest, largest = least_area * height * width, AREA[1] * height * width
    low, high = round(math.sqrt(smallest / ratio)), round(math.sqrt(largest / ratio))
    if round(high * ratio) > width:
        high = int((width + 0.5 - 1e-7) / ratio)
        high -= round(high * ratio) > width
    high = min(high, height)
    low = min(low, high)
    crop_height = low + int(draws[0] * (high - low + 1))
    # Rounding may miss the area bounds by a pixel: try one pixel taller, then one shorter.
    crop_height += round(crop_height * ratio) * crop_height < smallest
    crop_height -= round(crop_height * ratio) * crop_height > largest
    crop_width = round(crop_height * ratio)
    if not (smallest <= crop_width * crop_height <= largest and 0 < crop_width <= width and 0 < crop_height <= height):
        return None
    return int(draws[1] * (height - crop_height)), int(draws[2] * (width - crop_width)), crop_height, crop_width


def train_crop(
    image: Image.Image,
    location: str,
    size: Size,
    generator: torch.Generator,
    decode_mode: Decode,
    least_area: float = AREA[0],
) -> Tensor:
    """Decode a random crop of an opened image, of `least_area` of it or more, resized to (3, *size) uint8.

    ``exact`` decodes all of the image and resizes the crop as the reference does; ``pillow`` does the same with
    Pillow's pixels of a JPEG. ``fast`` lets the JPEG decoder shrink the image by 2, 4 or 8 where the crop stays at
    least as large as `size`, and resizes in integers, which rounds where the reference truncates: other pixels, see
    docs/measurements.md. Raises `DataError` when the image is unreadable.
    """
    top, left, height, width = inception_box((image.height, image.width), generator, least_area)
    if decode_mode == "fast" and image.format == "JPEG":
        full = image.height, image.width
        shrink = min(height / size[0], width / size[1])
        if shrink >= 2:
            image.draft("RGB", (int(image.width / shrink), int(image.height / shrink)))
            scale_y, scale_x = image.height / full[0], image.width / full[1]
            top, left = round(top * scale_y), round(left * scale_x)
            height, width = max(1, round(height * scale_y)), max(1, round(width * scale_x))
    crop = decode(image, location, decoder_of(decode_mode))[top : top + height, left : left + width]
    if decode_mode != "fast":
        return resize(crop, size)
    return F.interpolate(to_batch(crop), size, mode="bilinear", align_corners=False)[0].contiguous()


def scale_to_short_side(size: Size, side: int) -> Size:
    """Return the size whose shorter side is `side`, both rounded: big_vision's resize_small."""
    factor = side / min(size)
    return round(size[0] * factor), round(size[1] * factor)


def eval_crop(pixels: Pixels, resize_side: int, size: Size) -> Tensor:
    """Resize the shorter side to `resize_side` by area, and crop the centre: (3, *size) uint8, truncated.

    Raises `ValueError` when the crop is larger than the resized image.
    """
    full = pixels.shape[0], pixels.shape[1]
    resized = scale_to_short_side(full, resize_side)
    if resized[0] < size[0] or resized[1] < size[1]:
        raise ValueError(f"cannot cut {size} from an image resized to {resized}")
    top, left = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
    rows = area_weights(full[0], resized[0], top, size[0])
    columns = area_weights(full[1], resized[1], left, size[1])
    visible = pixels[rows.start : rows.end, columns.start : columns.end]
    width, flat = visible.shape[1], visible.reshape(len(visible), -1)
    # Some columns in float32 at a time: all of them would take four times the memory of the image.
    step = max(LEAST_COLUMNS, FLOATS // len(flat))
    offsets = range(0, flat.shape[1], step)
    parts = (torch.from_numpy(flat[:, offset : offset + step].astype(np.float32)) for offset in offsets)
    columns_resized = torch.cat([rows.mix(part) for part in parts], 1).view(size[0], width, 3)
    mixed = columns.mix(columns_resized.transpose(0, 1).reshape(width, -1)).view(size[1], size[0], 3).permute(2, 1, 0)
    # Weights of a third do not add up to one exactly, and a flat 255 must not become 254.
    return (mixed.contiguous() + 1e-3).clamp(0, 255).to(torch.uint8)


class AreaWeights(NamedTuple):
    """Return the area of each old pixel under each of `count` new ones; the old ones from `begin` to `end` count.

    ``shares`` (count, k) are those of the old pixels ``positions`` (count, k), counted from `begin`.
    """

    start: int
    end: int
    positions: Tensor
    shares: Tensor

    def mix(self, pixels: Tensor) -> Tensor:
        """Return the new pixels (count, n) of old ones (end - begin, n) in float32."""
        return F.embedding_bag(self.positions, pixels, mode="sum", per_sample_weights=self.shares)


@lru_cache(maxsize=32)
def area_weights(old: int, new: int, first: int, count: int) -> AreaWeights:
    """Return TensorFlow's area resizing from `old` to `new` pixels, of `count` new ones from `first` on.

    It is computed for the crop only: an image of 1 x 5000 would become two million pixels wide.
    """
    edges = torch.arange(first, first + count + 1, dtype=torch.float64) * (old / new)
    starts, end = edges[:-1, None], edges[1:, None]
    pixel = starts.floor() + torch.arange(math.ceil(old / new) + 1)
    overlap = (torch.minimum(end, pixel + 1) - torch.maximum(starts, pixel)).clamp(min=0)
    positions = pixel.long().clamp(max=old - 1)
    start = int(positions.min())
    return AreaWeights(start, int(positions.max()) + 1, positions - start, (overlap / (old / new)).float())
