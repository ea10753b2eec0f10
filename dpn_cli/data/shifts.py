"""Shifts of the test data: ImageNet-C's corruptions, less light, less contrast, and dusk as a camera sees it.

The corruptions and their levels are those of arXiv 1903.12261 in the form of arXiv 1907.07484, which takes images of
any size; `frost` is left out, because its images of ice are not part of this project. Lengths are for images whose
shorter side has 256 pixels, as ImageNet-C's, and shrink with smaller images.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage, signal

from dpn_cli.config.shift_options import SHIFTS
from dpn_cli.data.decode import Pixels

Floats = npt.NDArray[np.float64]
# Shorter side in pixels to which the levels refer: ImageNet-C's images are resized to it before their crop.
REFERENCE_SIDE = 256
# Photons that saturate a pixel in full light, and the standard deviation of the read noise in electrons, for a small
# pixel at a high gain. Photon noise and read noise are those of the linear camera model of EMVA 1288.
FULL_WELL, READ_NOISE = 1000, 2.0
# Weights of red, green and blue in the grey value of ITU-R BT.601.
LUMA = np.array([0.299, 0.587, 0.114])


def gaussian_noise(image: Floats, sigma: float, scale: float, rng: np.random.Generator) -> Floats:
    """Add Gaussian noise."""
    return image + rng.normal(size=image.shape, scale=sigma)


def shot_noise(image: Floats, photons: float, scale: float, rng: np.random.Generator) -> Floats:
    """Count photons, `photons` at white."""
    return rng.poisson(image * photons) / photons


def impulse_noise(image: Floats, share: float, scale: float, rng: np.random.Generator) -> Floats:
    """Set a share of the values to black or white."""
    is_replaced, is_white = rng.random(image.shape) < share, rng.random(image.shape) < 0.5
    return np.where(is_replaced, is_white.astype(float), image)


def defocus_blur(image: Floats, level: tuple[float, float], scale: float, rng: np.random.Generator) -> Floats:
    """Average over a disk of a radius in pixels, whose edge is smoothed."""
    radius, smoothing = level
    reach = np.arange(-8, 9) if radius <= 8 else np.arange(-radius, radius + 1)
    disk = (np.add.outer(reach**2, reach**2) <= (radius * scale) ** 2).astype(float)
    disk /= disk.sum()
    offsets = np.arange(-1, 2) if radius <= 8 else np.arange(-2, 3)
    weights = np.exp(-(offsets**2) / (2 * (smoothing * scale) ** 2))
    for axis in (0, 1):
        disk = ndimage.correlate1d(disk, weights / weights.sum(), axis=axis, mode="mirror")
    margin = len(disk) // 2
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")
    blurred: Floats = signal.fftconvolve(padded, disk[..., None], mode="valid", axes=(0, 1))
    return blurred


def glass_blur(image: Floats, level: tuple[float, int, int], scale: float, rng: np.random.Generator) -> Floats:
    """Blur, copy pixels from up to `reach` pixels away, and blur again.

    The pixels are copied one after the other, as in the reference, whose exchange of two pixels overwrites one.
    """
    sigma, reach, passes = level[0] * scale, max(1, round(level[1] * scale)), level[2]
    image = np.floor(_blur(image, sigma) * 255) / 255
    height, width = image.shape[:2]
    sources = list(range(height * width))
    rows, columns = np.arange(height - reach, reach, -1), np.arange(width - reach, reach, -1)
    targets = (rows[:, None] * width + columns).ravel()
    for _ in range(passes):
        steps = rng.integers(-reach, reach, size=(len(targets), 2))
        for target, source in zip(
            targets.tolist(), (targets + steps[:, 1] * width + steps[:, 0]).tolist(), strict=True
        ):
            sources[target] = sources[source]
    return _blur(image.reshape(-1, 3)[sources].reshape(image.shape), sigma)


def motion_blur(image: Floats, level: tuple[int, float], scale: float, rng: np.random.Generator) -> Floats:
    """Blur along a random direction of at most 45 degrees from the horizontal."""
    return _move(image, level[0] * scale, level[1] * scale, rng.uniform(-45, 45))


def zoom_blur(image: Floats, level: tuple[float, float], scale: float, rng: np.random.Generator) -> Floats:
    """Average enlargements of the centre, up to a factor."""
    factors = np.arange(1, *level)
    height, width = image.shape[:2]
    zoomed = sum(_zoom(image, factor)[:height, :width] for factor in factors)
    return (image + zoomed) / (len(factors) + 1)


def snow(image: Floats, level: tuple[float, ...], scale: float, rng: np.random.Generator) -> Floats:
    """Let flakes fall, and whiten the image."""
    mean, deviation, zoom, threshold, radius, sigma, visibility = level
    height, width = image.shape[:2]
    flakes = _zoom(rng.normal(size=(height, width, 1), loc=mean, scale=deviation), zoom)
    flakes = _move(
        np.where(flakes < threshold, 0, np.clip(flakes, 0, 1)), radius * scale, sigma * scale, rng.uniform(-135, -45)
    )
    flakes = (np.round(flakes * 255) / 255)[:height, :width]
    whitened = np.maximum(image, (image @ LUMA)[..., None] * 1.5 + 0.5)
    shifted: Floats = visibility * image + (1 - visibility) * whitened + flakes + np.rot90(flakes, 2)
    return shifted


def fog(image: Floats, level: tuple[float, float], scale: float, rng: np.random.Generator) -> Floats:
    """Add fractal clouds."""
    strength, decay = level
    height, width = image.shape[:2]
    clouds = _clouds(1 << (max(height, width) - 1).bit_length(), decay, rng)[:height, :width, None]
    brightest = image.max()
    shifted: Floats = (image + strength * clouds) * brightest / (brightest + strength)
    return shifted


def brightness(image: Floats, step: float, scale: float, rng: np.random.Generator) -> Floats:
    """Add to the value of HSV, with hue and saturation as they are."""
    value = image.max(-1, keepdims=True)
    brighter = np.clip(value + step, 0, 1)
    shifted: Floats = np.where(value > 0, image * brighter / np.where(value > 0, value, 1), brighter)
    return shifted


def contrast(image: Floats, factor: float, scale: float, rng: np.random.Generator) -> Floats:
    """Scale the differences from the mean of each channel."""
    mean = image.mean((0, 1))
    shifted: Floats = (image - mean) * factor + mean
    return shifted


def elastic_transform(image: Floats, strength: float, scale: float, rng: np.random.Generator) -> Floats:
    """Shift pixels by a smooth random field."""
    size = image.shape[:2]
    sigma, most = np.array(size) * 0.01, size[0] * 0.005  # in proportion to the image already
    fields = [
        ndimage.gaussian_filter(rng.uniform(-most, most, size=size), sigma, mode="reflect", truncate=3) * strength
        for _ in range(2)
    ]
    rows, columns = np.arange(size[0])[:, None] + fields[1], np.arange(size[1]) + fields[0]
    channels = [ndimage.map_coordinates(image[..., i], [rows, columns], order=1, mode="reflect") for i in range(3)]
    return np.stack(channels, -1)


def pixelate(image: Floats, factor: float, scale: float, rng: np.random.Generator) -> Floats:
    """Reduce the image by averaging, and enlarge it without interpolation."""
    pil_image = _to_pil(image)
    reduced = pil_image.resize(
        (max(1, int(pil_image.width * factor)), max(1, int(pil_image.height * factor))), Image.Resampling.BOX
    )
    return np.asarray(reduced.resize(pil_image.size, Image.Resampling.NEAREST)) / 255


def jpeg_compression(image: Floats, quality: int, scale: float, rng: np.random.Generator) -> Floats:
    """Save the image as JPEG."""
    file = io.BytesIO()
    _to_pil(image).save(file, "JPEG", quality=quality)
    with Image.open(file) as pil_image:
        return np.asarray(pil_image) / 255


def gain(image: Floats, factor: float, scale: float, rng: np.random.Generator) -> Floats:
    """Multiply the values by a factor."""
    return np.round(image * factor * 255) / 255


def flat_contrast(image: Floats, factor: float, scale: float, rng: np.random.Generator) -> Floats:
    """Scale the differences from the mean of the image."""
    mean = image.mean()
    shifted: Floats = np.round(((image - mean) * factor + mean) * 255) / 255
    return shifted


def dusk(image: Floats, factor: float, scale: float, rng: np.random.Generator) -> Floats:
    """Record the scene in less light: fewer photons with their noise, the sensor's read noise, and 8 bits.

    Values are taken to be proportional to light.
    """
    electrons = rng.poisson(image * factor * FULL_WELL) + rng.normal(scale=READ_NOISE, size=image.shape)
    return np.round(electrons / FULL_WELL * 255) / 255


Apply = Callable[[Floats, Any, float, np.random.Generator], Floats]
_LIGHT = (1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8)
# By name: the function, and the level of each severity.
_LEVELS: dict[str, tuple[Apply, Sequence[Any]]] = {
    "gaussian_noise": (gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "fog": (fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (elastic_transform, (12.5, 16.25, 21.25, 25.0, 30.0)),
    "pixelate": (pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (jpeg_compression, (25, 18, 15, 10, 7)),
    "gain": (gain, _LIGHT),
    "flat_contrast": (flat_contrast, _LIGHT),
    "dusk": (dusk, (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)),
}
assert tuple(_LEVELS) == tuple(SHIFTS), "config.shift_options lists the same names in the same order"


def shift_pixels(
    pixels: Pixels, name: str, severity: int, rng: np.random.Generator, scale: float | None = None
) -> Pixels:
    """Return an image (h, w, 3) uint8 under a shift.

    `scale` multiplies lengths in pixels; by default it is the shorter side in proportion to `REFERENCE_SIDE`.
    """
    apply, levels = _LEVELS[name]
    scale = min(pixels.shape[:2]) / REFERENCE_SIDE if scale is None else scale
    shifted = apply(pixels / 255, levels[severity - 1], scale, rng)
    # Truncated, as in the reference; the small addend keeps whole numbers whole.
    return (np.clip(shifted, 0, 1) * 255 + 1e-9).astype(np.uint8)


def _to_pil(image: Floats) -> Image.Image:
    return Image.fromarray(np.round(image * 255).astype(np.uint8))


def _blur(image: Floats, sigma: float) -> Floats:
    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest"))


def _zoom(image: Floats, factor: float) -> Floats:
    """Enlarge the centre of an image (h, w, c) to at least its size."""
    sizes = [int(np.ceil(side / factor)) for side in image.shape[:2]]
    top, left = ((side - size) // 2 for side, size in zip(image.shape[:2], sizes, strict=True))
    centre = image[top : top + sizes[0], left : left + sizes[1]]
    return np.asarray(ndimage.zoom(centre, (factor, factor, 1), order=1))


def _move(image: Floats, radius: float, sigma: float, angle: float) -> Floats:
    """Average copies of an image (h, w, c), moved along an angle in degrees, with the weights of half a Gaussian."""
    height, width = image.shape[:2]
    copies = 2 * int(radius) + 1
    weights = np.exp(-(np.arange(copies) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    down, right = np.sin(np.deg2rad(angle)), np.cos(np.deg2rad(angle))
    moved = np.zeros_like(image)
    for number, weight in enumerate(weights):
        dy, dx = -int(np.ceil(number * down - 0.5)), -int(np.ceil(number * right - 0.5))
        if abs(dy) >= height or abs(dx) >= width:
            break
        rows, columns = np.clip(np.arange(height) - dy, 0, height - 1), np.clip(np.arange(width) - dx, 0, width - 1)
        moved += weight * image[rows[:, None], columns]
    return moved


def _clouds(side: int, decay: float, rng: np.random.Generator) -> Floats:
    """Return a fractal (side, side) in 0 … 1, made by the diamond-square algorithm; `side` is a power of two."""
    clouds = np.zeros((side, side))
    step, amplitude = side, 100.0

    def disturb(sums: Floats) -> Floats:
        return sums / 4 + amplitude * rng.uniform(-amplitude, amplitude, sums.shape)

    while step >= 2:
        half = step // 2
        corners = clouds[::step, ::step]
        sums = corners + np.roll(corners, -1, axis=0)
        clouds[half::step, half::step] = disturb(sums + np.roll(sums, -1, axis=1))
        centres = clouds[half::step, half::step]
        clouds[::step, half::step] = disturb(
            centres + np.roll(centres, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        )
        clouds[half::step, ::step] = disturb(
            centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        )
        step, amplitude = half, amplitude / decay
    clouds -= clouds.min()
    normalized: Floats = clouds / clouds.max()
    return normalized
