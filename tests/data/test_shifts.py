"""Shifts of the data against a recorded second implementation of ImageNet-C, and against closed forms."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from dpn_cli.config.shift_options import IMAGENET_C, SEVERITIES, SHIFTS, ShiftOptions
from dpn_cli.data.shifted_images import ShiftedImages, reduce_to
from dpn_cli.data.shifts import FULL_WELL, READ_NOISE, shift_pixels
from dpn_cli.data.sources.base import Images
from support.goldens import Arrays

# The reference draws these from other generators.
OWN_DRAWS = ("impulse_noise", "glass_blur")


class LegacyDraws:
    """The random numbers of `numpy.random.seed`, with the names that a Generator gives them."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class GreyImages(Images):
    """Grey images of 40 x 60 pixels; their brightness is their number."""

    def __init__(self, count: int, height: int = 40, width: int = 60) -> None:
        self.labels, self.sizes, self.shape = [0] * count, [1] * count, (height, width)

    def locate(self, index: int) -> str:
        return f"image {index}"

    def key(self, index: int) -> str:
        return os.fsdecode(f"class{index}/".encode() + b"caf\xe9.png")

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(np.full((*self.shape, 3), 100 + index, np.uint8))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", [name for name in IMAGENET_C if name not in OWN_DRAWS])
def test_corruptions_equal_the_reference(name: str, severity: int, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("shifts")
    expected = arrays[f"{name}_{severity}"].astype(int)
    actual = shift_pixels(arrays["image"], name, severity, LegacyDraws(7), scale=1.0).astype(int)  # type: ignore[arg-type]
    assert abs(actual - expected).max() <= 1
    assert abs(actual - expected).mean() < 0.05


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", OWN_DRAWS)
def test_corruptions_with_other_draws_change_images_as_much_as_the_reference(
    name: str, severity: int, golden: Callable[[str], Arrays]
) -> None:
    arrays = golden("shifts")
    image = arrays["image"].astype(float)
    expected = (arrays[f"{name}_{severity}"] - image).std()
    actual = (shift_pixels(arrays["image"], name, severity, generator(), scale=1.0) - image).std()
    assert actual == pytest.approx(expected, rel=0.1)


def test_impulse_noise_is_black_and_white_in_equal_shares() -> None:
    shifted = shift_pixels(np.full((200, 200, 3), 128, np.uint8), "impulse_noise", 5, generator())
    assert ((shifted == 0).mean(), (shifted == 255).mean()) == pytest.approx((0.135, 0.135), abs=0.005)


@pytest.mark.parametrize(("severity", "factor"), [(1, 1 / 2), (2, 1 / 3), (3, 1 / 4), (4, 1 / 6), (5, 1 / 8)])
def test_gain_and_contrast_scale_the_values(severity: int, factor: float) -> None:
    image = generator().integers(0, 256, (8, 8, 3)).astype(np.uint8)
    mean = image.mean()
    shifted = {name: shift_pixels(image, name, severity, generator()) for name in ("gain", "flat_contrast")}
    assert abs(shifted["gain"] - image * factor).max() <= 0.5 + 1e-9
    assert abs(shifted["flat_contrast"] - ((image - mean) * factor + mean)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("severity", SEVERITIES)
def test_dusk_has_the_noise_of_its_photons_and_of_the_sensor(severity: int) -> None:
    value = 204
    shifted = shift_pixels(np.full((300, 300, 3), value, np.uint8), "dusk", severity, generator()).astype(float)
    photons = value / 255 * FULL_WELL / 2**severity
    assert shifted.mean() == pytest.approx(255 / FULL_WELL * photons, rel=0.01)
    quantisation = 1 / 12
    variance = (255 / FULL_WELL) ** 2 * (photons + READ_NOISE**2) + quantisation
    assert shifted.var() == pytest.approx(variance, rel=0.05)


def test_every_severity_changes_an_image_more() -> None:
    rows, columns = np.mgrid[:64, :64]
    image = np.stack([4 * rows, 4 * columns, 255 - 2 * (rows + columns)], -1).clip(0, 255).astype(np.uint8)
    image = np.where((rows + columns)[..., None] % 16 < 8, image, 255 - image).astype(np.uint8)
    for name in (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "contrast",
        "pixelate",
        "gain",
        "flat_contrast",
        "dusk",
    ):
        changes = [
            np.abs(shift_pixels(image, name, severity, generator()).astype(int) - image).mean()
            for severity in SEVERITIES
        ]
        assert changes == sorted(changes), name


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("size", [(3, 3), (1, 9), (33, 20)])
def test_images_of_any_size_keep_it(name: str, size: tuple[int, int]) -> None:
    for severity in SEVERITIES:
        shifted = shift_pixels(np.full((*size, 3), 90, np.uint8), name, severity, generator())
        assert shifted.shape == (*size, 3)
        assert shifted.dtype == np.uint8


def test_random_numbers_depend_on_seed_shift_severity_and_image_alone() -> None:
    images = GreyImages(3)

    def noise(name: str = "gaussian_noise", severity: int = 3, seed: int = 0, index: int = 1) -> Any:
        shifted = ShiftedImages(images, name, severity, 256, seed).pixels(index).astype(int)
        return shifted - ShiftedImages(images, name, 0, 256, seed).pixels(index)

    assert_array_equal(noise(), noise())
    others = [noise(seed=1), noise(index=2), noise(severity=4), noise(name="shot_noise")]
    assert all(abs(np.corrcoef(noise().ravel(), other.ravel())[0, 1]) < 0.1 for other in others)


def test_large_images_are_reduced_first_by_averaging() -> None:
    images = GreyImages(1, 400, 600)
    assert ShiftedImages(images, "gain", 1, 100).pixels(0).shape == (100, 150, 3)
    image = generator().integers(0, 256, (40, 60, 3)).astype(np.uint8)
    expected = image.reshape(20, 2, 30, 2, 3).mean((1, 3))
    assert abs(reduce_to(image, 20) - expected).max() <= 1  # Pillow rounds after each axis
    assert_array_equal(reduce_to(image, 40), image)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("all", tuple(SHIFTS)),
        ("imagenet-c", IMAGENET_C),
        ("light", ("gain", "flat_contrast", "dusk")),
        ("dusk,noise", ("dusk", "gaussian_noise", "shot_noise", "impulse_noise")),
        ("fog,weather,fog", ("fog", "snow", "brightness")),
    ],
)
def test_groups_stand_for_their_shifts(words: str, names: tuple[str, ...]) -> None:
    assert ShiftOptions.model_validate({"names": words}).names == names


def test_unknown_shifts_and_a_baseline_without_shifts_are_refused() -> None:
    with pytest.raises(ValueError, match="'gian': choose from all, .*did you mean 'gain'"):
        ShiftOptions.model_validate({"names": "gian"})
    with pytest.raises(ValueError, match="compares runs under shifts; pass --shifts"):
        ShiftOptions.model_validate({"baseline": "run"})


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "glass_blur", "snow"])
def test_lengths_are_in_proportion_to_the_shorter_side(name: str) -> None:
    image = generator().integers(0, 256, (128, 160, 3)).astype(np.uint8)
    half, full = (shift_pixels(image, name, 5, generator(), scale) for scale in (0.5, 1.0))
    assert_array_equal(shift_pixels(image, name, 5, generator()), half)
    assert (half != full).any()
