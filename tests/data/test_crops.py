"""Crops and resizing against what TensorFlow and big_vision recorded, and images that break other loaders."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image

from dpn_cli.data.augment import Augmentation, make_transform
from dpn_cli.data.crops import Decode, area_weights, eval_crop, inception_box, scale_to_short_side, train_crop
from dpn_cli.data.decode import decode, open_image
from dpn_cli.data.resize import resize
from dpn_cli.errors import DataError
from support.goldens import Arrays
from support.images import encode_jpeg, make_photo

HOW: tuple[Decode, Decode] = ("exact", "fast")


def close(actual: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    """One grey level, where the exact value is next to a whole number: rounding noise decides which it is cut to."""
    difference = (actual.permute(1, 2, 0).int() - torch.from_numpy(expected).int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.25


@pytest.mark.parametrize("name", ["preprocess_img0", "preprocess_img1", "preprocess_img2"])
@pytest.mark.parametrize(("op", "side", "size"), [("eval_i1k_like", 48, 42), ("eval_hires_like", 33, 30)])
def test_evaluation_crops_are_the_references(
    name: str, op: str, side: int, size: int, golden: Callable[[str], Arrays]
) -> None:
    arrays = golden(name)
    if op not in arrays:
        pytest.skip("not recorded for this image")
    expected = np.round((arrays[op] + 1) * 127.5).astype(np.uint8)
    close(eval_crop(arrays["in"], side, (size, size)), expected)


@pytest.mark.parametrize("name", ["preprocess_img0", "preprocess_img1", "preprocess_img2"])
@pytest.mark.parametrize(("op", "side"), [("resize_small", 50), ("resize_small_down", 25)])
def test_area_resizing_is_tensorflows(name: str, op: str, side: int, golden: Callable[[str], Arrays]) -> None:
    arrays = golden(name)
    expected = arrays[op]
    close(eval_crop(arrays["in"], side, (expected.shape[0], expected.shape[1])), expected)


@pytest.mark.parametrize("name", ["preprocess_img0", "preprocess_img1", "preprocess_img2"])
def test_area_weights_give_tensorflows_values_before_the_cut(name: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden(name)
    height, width = arrays["in"].shape[:2]
    new = scale_to_short_side((height, width), 50)
    tall = area_weights(height, new[0], 0, new[0]).mix(torch.from_numpy(arrays["in"].astype(np.float32)).flatten(1))
    wide = area_weights(width, new[1], 0, new[1]).mix(tall.view(new[0], width, 3).transpose(0, 1).flatten(1))
    actual = wide.view(new[1], new[0], 3).transpose(0, 1)
    expected = torch.from_numpy(arrays["resize_small/float_before_cast"])
    torch.testing.assert_close(actual[: len(expected)], expected, atol=2e-3, rtol=0)


def test_a_flat_image_stays_flat() -> None:
    for shape in ((37, 61, 3), (500, 333, 3), (20, 20, 3)):
        assert (eval_crop(np.full(shape, 255, np.uint8), 41, (32, 32)) == 255).all()


def test_crops_of_the_recorded_boxes_are_the_references(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("inception_crop_samples")
    for (top, left, height, width), expected in zip(
        arrays["inception_crop/boxes"], arrays["inception_crop/out"], strict=True
    ):
        close(resize(arrays["image"][top : top + height, left : left + width], (28, 28)), expected)


def facts(boxes: np.ndarray[Any, Any]) -> Arrays:
    top, left, height, width = boxes.T
    return {"area": height * width, "ratio": width / height, "height": height, "top": top, "left": left}


def test_aspect_ratios_lie_between_big_visions_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = np.array([inception_box((10**6, 10**6), generator) for _ in range(4000)], float)
    ratios = facts(boxes)["ratio"]
    assert ratios.min() == pytest.approx(0.75, abs=1e-3)
    assert ratios.max() == pytest.approx(1.33, abs=1e-3)  # not 4 / 3


def test_crops_have_the_least_area_that_is_asked_for() -> None:
    generator, size = torch.Generator().manual_seed(0), (300, 400)
    areas = facts(np.array([inception_box(size, generator, 0.5) for _ in range(2000)], float))["area"] / 120_000
    assert 0.5 <= areas.min() < 0.51
    assert areas.max() > 0.9
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8))
    scaled = [make_transform(Augmentation((8, 8), crop="timm_bilinear", crop_area=area)) for area in (None, 0.99)]
    random_crop, whole = (transform.transforms[0].transforms[0] for transform in scaled)  # type: ignore[attr-defined]
    assert (random_crop.scale[0], whole.scale[0]) == (0.08, 0.99)
    assert whole(image).size == (8, 8)


@pytest.mark.parametrize("size", [(256, 384), (375, 250), (224, 224)])
def test_boxes_are_drawn_from_tensorflows_distribution(size: tuple[int, int], golden: Callable[[str], Arrays]) -> None:
    recorded = golden("inception_crop_stats")[f"inception_crop/{size[0]}x{size[1]}/boxes"].astype(float)
    generator = torch.Generator().manual_seed(0)
    actual = np.array([inception_box(size, generator) for _ in range(4000)], float)
    for name in ("area", "ratio", "height", "top", "left"):
        assert scipy.stats.ks_2samp(facts(actual)[name], facts(recorded)[name]).pvalue > 0.001, name
    area = (recorded[:, 2] * recorded[:, 3]).mean() / np.prod(size)
    assert (actual[:, 2] * actual[:, 3]).mean() / np.prod(size) == pytest.approx(area, abs=0.015)
    torchvisions = np.random.default_rng(0).uniform(0.05, 1, 4000)  # its area is uniform: the test must tell
    assert scipy.stats.ks_2samp(torchvisions, recorded[:, 2] * recorded[:, 3] / np.prod(size)).pvalue < 1e-6


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (1, 1), (2, 3), (3000, 10)])
def test_extreme_images_have_crops_inside_them(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        top, left, height, width = inception_box(size, generator)
        assert 0 <= top <= top + height <= size[0]
        assert 0 <= left <= left + width <= size[1]
        assert height * width > 0


def both(data: bytes, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    exact, fast = (
        train_crop(Image.open(io.BytesIO(data)), "", (64, 64), torch.Generator().manual_seed(seed), mode)
        for mode in HOW
    )
    return exact, fast


def test_fast_decoding_cuts_the_same_place_of_large_photographs() -> None:
    data = encode_jpeg(make_photo(1600, 1200), quality=95).getvalue()
    for seed in range(8):
        exact, fast = (
            train_crop(Image.open(io.BytesIO(data)), "", (64, 64), torch.Generator().manual_seed(seed), mode)
            for mode in ("exact", "fast")
        )
        assert (exact.int() - fast.int()).abs().float().mean() < 4
    small = encode_jpeg(make_photo(100, 80)).getvalue()  # nothing to shrink: the same pixels
    exact, fast = both(small, 1)
    assert set((fast.int() - exact.int()).flatten().tolist()) == {0, 1}  # rounded instead of cut off
    assert fast.stride() == exact.stride()  # which a batch of them has then


def odd_images(folder: Path) -> dict[str, tuple[Path, tuple[int, int]]]:
    """Images of the kinds that real folders hold: path and the (height, width) that is read."""
    photo = make_photo(40, 30)
    sixteen = Image.fromarray((np.arange(1200).reshape(30, 40) * 50).astype(np.uint16))
    turned = Image.Exif()
    turned[0x0112] = 6  # "rotate by 90 degrees", which the reference ignores
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    photo.convert("L").save(folder / "grey.png")
    photo.convert("P").save(folder / "palette.png")
    photo.convert("RGBA").save(folder / "transparent.png")
    photo.save(folder / "animated.gif", save_all=True, append_images=[photo.rotate(90), photo.rotate(180)])
    make_photo(5000, 1).save(folder / "line.png")
    sixteen.save(folder / "sixteen.png")
    photo.save(folder / "turned.jpg", exif=turned)
    sizes = {"line.png": (1, 5000)}
    return {path.name: (path, sizes.get(path.name, (30, 40))) for path in sorted(folder.iterdir())}


def test_odd_images_are_read_and_cropped(tmp_path: Path) -> None:
    for name, (path, size) in odd_images(tmp_path).items():
        pixels = decode(open_image(path, name), name)
        assert pixels.shape == (*size, 3), name
        assert pixels.dtype == np.uint8
        crop = train_crop(open_image(path, name), name, (16, 16), torch.Generator().manual_seed(0), "fast")
        assert crop.shape == (3, 16, 16)
        assert eval_crop(pixels, 418, (384, 384)).shape == (3, 384, 384)
    sixteen = decode(open_image(tmp_path / "sixteen.png", ""), "")
    assert sixteen.max() == (1199 * 50) >> 8
    first = decode(open_image(tmp_path / "animated.gif", ""), "")
    assert np.abs(first.astype(int) - np.asarray(make_photo(40, 30)).astype(int)).mean() < 20


def test_a_truncated_jpeg_is_an_error_with_its_place(tmp_path: Path) -> None:
    full = encode_jpeg(make_photo(200, 200)).getvalue()
    (tmp_path / "cut.jpg").write_bytes(full[: len(full) // 2])
    for mode in HOW:
        with pytest.raises(DataError, match=r"cut\.jpg: not a readable image .*truncated"):
            train_crop(
                open_image(tmp_path / "cut.jpg", "cut.jpg"),
                "cut.jpg",
                (16, 16),
                torch.Generator().manual_seed(0),
                mode,
            )


def test_a_large_image_is_not_held_in_floats() -> None:
    pixels = np.zeros((1000, 1500, 3), np.uint8)
    tracemalloc.start()
    eval_crop(pixels, 18, (16, 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * pixels[..., 0].astype(np.float32).nbytes
