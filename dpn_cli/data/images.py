"""Images without labels: a folder of pictures, or the built-in scenes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dpn_cli.data.labelled import Images, Labelled, SceneSplit
from dpn_cli.data.reading import SUFFIXES, USUAL, Reading, find_files, open_image
from dpn_cli.errors import DataError


class ImageFiles(Images):
    """Pictures by their paths; every label is zero."""

    def __init__(self, found: Sequence[tuple[Path, int]], reading: Reading = USUAL) -> None:
        self.paths, self.reading = [path for path, _ in found], reading
        self.labels: Sequence[int] = [0] * len(found)
        self.sizes: Sequence[int] = [size for _, size in found]

    def where(self, index: int) -> str:
        """Name an image's file."""
        return str(self.paths[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return open_image(self.paths[index], self.where(index), self.reading)


def find_images(source: str, most: int, seed: int, reading: Reading = USUAL) -> Labelled:
    """Return up to `most` images of a folder and the folders in it, drawn by `seed`, or that many scenes of ``demo``.

    Raises `DataError` when there is no such folder or no image in it.
    """
    if source == "demo":
        return SceneSplit("demo_count", 0, most)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"--data {source}: no such folder; pass a folder of images, or demo")
    images = find_files(folder)
    if not images:
        raise DataError(f"--data {source}: no image in it or below it ({', '.join(sorted(SUFFIXES))})")
    order = np.random.default_rng(seed).permutation(len(images))[:most]
    return ImageFiles([images[i] for i in order], reading)


def find_pictures(places: Sequence[Path]) -> list[Path]:
    """Return the pictures among files and folders. Raises `DataError` for a missing one or a folder without any."""
    pictures: list[Path] = []
    for path in places:
        if path.is_dir():
            inside = [entry for entry, _ in find_files(path)]
            if not inside:
                raise DataError(f"{path}: no picture in this folder ({', '.join(sorted(SUFFIXES))})")
            pictures += inside
        elif path.exists() or path.is_symlink():
            pictures.append(path)
        else:
            raise DataError(f"{path}: no such picture")
    return pictures
