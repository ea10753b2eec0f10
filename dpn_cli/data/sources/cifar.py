"""CIFAR-10 and CIFAR-100 as their authors publish them: Python pickles, or bytes (cs.toronto.edu/~kriz/cifar.html).

Pickles can run code when they are read. The unpickler here builds NumPy arrays and plain values only.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dpn_cli.data.decode import Pixels
from dpn_cli.data.sources.base import Images
from dpn_cli.errors import DataError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
# Exceptions that damaged pickles raise.
DAMAGED = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(MemoryError, OverflowError, ImportError, OSError, NotImplementedError),
)


@dataclass(frozen=True)
class CifarLayout:
    """One published form: its folder, its files by split, the file with the class names, the labels.

    `labels` and `names` are the keys of class numbers and class names in a pickle. In the binary form they are None,
    and `label_bytes` bytes precede each image, the last of them its class.
    """

    folder: str
    files: dict[str, tuple[str, ...]]
    meta: str
    labels: str | None = None
    names: str | None = None
    label_bytes: int = 0


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = (
    CifarLayout(
        "cifar-10-batches-py",
        {"train": _TEN, "val": ("test_batch",)},
        "batches.meta",
        "labels",
        "label_names",
    ),
    CifarLayout("cifar-100-python", {"train": ("train",), "val": ("test",)}, "meta", "fine_labels", "fine_label_names"),
    CifarLayout(
        "cifar-10-batches-bin",
        {"train": tuple(f"{name}.bin" for name in _TEN), "val": ("test_batch.bin",)},
        "batches.meta.txt",
        label_bytes=1,
    ),
    CifarLayout(
        "cifar-100-binary", {"train": ("train.bin",), "val": ("test.bin",)}, "fine_label_names.txt", label_bytes=2
    ),
)


def find_cifar(root: Path) -> tuple[Path, CifarLayout] | None:
    """Return the folder of a published form, `root` or one in it, and the form; None if there is none.

    Raises `DataError` when `root` holds both CIFAR-10 and CIFAR-100.
    """
    for layout in LAYOUTS:
        if (root / layout.meta).is_file() and (root / layout.files["val"][0]).is_file():
            return root, layout
    found_layouts = [(root / layout.folder, layout) for layout in LAYOUTS if (root / layout.folder).is_dir()]
    if len({layout.folder.split("-")[1] for _, layout in found_layouts}) > 1:
        raise DataError(f"--data {root}: holds CIFAR-10 and CIFAR-100; name one: --data {found_layouts[0][0]}")
    return found_layouts[0] if found_layouts else None


class CifarImages(Images):
    """The training (``train``) or test images (``val``) of CIFAR, 32 x 32 pixels, with named classes.

    Raises `DataError`, naming the file, when one is missing, damaged or not CIFAR.
    """

    def __init__(self, folder: Path, layout: CifarLayout, split: str) -> None:
        self.layout, self.paths = layout, [folder / name for name in layout.files[split]]
        self.classes = _read_class_names(folder / layout.meta, layout)
        counts, labels = [], []
        for path in self.paths:
            numbers = [int(number) for number in self._table(path)[1]]
            if not all(0 <= number < len(self.classes) for number in numbers):
                raise _damage_error(path, f"a class number is not one of {len(self.classes)}")
            counts.append(len(numbers))
            labels += numbers
        self.ends = np.cumsum(counts)
        self.labels: Sequence[int] = labels
        self.sizes: Sequence[int] = [PIXELS] * len(labels)

    def locate(self, index: int) -> str:
        """Name an image's file and its row in it."""
        path, row = self._locate(index)
        return f"{path}, image {row}"

    def key(self, index: int) -> str:
        """Return an image's file and its row in it."""
        path, row = self._locate(index)
        return f"{path.name}/{row}"

    def open(self, index: int) -> Image.Image:
        """Return an image."""
        path, row = self._locate(index)
        planes = self._table(path)[0][row].reshape(3, SIDE, SIDE)
        return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    def _table(self, path: Path) -> tuple[Pixels, Sequence[int]]:
        return _table(path, self.layout.labels, self.layout.label_bytes)

    def _locate(self, index: int) -> tuple[Path, int]:
        file_number = int(np.searchsorted(self.ends, index, side="right"))
        return self.paths[file_number], index - (int(self.ends[file_number - 1]) if file_number else 0)


@cache
def _table(path: Path, key: str | None, label_bytes: int) -> tuple[Pixels, Sequence[int]]:
    """Return the images of a file, (n, 3072) uint8 in planes, and their classes; each process reads it once."""
    if key is None:
        return _read_binary(path, label_bytes)
    table = _unpickle(path)
    images, labels = table.get("data"), table.get(key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise _damage_error(path, f"no table of {PIXELS} bytes an image under 'data'")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(type(one) is int for one in labels):
        raise _damage_error(path, f"no class number for each image under {key!r}")
    return images, labels


def _read_binary(path: Path, label_bytes: int) -> tuple[Pixels, Sequence[int]]:
    try:
        table = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise _damage_error(path, str(error)) from error
    if len(table) % (label_bytes + PIXELS):
        raise _damage_error(path, f"its {len(table)} bytes are not a whole number of images")
    rows = table.reshape(-1, label_bytes + PIXELS)
    return rows[:, label_bytes:], rows[:, label_bytes - 1].tolist()


def _read_class_names(path: Path, layout: CifarLayout) -> tuple[str, ...]:
    if layout.names is None:
        try:
            return tuple(path.read_text("utf-8").split())
        except (OSError, ValueError) as error:
            raise _damage_error(path, str(error)) from error
    names = _unpickle(path).get(layout.names)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _damage_error(path, f"no names of classes under {layout.names!r}")
    return tuple(names)


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for plain values and NumPy arrays (Python's documentation, "Restricting Globals")."""

    # NumPy moved the function that its pickles call; an array knows its current place.
    _rebuild: Any = np.empty(0).__reduce__()[0]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names, if arrays need it. Raises `UnpicklingError` for any other."""
        package, _, submodule = module.partition(".")
        if package == "numpy" and submodule in ("core.multiarray", "_core.multiarray") and name == "_reconstruct":
            return self._rebuild
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no array needs")


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a pickled mapping, without running code from it. Raises `DataError` for any other file."""
    try:
        with path.open("rb") as file:
            table = _ArraysOnly(file, encoding="latin1").load()
    except DAMAGED as error:
        raise _damage_error(path, getattr(error, "strerror", None) or str(error) or "it ends early") from error
    if not isinstance(table, dict):
        raise _damage_error(path, "no table")
    return table


def _damage_error(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: not a file of CIFAR ({reason[:120]}); unpack the archive again, or fetch it again")
