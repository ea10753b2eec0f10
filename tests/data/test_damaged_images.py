"""Two thousand damaged images: every way to read them ends in whole pixels or in one clear line."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpn_cli.data.crops import eval_crop, train_crop
from dpn_cli.data.decode import ReadOptions, open_image, read_pixels
from dpn_cli.data.sources.folder import FolderImages
from dpn_cli.data.sources.pack_writer import PackOptions, _encode
from dpn_cli.data.validate import inspect_image
from dpn_cli.errors import DpnError
from support.damage import DAMAGES
from tasks.segment.labels import read_mask

IMAGES = int(os.environ.get("DPN_DAMAGED", "500"))
SIDES = 24, 18
READINGS = {
    "exact": ReadOptions(),
    "pillow": ReadOptions("pillow"),
    "shrunk": ReadOptions(max_pixels=20 * 20),
}


def stored(kind: str) -> bytes:
    """Return an image in one of the formats and modes that are read, of noise on a slope."""
    g = np.random.default_rng(0)
    slope = np.linspace(0, 200, SIDES[0] * SIDES[1] * 3).reshape(SIDES[1], SIDES[0], 3)
    pixels = (slope + g.integers(0, 50, slope.shape)).astype(np.uint8)
    image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257 if "16 bits" in kind else pixels)
    name, _, mode = kind.partition(" ")
    image = image.convert(MODES[mode]) if mode in MODES else image
    buffer = io.BytesIO()
    image.save(buffer, name, append_images=[image.rotate(180)], **OPTIONS.get(mode, {}))
    return buffer.getvalue()


MODES = {"grey": "L", "CMYK": "CMYK", "palette": "P", "alpha": "RGBA", "group4": "1"}
OPTIONS: dict[str, dict[str, Any]] = {
    "progressive": {"progressive": True},
    "animated": {"save_all": True},
    "lossless": {"lossless": True},
    "palette": {"transparency": 3},
    **{name: {"compression": name} for name in ("tiff_lzw", "jpeg", "tiff_deflate", "group4")},
}
KINDS = (
    *("JPEG", "JPEG progressive", "JPEG grey", "JPEG CMYK", "MPO animated"),
    *("PNG", "PNG grey", "PNG palette", "PNG alpha", "PNG 16 bits"),
    *("GIF animated", "WEBP", "WEBP lossless", "WEBP animated", "BMP", "PPM", "PPM grey"),
    *("TIFF", "TIFF tiff_lzw", "TIFF jpeg", "TIFF tiff_deflate", "TIFF group4", "TIFF 16 bits"),
)


def encoded(data: io.BytesIO, where: str, packing: PackOptions, reading: ReadOptions) -> None:
    _, kept = _encode(open_image(data, where, reading), where, packing, reading)
    assert kept


def pixels_of(path: Path, name: str = "exact") -> Any:
    return read_pixels(path, str(path), READINGS[name])


# Every way in which the program reads an image, by its name; each returns the pixels, or raises `DpnError`.
WAYS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(pixels_of, name=name) for name in READINGS},
    "in memory": lambda path: read_pixels(io.BytesIO(path.read_bytes()), str(path), ReadOptions()),
    "evaluation": lambda path: eval_crop(pixels_of(path), 8, (8, 8)),
    "training": lambda path: train_crop(
        open_image(path, str(path), ReadOptions()), str(path), (8, 8), torch.Generator().manual_seed(1), "exact"
    ),
    "training, fast": lambda path: train_crop(
        open_image(path, str(path), ReadOptions()), str(path), (2, 2), torch.Generator().manual_seed(2), "fast"
    ),
    "mask": lambda path: read_mask(open_image(path, str(path)), str(path)),
    "packed": lambda path: encoded(io.BytesIO(path.read_bytes()), str(path), PackOptions(None), ReadOptions()),
    "packed, smaller": lambda path: encoded(io.BytesIO(path.read_bytes()), str(path), PackOptions(8), ReadOptions()),
    "packed, as it is": lambda path: encoded(
        io.BytesIO(path.read_bytes()), str(path), PackOptions(8, "ppm"), ReadOptions()
    ),
    "examined": lambda path: inspect_image(FolderImages(path.parent), 0),
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_images_end_in_pixels_or_in_one_line(kind: str, tmp_path: Path) -> None:
    full, path = stored(kind), tmp_path / "damaged.jpg"
    g = np.random.default_rng(KINDS.index(kind))
    outcomes = Counter[str]()
    for number in range(-1, IMAGES // len(KINDS)):
        path.write_bytes(DAMAGES[number % len(DAMAGES)](full, g) if number >= 0 else full)
        for way, read in WAYS.items():
            refusal = None
            try:
                read(path)
            except DpnError as error:
                refusal = error
            outcomes["read" if refusal is None else "refused"] += 1
            if refusal:
                assert number >= 0 or way in ("mask", "shrunk"), refusal  # what is not damaged is read
                assert refusal.exit_code == 3
                assert str(refusal).startswith(str(path))
                assert "\n" not in str(refusal)
    assert min(outcomes["refused"], outcomes["read"]) > 0
