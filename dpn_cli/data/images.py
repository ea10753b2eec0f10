"""Images without labels: a folder of images, or the built-in scenes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpn_cli.config.urls import is_hub, is_shards, is_url
from dpn_cli.data.classified import DEMO, ImageSource, Part, hub_name, hub_split, open_split
from dpn_cli.data.decode import SUFFIXES, USUAL, Reading
from dpn_cli.data.file_index import FolderImages, find_files
from dpn_cli.data.labelled import HubImages, Labelled, SceneSplit
from dpn_cli.data.sources.cifar import find_cifar
from dpn_cli.data.sources.packs import is_pack
from dpn_cli.data.sources.shards import Member, Shard, ShardImages
from dpn_cli.errors import DataError


def find_images(source: str, most: int, seed: int, reading: Reading = USUAL) -> Labelled:
    """Return up to `most` images below a folder, drawn by `seed`, or that many scenes of ``demo``.

    Raises `DataError` when there is no such folder or no image in it.
    """
    if source == "demo":
        return SceneSplit("demo_count", 0, most)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"--data {source}: no such folder; pass a folder of images, or demo")
    images = FolderImages(folder, reading=reading)
    if not images.sizes:
        raise DataError(f"--data {source}: no image in it or below it ({', '.join(sorted(SUFFIXES))})")
    return Part(images, np.random.default_rng(seed).permutation(len(images.sizes))[:most])


class _HubImages(HubImages):
    """A split of a hub data set whose labels, if there are any, are left alone; every label is zero."""

    def __init__(self, name: str, config: str, split: str, image: str | None) -> None:
        super().__init__(name, config, split, image, alone=True)
        self.labels: Sequence[int] = [0] * len(self.sizes)


class _ShardImages(ShardImages):
    """All images of webdataset shards; every label is zero."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern, ())
        self.labels: Sequence[int] = [0] * len(self.sizes)

    def take(self, path: Shard, member: Member) -> bool:
        """Take every image."""
        return True


def open_unlabelled(source: ImageSource) -> Labelled:
    """Open the training images of `source` without looking at labels; a folder needs no class folders in it.

    Of a folder with ``train`` in it those are meant. Raises `DataError` where there are no images.
    """
    place = source.place
    split: Labelled
    if is_hub(place):
        name, config = hub_name(place)
        split = _HubImages(name, config, hub_split(place, "train") or "train", source.image_column)
    elif is_shards(place):
        split = _ShardImages(place.removeprefix("wds:"))
    elif place in DEMO or is_url(place) or is_pack(root := Path(place).expanduser()) or find_cifar(root):
        split, _ = open_split(source, "train", unlabelled=True)
    else:
        if not root.is_dir():
            raise DataError(
                f"--data {place}: no such folder; pass a folder of images, 'demo' for the built-in ones, hf:OWNER/NAME "
                "or wds:PATTERN"
            )
        inner = root / "train"
        split = FolderImages(inner if inner.is_dir() else root)
    if not len(split.labels):
        raise DataError(f"--data {place}: no image in it or below it ({', '.join(sorted(SUFFIXES))})")
    split.reading = source.reading
    return split


def find_image_files(places: Sequence[Path]) -> list[Path]:
    """Return the images among files and folders. Raises `DataError` for a missing one or a folder without any."""
    images: list[Path] = []
    for path in places:
        if path.is_dir():
            inside = [entry for entry, _ in find_files(path)]
            if not inside:
                raise DataError(f"{path}: no image in this folder ({', '.join(sorted(SUFFIXES))})")
            images += inside
        elif path.exists() or path.is_symlink():
            images.append(path)
        else:
            raise DataError(f"{path}: no such image")
    return images
