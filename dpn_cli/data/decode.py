"""Image files: list folders, open files with a check of their size, decode to TensorFlow's pixels."""

from __future__ import annotations

import io
import math
import os
import stat
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from dpn_cli.config.schema import MAX_PIXELS, RunImageReading
from dpn_cli.errors import DataError, ImageError
from dpn_cli.run.files import real_path

Pixels = npt.NDArray[np.uint8]
Decoder = Literal["exact", "pillow"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".heic", ".heif"}
# Endings of formats that not every Pillow reads, with what to install.
_INSTALLED_READERS = {
    **dict.fromkeys((".heic", ".heif"), "HEIC needs pillow-heif: pip install pillow-heif"),
    ".avif": "AVIF needs Pillow 11.3: pip install -U pillow",
}
try:
    import pillow_heif
except ImportError:
    pass
else:
    pillow_heif.register_heif_opener()
# Exceptions of Pillow and NumPy for an image that is damaged, missing, or larger than memory.
DECODE_ERRORS = (OSError, ValueError, SyntaxError, OverflowError, MemoryError, Image.DecompressionBombError)

# How an image is turned that has a value of EXIF's tag Orientation (JEITA CP-3451, 4.6.4); 1 is upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The entry of an opened image's `info` that holds the bytes of its file, where opening has decoded it.
STORED = "stored"

# `open_image` has its own limit, which the user can change; Pillow would warn at half of it.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class ReadOptions:
    """Options for decoding image files.

    `decoder` decodes JPEGs: ``exact`` gives TensorFlow's pixels, ``pillow`` Pillow's. Images of more than
    `max_pixels` are refused; with `shrink`, JPEGs are read at a half, quarter or eighth of their size instead. With
    `exif`, images are turned as their EXIF orientation says; TensorFlow, and so the paper, ignores it.
    """

    decoder: Decoder = "exact"
    max_pixels: int = MAX_PIXELS
    shrink: bool = True
    exif: bool = False

    def versions(self) -> dict[str, str]:
        """Return the libraries that decode, with versions: the entry of a result file."""
        pillow = f"pillow {metadata.version('pillow')}"
        decoder_version = f"simplejpeg {metadata.version('simplejpeg')}"
        return {"jpeg": decoder_version if self.decoder == "exact" else pillow, "other": pillow}


DEFAULT_READ_OPTIONS = ReadOptions()


def options_of_run(reading: RunImageReading, decoder: Decoder, exif: bool, *, shrink: bool = True) -> ReadOptions:
    """Return how to decode images for a run: by `reading`, and where it leaves them open by the run's own options."""
    exif = exif if reading.exif is None else reading.exif
    return ReadOptions(reading.decode or decoder, reading.max_pixels, shrink, exif)


def decoder_of(decode: str) -> Decoder:
    """Return the decoder of a config's ``data.decode``; ``fast`` differs from ``exact`` in its crops only."""
    return "pillow" if decode == "pillow" else "exact"


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; zero for anything but a regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def resolve_below(root: Path, name: str, location: str) -> Path:
    """Return the path below `root` that data name. Raises `DataError`, with the location, for any other path.

    What a name is a link to may be anywhere: a link is made by who has the data, a name comes with them.
    """
    path = root / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        absolute = Path(os.path.normpath(Path.cwd() / path))
        if not any(
            absolute.is_relative_to(folder) for folder in (os.path.normpath(Path.cwd() / root), real_path(root))
        ):
            raise DataError(
                f"{location}: {name} is not in the folder of the data, {root}; name a folder that holds all files"
            )
    return path


def open_image(
    file: Path | io.BytesIO, location: str, reading: ReadOptions = DEFAULT_READ_OPTIONS, listed: int | None = None
) -> Image.Image:
    """Open an image file and read its size, without decoding it.

    A JPEG that will be shrunk has its reduced size, and an image that has to be turned is decoded. Raises `ImageError`
    with the location when the file is missing, not a regular file or not an image, or when it has too many pixels, and
    `DataError` when it has another number of bytes than was `listed`.
    """
    try:
        if isinstance(file, Path):
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            if listed not in (None, status.st_size):
                raise DataError(
                    f"{location}: the file has {status.st_size} bytes, and had {listed} when the data were listed; put "
                    "back what was there, or start again, and leave the data alone while they are in use"
                )
        image = Image.open(file)
    except DECODE_ERRORS as error:
        raise unreadable_error(location, error) from error
    width, height = image.size
    if width * height > reading.max_pixels and not (reading.shrink and _shrink(image, reading.max_pixels)):
        image.close()
        raise ImageError(
            f"{location}: {width} x {height} pixels, more than the {reading.max_pixels} that are read; allow more with "
            "--max-pixels, or make it smaller"
        )
    if reading.exif and (turn := _TURNS.get(orientation(image))) is not None:
        return _turn(image, turn, location, reading.decoder)
    return image


def _turn(image: Image.Image, turn: Image.Transpose, location: str, decoder: Decoder) -> Image.Image:
    """Decode an image and turn it. Its stored bytes stay with it, by which a data set knows the image."""
    try:
        file: IO[bytes] = vars(image)["fp"]
        file.seek(0)
        stored = file.read()
    except DECODE_ERRORS as error:
        raise unreadable_error(location, error) from error
    turned = Image.fromarray(decode(image, location, decoder)).transpose(turn)
    turned.format, turned.info[STORED] = image.format, stored
    return turned


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 to 8; 1 without one."""
    if "exif" not in image.info:  # Pillow would decode some formats to look for it
        return 1
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (*DECODE_ERRORS, TypeError):  # damaged, as decoders ignore it
        return 1


def _shrink(image: Image.Image, most: int) -> bool:
    """Let the JPEG decoder shrink an image by the smallest factor that is enough. False when none is."""
    width, height = image.size
    for factor in (2, 4, 8):
        if math.ceil(width / factor) * math.ceil(height / factor) <= most:
            return image.draft(None, (max(1, width // factor), max(1, height // factor))) is not None
    return False


def is_stored_turned(image: Image.Image) -> bool:
    """Return whether an opened image is stored in another orientation than its EXIF data give, turned by now or not."""
    return STORED in image.info or orientation(image) in _TURNS


def decode(image: Image.Image, location: str, decoder: Decoder = "exact") -> Pixels:
    """Decode an opened image to RGB (height, width, 3) as TensorFlow's decode_image does, and close it.

    Repeats grey, drops transparency, keeps the upper byte of 16-bit values, takes the first frame of an animation, and
    ignores the EXIF orientation, which `open_image` heeds. Raises `ImageError` with the location when the data are
    damaged.
    """
    try:
        with image:
            if (pixels := _stored_pixels(image)) is not None:
                return pixels
            if decoder == "exact" and (pixels := _jpeg_pixels(image)) is not None:
                return pixels
            image.load()
            if image.mode.startswith("I"):  # PIL would clip 16-bit values instead of scaling them
                grey = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)
                return np.repeat(grey[..., None], 3, axis=2)
            image.info.pop("transparency", None)  # dropped in any case, and PIL would warn of a palette's
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except DECODE_ERRORS as error:
        raise unreadable_error(location, error) from error


def read_pixels(file: Path | io.BytesIO, location: str, reading: ReadOptions) -> Pixels:
    """Return the pixels (height, width, 3) of an image file. Raises `ImageError` as `open_image` and `decode` do."""
    return decode(open_image(file, location, reading), location, reading.decoder)


def _jpeg_pixels(image: Image.Image) -> Pixels | None:
    """Return TensorFlow's pixels of a JPEG in grey or colour; None for other images and when the decoder fails.

    TensorFlow's default is libjpeg's fast integer DCT with smooth chroma; Pillow has the accurate DCT.
    """
    decoder_config = getattr(image, "decoderconfig", ())
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB") or decoder_config or image.fp is None:
        return None
    image.fp.seek(0)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(image.fp.read(), fastdct=True, fastupsample=False)
    except ValueError:
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


def _stored_pixels(image: Image.Image) -> Pixels | None:
    """Return the pixels that a PPM holds uncompressed, of an opened image: Pillow would copy them twice."""
    if not isinstance(image, PpmImageFile) or image.mode != "RGB" or [tile[0] for tile in image.tile] != ["raw"]:
        return None
    assert image.fp is not None
    image.fp.seek(image.tile[0][2])
    shape = image.height, image.width, 3
    return np.frombuffer(image.fp.read(math.prod(shape)), np.uint8).reshape(shape)


def unreadable_error(location: str, error: Exception) -> ImageError:
    """Describe a damaged or missing image in one line."""
    if isinstance(error, UnidentifiedImageError) and (way_out := _INSTALLED_READERS.get(Path(location).suffix.lower())):
        return ImageError(f"{location}: not a readable image; {way_out}, or convert it to JPEG")
    if isinstance(error, UnidentifiedImageError):
        reason = "of no known format"
    elif isinstance(error, MemoryError):
        reason = "its pixels do not fit into memory"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    return ImageError(f"{location}: not a readable image ({reason[:120]}); fetch it again, or remove it")
