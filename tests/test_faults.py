"""Files that change under a command that works with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import pictures, write_task
from PIL import Image
from test_segment import write_scenes

from dpn_cli.data.classified import ClassFolders
from dpn_cli.data.images import find_images
from dpn_cli.data.labelled import FileList
from dpn_cli.errors import DataError, PictureError
from tasks.lit.captions import Files
from tasks.segment.pairs import FolderPairs


def class_folders(folder: Path) -> tuple[Path, Callable[[], object]]:
    split = ClassFolders(pictures(folder, classes=2, each=2))
    return split.paths[1], lambda: split.pixels(1)


def unlabelled(folder: Path) -> tuple[Path, Callable[[], object]]:
    split = find_images(str(pictures(folder, classes=1, each=1)), 1, 0)
    return folder / "class0" / "000.jpg", lambda: split.pixels(0)


def listed(folder: Path) -> tuple[Path, Callable[[], object]]:
    write_task(folder, {"test": np.zeros((2, 8, 8, 3), np.uint8)}, {"test": np.arange(2)})
    split = FileList(folder, "test")
    return split.paths[1], lambda: split.pixels(1)


def captioned(folder: Path) -> tuple[Path, Callable[[], object]]:
    pictures(folder, classes=1, each=1)
    files = Files()
    files.add(folder, "class0/000.jpg", ["a picture"], "pairs.csv")
    return files.paths[0], lambda: files.open(0).close()


def image_of_a_pair(folder: Path) -> tuple[Path, Callable[[], object]]:
    pairs = FolderPairs(write_scenes(folder, {"training": 2}), "training")
    return pairs.images[1], lambda: pairs.load(1)


def mask_of_a_pair(folder: Path) -> tuple[Path, Callable[[], object]]:
    pairs = FolderPairs(write_scenes(folder, {"training": 2}), "training")
    return pairs.masks[1], lambda: pairs.load(1)


@pytest.mark.parametrize("kind", [class_folders, unlabelled, listed, captioned, image_of_a_pair, mask_of_a_pair])
def test_a_picture_that_is_replaced_while_it_is_in_use_is_named(
    kind: Callable[[Path], tuple[Path, Callable[[], object]]], tmp_path: Path
) -> None:
    path, read = kind(tmp_path / "data")
    read()
    before = path.read_bytes()
    with Image.open(path) as image:
        size = image.size
    Image.effect_noise(size, 50).save(path)
    sizes = f"the file has {path.stat().st_size} bytes, and had {len(before)} when"
    with pytest.raises(DataError, match=f"{path}.*: {sizes}") as found:
        read()
    assert not isinstance(found.value, PictureError)  # which --skip-bad-images would leave out
    path.write_bytes(before)
    read()
