"""Formats in which a pack could keep photographs: bytes, and images per second of a core from bytes to a crop.

    python benchmarks/pack_formats.py PHOTOS [--images 200] [--rounds 5]

PHOTOS is a folder of images, which are resized to a shorter side of 320 or 256, as `dpn data pack` does. Each format is
decoded whole, and an inception crop of 224 is cut and resized, in turns with the others. zstandard, lz4 and blosc2 are
measured where they are installed; PNG and WebP are Pillow's.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dpn_cli.data.crops import train_crop
from dpn_cli.run.process import keep_memory

CROP = (224, 224)
Format = tuple[Callable[[Image.Image], bytes], Callable[[bytes], Image.Image]]


def of_pillow(name: str, **options: Any) -> Format:
    """Return a format of Pillow: how an image is written and read."""

    def write(image: Image.Image) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, name, **options)
        return buffer.getvalue()

    return write, lambda content: Image.open(io.BytesIO(content))


def of_compressor(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Format:
    """Return pixels behind a compressor of bytes; the size is in the first four of them."""

    def write(image: Image.Image) -> bytes:
        return np.array(image.size, np.uint16).tobytes() + compress(image.tobytes())

    def read(content: bytes) -> Image.Image:
        width, height = np.frombuffer(content[:4], np.uint16).tolist()
        return Image.frombytes("RGB", (width, height), decompress(content[4:]))

    return write, read


def formats() -> dict[str, Format]:
    """Return the formats by name."""
    found = {
        "JPEG 90, the default (4:2:0)": of_pillow("jpeg", quality=90),
        "JPEG 90, 4:4:4": of_pillow("jpeg", quality=90, subsampling=0),
        "JPEG 80": of_pillow("jpeg", quality=80),
        "JPEG 90, restart markers in every row": of_pillow("jpeg", quality=90, restart_marker_rows=1),
        "WebP 90": of_pillow("webp", quality=90),
        "WebP, lossless": of_pillow("webp", lossless=True, method=0),
        "PNG": of_pillow("png", compress_level=6),
        "PPM": of_pillow("ppm"),
    }
    for name, make in {
        "zstandard": lambda module: (module.ZstdCompressor(3).compress, module.ZstdDecompressor().decompress),
        "lz4.frame": lambda module: (module.compress, module.decompress),
        "blosc2": lambda module: (lambda data: module.compress2(data, typesize=3), module.decompress2),
    }.items():
        try:
            found[f"pixels, {name}"] = of_compressor(*make(importlib.import_module(name)))
        except ImportError:
            print(f"{name} is not installed")
    return found


def resized(path: Path, side: int) -> Image.Image:
    """Return an image whose shorter side is at most `side` pixels."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = side / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS) if scale < 1 else image


def main() -> None:
    """Measure all formats at both sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    keep_memory()  # as the program does
    torch.set_num_threads(1)
    paths = list(itertools.islice(sorted(asked.photos.rglob("*.jpg"))[::7], asked.images))
    contents = {}
    for side, (name, (write, read)) in itertools.product((320, 256), formats().items()):
        contents[f"{name}, {side}"] = [write(resized(path, side)) for path in paths], read
    rates: dict[str, list[float]] = {name: [] for name in contents}
    for _ in range(asked.rounds):
        for name, (files, read) in contents.items():
            began = time.process_time()
            for number, content in enumerate(files):
                train_crop(read(content), "", CROP, torch.Generator().manual_seed(number), "exact")
            rates[name].append(len(files) / (time.process_time() - began))
    first = statistics.median(next(iter(rates.values())))
    print("| format, shorter side | kB an image | images/s of a core | of the default's |\n|---|---|---|---|")
    for name, (files, _) in contents.items():
        rate = statistics.median(rates[name])
        print(f"| {name} | {sum(map(len, files)) / len(files) / 1000:.0f} | {rate:.0f} | {rate / first:.2f} |")


if __name__ == "__main__":
    main()
