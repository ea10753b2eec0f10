"""Images that tests generate: as bytes, in class folders and in tar files."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from torch import Tensor


def write_class_folders(root: Path, classes: int = 3, each: int = 5, size: tuple[int, int] = (50, 40)) -> Path:
    """Write smooth JPEG images in one folder per class; the class decides the colour."""
    g = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(each):
            patches = g.integers(0, 90, (4, 4, 3), dtype=np.uint8)
            patches[..., label % 3] += 150
            image = Image.fromarray(patches).resize(size, Image.Resampling.BICUBIC)
            image.save(root / f"class{label}" / f"{number:03d}.jpg", quality=95)
    return root


def write_turned(path: Path, image: Image.Image, value: int) -> Path:
    """Store an image with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    image.save(path, exif=exif, quality=95)
    return path


def turn_files(root: Path, pattern: str = "*.jpg") -> None:
    """Store images as a phone that is held upright does: on their side, with the orientation that turns them back."""
    for path in sorted(root.rglob(pattern)):
        with Image.open(path) as image:
            write_turned(path, image.convert("RGB").transpose(Image.Transpose.ROTATE_90), 6)


def png_bytes(number: int, size: int = 20) -> bytes:
    """Return a random image as PNG."""
    pixels = np.random.default_rng(number).integers(256, size=(size, size + 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_png_images(folder: Path, count: int = 6) -> list[str]:
    """Write random images; returns their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(png_bytes(number))
    return names


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar file of the members."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def encode_jpeg(image: Image.Image, **arguments: Any) -> io.BytesIO:
    """Return an image as a JPEG file in memory."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **arguments)
    buffer.seek(0)
    return buffer


def make_photo(width: int, height: int) -> Image.Image:
    """Return a smooth image of a size."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def png_with_claimed_size(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def write_class_shard(path: Path, first: int, count: int, label: bool = True) -> None:
    """Write a tar file of PNG images, numbered from `first`, with their labels unless `label` is false."""
    members = dict[str, bytes]()
    for number in range(first, first + count):
        buffer = io.BytesIO()
        Image.new("RGB", (20, 10), (number * 20, 0, 0)).save(buffer, "PNG")
        members[f"{number:04d}.png"] = buffer.getvalue()
        if label:
            members[f"{number:04d}.cls"] = str(number % 3).encode()
    write_tar(path, members)


def noise_images(count: int = 3) -> Tensor:
    """Return noise images whose patches differ in brightness and contrast."""
    g = torch.Generator().manual_seed(1)
    coarse = [F.interpolate(torch.rand(count, 3, 4, 3, generator=g), size=(32, 24)) * scale for scale in (100.0, 120.0)]
    return (coarse[0] + 30 + coarse[1] * torch.rand(count, 3, 32, 24, generator=g)).to(torch.uint8)
