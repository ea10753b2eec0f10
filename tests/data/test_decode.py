"""Image files: TensorFlow's pixels of JPEGs, the limit on pixels, and files that are no images."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from dpn_cli.config.schema import MAX_PIXELS
from dpn_cli.data.crops import Decode, eval_crop, inception_box, train_crop
from dpn_cli.data.decode import Decoder, ReadOptions, decode, open_image, read_pixels
from dpn_cli.data.file_index import find_files
from dpn_cli.data.resize import resize
from dpn_cli.errors import DataError, ImageError
from support.goldens import Arrays
from support.images import encode_jpeg, make_photo, png_with_claimed_size
from support.time_limits import time_limit

BOTH: tuple[Decoder, Decoder] = ("exact", "pillow")
USUAL = ReadOptions()


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit(30):
        yield


def recorded(golden: Callable[[str], Arrays], number: int) -> tuple[bytes, Any, Any]:
    arrays = golden("preprocess_jpeg")
    encoded, default, reference = (arrays[f"jpeg{number}/{name}"] for name in ("bytes", "decode", "decode_precise"))
    return encoded.tobytes(), default, reference


@pytest.mark.parametrize("number", [0, 1])
def test_jpegs_decode_to_tensorflows_pixels_exactly(number: int, golden: Callable[[str], Arrays]) -> None:
    encoded, default, reference = recorded(golden, number)
    exact, pillow = (read_pixels(io.BytesIO(encoded), "here", ReadOptions(decoder)) for decoder in BOTH)
    assert np.array_equal(exact, default)
    assert np.array_equal(pillow, reference)
    assert not np.array_equal(default, reference)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("options", ["exact", "pillow"])
def test_jpeg_to_crop_is_the_recorded_chain(number: int, options: Decode, golden: Callable[[str], Arrays]) -> None:
    encoded, default, reference = recorded(golden, number)
    expected = reference if options == "pillow" else default
    for seed in range(5):
        image = open_image(io.BytesIO(encoded), "here")
        actual = train_crop(image, "here", (32, 32), torch.Generator().manual_seed(seed), options)
        top, left, height, width = inception_box(expected.shape[:2], torch.Generator().manual_seed(seed))
        assert torch.equal(actual, resize(expected[top : top + height, left : left + width], (32, 32)))
    pixels = read_pixels(io.BytesIO(encoded), "here", ReadOptions("pillow" if options == "pillow" else "exact"))
    assert torch.equal(eval_crop(pixels, 48, (42, 42)), eval_crop(expected, 48, (42, 42)))


@pytest.mark.parametrize("arguments", [{"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"keep_rgb": True}])
def test_jpegs_of_every_kind_differ_from_pillows_by_rounding(arguments: dict[str, Any]) -> None:
    encoded = encode_jpeg(make_photo(133, 97), **arguments).getvalue()
    exact, pillow = (read_pixels(io.BytesIO(encoded), "here", ReadOptions(decoder)) for decoder in BOTH)
    difference = np.abs(exact.astype(int) - pillow)
    assert 0 < difference.mean() < 1.5


def test_grey_jpegs_have_three_equal_channels_and_tensorflows_dct() -> None:
    encoded = encode_jpeg(make_photo(133, 97).convert("L")).getvalue()
    exact, pillow = (read_pixels(io.BytesIO(encoded), "here", ReadOptions(decoder)) for decoder in BOTH)
    assert exact.shape == (97, 133, 3)
    assert (exact == exact[..., :1]).all()
    assert 0 < np.abs(exact.astype(int) - pillow).mean() < 1


def test_pillow_decodes_everything_but_grey_and_colour_jpegs(tmp_path: Path) -> None:
    photo = make_photo(40, 30)
    photo.convert("CMYK").save(tmp_path / "cmyk.jpg")
    photo.save(tmp_path / "photo.png")
    photo.save(tmp_path / "photo.webp", lossless=True)
    for path in tmp_path.iterdir():
        with Image.open(path) as image:
            expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(read_pixels(path, "", USUAL), expected), path.name


def test_of_several_images_in_a_jpeg_the_first_is_taken(tmp_path: Path) -> None:
    photo = make_photo(40, 30)
    photo.save(tmp_path / "two.mpo", save_all=True, append_images=[photo.rotate(180)])
    photo.save(tmp_path / "one.jpg")
    with Image.open(tmp_path / "two.mpo") as image:
        assert image.format == "MPO"
    one, two = (read_pixels(tmp_path / name, "", USUAL) for name in ("one.jpg", "two.mpo"))
    assert np.array_equal(one, two)


def test_a_jpeg_that_the_decoder_refuses_is_pillows() -> None:
    encoded = encode_jpeg(make_photo(200, 200), restart_marker_rows=1).getvalue()
    encoded = encoded.replace(b"\xff\xd1", b"damage\xff\xd1", 1)  # libjpeg warns and decodes around it
    with pytest.raises(ValueError, match="6 extraneous bytes"):
        simplejpeg.decode_jpeg(encoded)
    exact, pillow = (read_pixels(io.BytesIO(encoded), "here", ReadOptions(decoder)) for decoder in BOTH)
    assert np.array_equal(exact, pillow)


@pytest.mark.parametrize("size", [(13_378, 13_378), (2**31, 2**31), (2**31 - 1, 2**31 - 1)])
def test_images_above_the_limit_are_refused_unread(size: tuple[int, int]) -> None:
    assert MAX_PIXELS == 178_956_970
    message = f"it: {size[0]} x {size[1]} pixels, more than the 178956970 that are read; .*--max-pixels"
    with pytest.raises(ImageError, match=message) as caught:
        open_image(io.BytesIO(png_with_claimed_size(*size)), "it")
    assert caught.value.exit_code == 3


def test_a_claim_that_is_allowed_is_still_one_line() -> None:
    with pytest.raises(ImageError, match="it: not a readable image"):
        read_pixels(io.BytesIO(png_with_claimed_size(2**31, 2**31)), "it", ReadOptions(max_pixels=2**63))


def test_large_scans_are_read_when_the_limit_allows_them() -> None:
    with open_image(io.BytesIO(png_with_claimed_size(10_000, 10_000)), "it") as scan:  # Pillow would warn here
        assert scan.size == (10_000, 10_000)
    with open_image(
        io.BytesIO(png_with_claimed_size(20_000, 10_000)), "it", ReadOptions(max_pixels=200_000_000)
    ) as scan:
        assert scan.size == (20_000, 10_000)


def test_jpegs_above_the_limit_are_decoded_at_a_part_of_their_size() -> None:
    encoded = encode_jpeg(make_photo(208, 104), quality=95).getvalue()
    full = read_pixels(io.BytesIO(encoded), "it", USUAL)
    for most, shape in ((208 * 104, (104, 208)), (208 * 104 - 1, (52, 104)), (2000, (26, 52)), (400, (13, 26))):
        part = read_pixels(io.BytesIO(encoded), "it", ReadOptions(max_pixels=most))
        assert part.shape == (*shape, 3)
        smaller = np.asarray(Image.fromarray(full).resize(shape[::-1], Image.Resampling.BOX))
        assert np.abs(part.astype(int) - smaller).mean() < 4
    for reading in (ReadOptions(max_pixels=300), ReadOptions(max_pixels=2000, shrink=False)):
        with pytest.raises(ImageError, match="it: 208 x 104 pixels, more than"):
            open_image(io.BytesIO(encoded), "it", reading)


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket.jpg"))
        make_photo(40, 30).save(tmp_path / "photo.JPG")
        actual = find_files(tmp_path)
        assert [path.name for path, _ in actual] == sorted(
            ["gone.jpg", "loop.jpg", "photo.JPG", "pipe.jpg", "socket.jpg", "zero.jpg"]
        )
        assert [path.name for path, size in actual if size] == ["photo.JPG"]
        reasons = {"pipe": "not a regular file", "gone": "No such file", "loop": "Too many levels", "zero": "not a reg"}
        for name, reason in {**reasons, "socket": "not a regular file"}.items():
            with pytest.raises(ImageError, match=rf"{name}\.jpg: not a readable image \({reason}"):
                open_image(tmp_path / f"{name}.jpg", f"{name}.jpg")


@pytest.mark.parametrize("content", [b"junk", b"", b"\xff\xd8\xff"])
def test_bytes_that_are_no_image_are_reported_as_an_unknown_format(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(content)
    for file in (io.BytesIO(content), tmp_path / "a.jpg"):
        with pytest.raises(DataError, match=r"it: not a readable image \(of no known format\)") as caught:
            open_image(file, "it")
        assert "BytesIO" not in str(caught.value)


def test_decoding_closes_the_file(tmp_path: Path) -> None:
    make_photo(40, 30).save(tmp_path / "photo.jpg")
    for decoder in BOTH:
        image = open_image(tmp_path / "photo.jpg", "it")
        decode(image, "it", decoder)
        file = getattr(image, "fp", None)
        assert file is None or file.closed


def test_a_palette_with_transparency_is_read_without_a_word(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4), "P")
    image.putpalette(list(range(255, 219, -1)))
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "half.png", transparency=bytes(range(12)))
    plain, half = (read_pixels(tmp_path / name, name, USUAL) for name in ("plain.png", "half.png"))
    assert np.array_equal(plain, half)
    assert half[2, 3].tolist() == [222, 221, 220]
