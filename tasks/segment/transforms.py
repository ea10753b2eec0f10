"""Training transforms with mmsegmentation's semantics: resize, crop, flip, photometric distortion.

Images are uint8 (3, h, w) in RGB, labels uint8 (h, w), sizes (height, width) in pixels. Random
choices take numbers from [0, 1) in the reference's order: one stream of numbers gives the same image in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli.data.crops import Box
from dpn_cli.data.decode import Pixels
from dpn_cli.data.resize import Size, to_batch
from tasks.segment.labels import IGNORE, Labels

Draw = Callable[[], float]

CROP_TRIES = 10
# Rows whose colours are changed at once: larger parts of an image do not stay in the processor's memory.
STRIP = 128
# PhotoMetricDistortion's ranges: grey levels, factors, factors of the saturation, half turns of 180 of the hue.
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, (0.5, 1.5), (0.5, 1.5), 18


@dataclass(frozen=True)
class SegmentAugmentation:
    """Options of augmentation; `scale` caps the longer and the shorter side before the random ratio.

    With `flip`, every second example is mirrored.
    """

    crop: Size
    scale: tuple[int, int] = (2048, 512)
    ratio: tuple[float, float] = (0.5, 2.0)
    cat_max: float = 0.75
    photometric: bool = True
    flip: bool = True


def fit_into(size: Size, longest: int, shortest: int) -> Size:
    """Return the largest size of the same shape within the caps of the longer and the shorter side."""
    factor = min(longest / max(size), shortest / min(size))
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))


def resize_image(pixels: Pixels, size: Size) -> Tensor:
    """Resize (h, w, 3) to (3, *size) as OpenCV's INTER_LINEAR does: bilinear, no antialiasing, rounded."""
    image = to_batch(pixels)
    if tuple(image.shape[2:]) != size:
        image = F.interpolate(image, size, mode="bilinear", align_corners=False)
    return image[0]


def resize_part(pixels: Pixels, size: Size, box: Box) -> Tensor:
    """Return the `box` (top, left, height, width) of an image (h, w, 3) that `resize_image` makes, (3, height, width).

    torch resizes columns first, then rows, and rounds in between. So the rows that the box does not need are left out
    of the first, and the columns outside it of the second.
    """
    top, left, height, width = box
    old = pixels.shape[0]
    if (height, width) == size or old == size[0]:
        return resize_image(pixels, size)[:, top : top + height, left : left + width]
    first = max(0, int((top + 0.5) * old / size[0] - 0.5) - 1)
    last = min(old, int((top + height - 0.5) * old / size[0] - 0.5) + 3)
    columns = resize_image(pixels[first:last], (last - first, size[1])).permute(1, 2, 0).numpy()
    image = np.empty((old, width, 3), np.uint8)
    image[first:last] = columns[:, left : left + width]
    return resize_image(image, (size[0], width))[:, top : top + height]


def crop_labels(labels: Labels, size: Size, box: Box) -> Labels:
    """Return the `box` (top, left, height, width) of labels resized to `size` as OpenCV's INTER_NEAREST does."""
    top, left, height, width = box
    rows, columns = (
        np.minimum((np.arange(first, first + count) * (1 / (new / old))).astype(np.int64), old - 1)
        for first, count, new, old in ((top, height, size[0], labels.shape[0]), (left, width, size[1], labels.shape[1]))
    )
    cropped: Labels = labels[rows].take(columns, axis=1)
    return cropped


def augment(pixels: Pixels, labels: Labels, augmentation: SegmentAugmentation, draw: Draw) -> tuple[Tensor, Tensor]:
    """Make a training example of an image (h, w, 3) and its labels (h, w).

    Returns image and labels of at most the crop's size: small ones are padded later, after normalising.
    """
    ratio = augmentation.ratio[0] + draw() * (augmentation.ratio[1] - augmentation.ratio[0])
    longest, shortest = int(augmentation.scale[0] * ratio), int(augmentation.scale[1] * ratio)
    size = fit_into((pixels.shape[0], pixels.shape[1]), longest, shortest)
    box, cropped = _crop(labels, size, augmentation, draw)
    target = torch.from_numpy(cropped)
    image = resize_part(pixels, size, box)
    if draw() < 0.5 and augmentation.flip:
        image, target = image.flip(-1), target.flip(-1)
    return photometric_distortion(image, draw) if augmentation.photometric else image, target


def _crop(labels: Labels, size: Size, augmentation: SegmentAugmentation, draw: Draw) -> tuple[Box, Labels]:
    """Draw crops until one has two classes and none of them covers `cat_max` of it, or the tries are used up."""
    height, width = min(augmentation.crop[0], size[0]), min(augmentation.crop[1], size[1])

    def box() -> Box:
        top = int(draw() * (size[0] - height + 1))
        return top, int(draw() * (size[1] - width + 1)), height, width

    for _ in range(CROP_TRIES if augmentation.cat_max < 1 else 0):
        crop_box = box()
        cropped = crop_labels(labels, size, crop_box)
        counts = torch.bincount(torch.from_numpy(cropped).flatten(), minlength=IGNORE + 1)[:IGNORE]  # NumPy's is slower
        if counts.count_nonzero() > 1 and int(counts.max()) / int(counts.sum()) < augmentation.cat_max:
            return crop_box, cropped
    crop_box = box()
    return crop_box, crop_labels(labels, size, crop_box)


def photometric_distortion(image: Tensor, draw: Draw) -> Tensor:
    """Change brightness, contrast, saturation and hue of (3, h, w) uint8, each with probability a half.

    Every stage truncates to whole grey levels as in the reference; hue is in OpenCV's steps of two degrees.
    """
    stages = _stages(draw)
    distorted = np.empty(image.shape, np.uint8)
    for top in range(0, image.shape[1], STRIP):
        x = image[:, top : top + STRIP].contiguous().float()
        for stage in stages:
            x = stage(x)
        distorted[:, top : top + STRIP] = x.numpy()  # which truncates
    return torch.from_numpy(distorted)


def _stages(draw: Draw) -> list[Callable[[Tensor], Tensor]]:
    """Draw what happens to an image, in the reference's order."""

    def is_chosen() -> bool:
        return int(draw() * 2) == 1

    def uniform(low: float, high: float) -> float:
        return low + draw() * (high - low)

    stages: list[Callable[[Tensor], Tensor]] = []
    if is_chosen():
        stages.append(partial(_shift, levels=uniform(-BRIGHTNESS, BRIGHTNESS)))
    contrast_first = is_chosen()
    if contrast_first and is_chosen():
        stages.append(partial(_scale, factor=uniform(*CONTRAST)))
    if is_chosen():
        stages.append(partial(scale_saturation, factor=uniform(*SATURATION)))
    if is_chosen():
        stages.append(partial(shift_hue, steps=int(draw() * 2 * HUE) - HUE))
    if not contrast_first and is_chosen():
        stages.append(partial(_scale, factor=uniform(*CONTRAST)))
    return stages


def _scale(rgb: Tensor, factor: float) -> Tensor:
    return (rgb * factor).clamp_(0, 255).floor_()


def _shift(rgb: Tensor, levels: float) -> Tensor:
    return (rgb + levels).clamp_(0, 255).floor_()


def scale_saturation(rgb: Tensor, factor: float) -> Tensor:
    """Multiply the saturation of (3, h, w) in HSV by a factor, clipped at full; hue and value stay.

    The reference converts to OpenCV's 8-bit HSV and back, which turns hues by up to a degree; this does not.
    """
    value = rgb.amax(0)
    distance = value - rgb
    if factor > 1:  # at most until the smallest channel is zero
        distance *= (value / (value - rgb.amin(0)).clamp_(min=1)).clamp_(max=factor)
    else:
        distance *= factor
    return torch.sub(value, distance, out=distance).add_(0.5).floor_()


def shift_hue(rgb: Tensor, steps: int) -> Tensor:
    """Turn the hue of (3, h, w) in HSV by steps of two degrees, rounded to such steps as OpenCV's 8 bits are."""
    red, green, blue = rgb
    value, low = rgb.amax(0), rgb.amin(0)
    chroma = value - low
    # Grey levels are whole numbers, so the largest channel is where the difference is below one (faster than where()).
    not_red = torch.sub(value, red).clamp_(max=1)
    is_blue = torch.sub(value, green).clamp_(max=1).mul_(not_red)
    is_green = not_red - is_blue
    # The hue in steps, which are 30 from a colour to the next, from the difference of the two channels that are not the
    # largest: green - blue with red, and what the others have beyond that.
    difference = green - blue
    scratch = torch.sub(blue, red).sub_(difference)
    hue = torch.addcmul(difference, is_green, scratch)
    torch.sub(red, green, out=scratch).sub_(difference)
    hue.addcmul_(is_blue, scratch).mul_(30).div_(torch.clamp(chroma, min=1))
    hue.add_(not_red.add_(is_blue), alpha=60).add_(steps + 0.5).floor_()
    hue.add_(torch.neg(hue, out=scratch).clamp_(0, 1), alpha=180).div_(30)  # below zero is once around
    rotated = torch.empty_like(rgb)
    # How much of the chroma each channel has, over the six parts of the circle of hues.
    for channel, middle in zip(rotated, (3, 2, 4), strict=True):
        torch.sub(hue, middle, out=scratch).abs_()
        share = scratch.sub_(1) if middle == 3 else scratch.neg_().add_(2)
        torch.addcmul(low, chroma, share.clamp_(0, 1), out=channel)
    return rotated.add_(0.5).floor_()


def pad(image: Tensor, target: Tensor, crop: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Pad right and bottom to the crop's size, labels with "ignored"; returns them with the size that is real (2,)."""
    height, width = image.shape[-2:]
    padding = (0, crop[1] - width, 0, crop[0] - height)
    return F.pad(image, padding), F.pad(target, padding, value=IGNORE), torch.tensor([height, width])
