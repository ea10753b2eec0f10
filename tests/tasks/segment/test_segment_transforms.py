"""The training transforms of segmentation, driven by the same random numbers as mmsegmentation's own classes."""

from __future__ import annotations

import colorsys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from support.segment import import_mmseg
from tasks.segment import transforms
from tasks.segment.labels import IGNORE
from tasks.segment.transforms import (
    CROP_TRIES,
    SegmentAugmentation,
    augment,
    crop_labels,
    fit_into,
    pad,
    photometric_distortion,
    resize_image,
    resize_part,
    scale_saturation,
    shift_hue,
)


class Replay:
    """NumPy's functions for random numbers as mmsegmentation calls them, each from one number of [0, 1)."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed).random

    def random_sample(self) -> float:
        return self.random()

    def randint(self, low: int, high: int | None = None) -> int:
        low, high = (0, low) if high is None else (low, high)
        return low + int(self.random() * (high - low))

    def uniform(self, low: float, high: float) -> float:
        return low + self.random() * (high - low)

    def choice(self, items: list[Any], p: list[float]) -> Any:
        return items[int(np.searchsorted(np.cumsum(p), self.random(), side="right"))]


def example(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A smooth image and coarse labels of some size, a tenth of them ignored."""
    rng = np.random.default_rng((7, number))
    height, width = int(rng.integers(40, 180)), int(rng.integers(40, 180))
    noise = torch.from_numpy(rng.integers(0, 256, (1, 3, 12, 12)).astype(np.float32))
    smooth = F.interpolate(noise, (height, width), mode="bicubic").clamp(0, 255)[0].permute(1, 2, 0)
    labels = rng.integers(0, 11, (5, 5)).astype(np.uint8)
    labels[labels == 10] = IGNORE
    large = np.asarray(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))
    return smooth.byte().numpy(), large


def test_an_example_is_mmsegmentations_for_the_same_draws() -> None:
    import_mmseg()
    from mmcv.transforms import RandomFlip, RandomResize
    from mmseg.datasets import transforms as expected

    pipeline = [
        RandomResize(scale=(400, 100), ratio_range=(0.5, 2.0), keep_ratio=True),
        expected.RandomCrop(crop_size=(100, 100), cat_max_ratio=0.75),
        RandomFlip(prob=0.5),
        expected.PhotoMetricDistortion(),
    ]
    means = []
    for number in range(40):
        pixels, labels = example(number)
        replay = Replay(number)
        item: dict[str, Any] = {
            "img": pixels[..., ::-1].copy(),
            "gt_seg_map": labels.copy(),
            "seg_fields": ["gt_seg_map"],
        }
        item["img_shape"] = pixels.shape[:2]
        draws = {name: getattr(replay, name) for name in ("random_sample", "randint", "uniform", "choice")}
        with mock.patch.multiple(np.random, **draws), mock.patch.object(expected.transforms, "random", replay):
            for transform in pipeline:
                item = transform(item)
        draw = np.random.default_rng(number).random
        image, target = augment(pixels, labels, SegmentAugmentation((100, 100), (400, 100)), draw)
        assert draw() == replay.random()  # both have drawn the same numbers
        assert np.array_equal(target.numpy(), item["gt_seg_map"])
        difference = np.abs(image.permute(1, 2, 0).numpy().astype(int) - item["img"][..., ::-1])
        means.append(difference.mean())
        assert (difference > 4).mean() < 0.03
    assert max(means) < 1.5
    assert np.mean(means) < 0.6


def test_resizing_is_opencvs() -> None:
    import cv2

    pixels, labels = example(3)
    for size in ((33, 71), (160, 150), (301, 222)):
        expected = cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR)
        actual = resize_image(pixels, size).permute(1, 2, 0).numpy()
        assert np.abs(actual.astype(int) - expected).max() <= 1
        box = (5, 7, size[0] - 9, size[1] - 11)
        nearest = cv2.resize(labels, size[::-1], interpolation=cv2.INTER_NEAREST)[5 : size[0] - 4, 7 : size[1] - 4]
        assert np.array_equal(crop_labels(labels, size, box), nearest)


def test_a_crop_of_a_resized_image_equals_the_resized_crop() -> None:
    """Only what the part needs is computed, and yet to the bit."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        pixels = rng.integers(0, 256, (*rng.integers(5, 120, 2), 3), dtype=np.uint8)
        size = int(pixels.shape[0] * rng.uniform(0.4, 3)) + 1, int(pixels.shape[1] * rng.uniform(0.4, 3)) + 1
        height, width = (int(rng.integers(1, side + 1)) for side in size)
        top, left = int(rng.integers(size[0] - height + 1)), int(rng.integers(size[1] - width + 1))
        part = resize_part(pixels, size, (top, left, height, width))
        assert torch.equal(part, resize_image(pixels, size)[:, top : top + height, left : left + width])


def test_sizes_keep_their_shape_within_both_caps() -> None:
    assert fit_into((600, 800), 2048, 512) == (512, 683)
    assert fit_into((100, 1000), 2048, 512) == (205, 2048)
    assert fit_into((1, 5000), 2048, 512) == (1, 2048)


def test_a_crop_of_one_class_is_redrawn() -> None:
    labels = np.zeros((100, 200), np.uint8)
    labels[:, 150:] = 1
    pixels = np.zeros((100, 200, 3), np.uint8)
    options = SegmentAugmentation((100, 100), (200, 100), (1.0, 1.0), photometric=False)
    shares = []
    for seed in range(60):
        _, target = augment(pixels, labels, options, np.random.default_rng(seed).random)
        shares.append(max(np.bincount(target.numpy().ravel())) / target.numel())
    assert np.mean([share < 0.75 for share in shares]) > 0.9  # half of all crops without the rule
    _, target = augment(pixels, np.zeros_like(labels), options, np.random.default_rng(0).random)
    assert not target.any()  # the last draw is kept even so


def test_ignored_pixels_are_no_second_class() -> None:
    labels = np.full((20, 20), 3, np.uint8)
    labels[::2] = IGNORE
    draw = mock.Mock(side_effect=np.random.default_rng(0).random)
    options = SegmentAugmentation((10, 10), (20, 20), (1.0, 1.0), photometric=False)
    augment(np.zeros((20, 20, 3), np.uint8), labels, options, draw)
    assert draw.call_count == 1 + 2 * (1 + CROP_TRIES) + 1  # the ratio, a crop and all tries, the flip


@pytest.mark.parametrize(
    ("ignored", "most", "tries"),
    [(0.5, 0.4, CROP_TRIES + 1), (0.8, 0.1, 1), (0.0, 0.74, 1), (0.0, 0.76, CROP_TRIES + 1)],
)
def test_ignored_pixels_are_outside_the_share_of_a_class(ignored: float, most: float, tries: int) -> None:
    """The most frequent class may cover less than three quarters of the labelled pixels, however few they are."""
    labels = np.full(100, 7, np.uint8)
    labels[: int(100 * ignored)] = IGNORE
    labels[int(100 * ignored) : int(100 * (ignored + most) + 0.5)] = 3
    draw = mock.Mock(side_effect=np.random.default_rng(0).random)
    options = SegmentAugmentation((10, 10), (10, 10), (1.0, 1.0), photometric=False)
    augment(np.zeros((10, 10, 3), np.uint8), labels.reshape(10, 10), options, draw)
    assert draw.call_count == 1 + 2 * tries + 1  # the ratio, the places of crops, the flip


def test_images_are_mirrored_unless_that_is_switched_off() -> None:
    pixels, labels = example(5)
    plain = SegmentAugmentation((60, 60), (400, 100))
    mirrored = 0
    for seed in range(20):
        draws = [np.random.default_rng(seed).random for _ in range(2)]
        (image, target), (upright, truth) = (
            augment(pixels, labels, replace(plain, flip=flip, photometric=False), draw)
            for flip, draw in zip((True, False), draws, strict=True)
        )
        same = torch.equal(image, upright) and torch.equal(target, truth)
        assert same or (torch.equal(image.flip(-1), upright) and torch.equal(target.flip(-1), truth))
        mirrored += not same
        assert draws[0]() == draws[1]()  # what is drawn later does not depend on it
    assert 4 < mirrored < 16


def test_an_image_smaller_than_the_crop_is_padded() -> None:
    image, target, extent = pad(torch.ones(3, 20, 30, dtype=torch.uint8), torch.ones(20, 30).byte(), (32, 40))
    assert image.shape == (3, 32, 40)
    assert extent.tolist() == [20, 30]
    assert (target[:20, :30] == 1).all()
    assert (target[20:] == IGNORE).all()
    assert (target[:, 30:] == IGNORE).all()


def test_strips_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(0, 256, (3, 50, 40), generator=torch.Generator().manual_seed(0)).byte()
    strips: list[list[torch.Tensor]] = []
    for rows in (7, 50):
        monkeypatch.setattr(transforms, "STRIP", rows)
        strips.append([photometric_distortion(image, np.random.default_rng(seed).random) for seed in range(40)])
    assert all(torch.equal(*pair) for pair in zip(*strips, strict=True))


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.4])
def test_saturation_matches_the_color_model(factor: float) -> None:
    rgb = torch.randint(0, 256, (3, 1, 200), generator=torch.Generator().manual_seed(0)).float()
    actual = scale_saturation(rgb, factor)
    for place in range(rgb.shape[-1]):
        h, s, v = colorsys.rgb_to_hsv(*(rgb[:, 0, place] / 255).tolist())
        expected = torch.tensor(colorsys.hsv_to_rgb(h, min(1, s * factor), v)) * 255
        assert (actual[:, 0, place] - expected).abs().max() <= 0.51


@pytest.mark.parametrize("steps", [-18, 0, 17])
def test_hue_matches_the_color_model(steps: int) -> None:
    rgb = torch.randint(0, 256, (3, 1, 200), generator=torch.Generator().manual_seed(1)).float()
    actual, exact = shift_hue(rgb, steps), 0
    for place in range(rgb.shape[-1]):
        h, s, v = colorsys.rgb_to_hsv(*(rgb[:, 0, place] / 255).tolist())
        rounded = round(h * 180 + steps) / 180 % 1
        expected = torch.tensor(colorsys.hsv_to_rgb(rounded, s, v)) * 255
        difference = (actual[:, 0, place] - expected).abs().max()
        assert difference <= 0.51 + 255 / 30  # a tie may round to the next step
        exact += int(difference <= 0.51)
    assert exact > 190


def test_grey_pixels_stay_grey_under_hue_and_saturation() -> None:
    grey = torch.arange(256.0).expand(3, 1, 256)
    assert torch.equal(scale_saturation(grey, 1.5), grey)
    assert torch.equal(shift_hue(grey, 9), grey)


def test_no_draw_changes_nothing() -> None:
    image = torch.randint(0, 256, (3, 9, 9), dtype=torch.uint8)
    assert torch.equal(photometric_distortion(image, lambda: 0.1), image)
