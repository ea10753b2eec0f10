"""Names and colours of classes."""

from __future__ import annotations

import colorsys
import csv
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dpn_cli.data.sources.synthetic import MASK_CLASSES
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.files import read_named
from tasks.segment.config import MaskData
from tasks.segment.labels import LabelRule

Color = tuple[int, int, int]
# Neighbouring numbers get colours far apart: each hue is a golden section of the circle further.
GOLDEN = 0.618033988749895


@dataclass(frozen=True)
class Class:
    """A class of pixels; the colour is for people."""

    name: str
    color: Color


def classes_of(data: MaskData) -> tuple[Class, ...]:
    """Return the classes of a config's data set in order.

    Raises `DpnError` when a folder or hub data set comes without names, `DataError` when the file of names is wrong.
    """
    if data.source == "demo":
        return tuple(Class(name, color_of(index)) for index, name in enumerate(MASK_CLASSES))
    if data.dataset == "ade20k":
        return ade20k()
    listed = class_list_path(data)
    if not os.path.lexists(listed):
        raise DpnError(f"--class-names: name a file with one class name per line ({listed} is missing)")
    content = read_named(listed, f"--class-names {listed}", "pass a file with a class name a line")
    try:
        names = [line.strip() for line in content.decode("utf-8-sig").splitlines()]  # editors put a mark before it
    except UnicodeDecodeError as error:
        raise DataError(f"--class-names {listed}: not text in UTF-8 ({error}); save it as such") from error
    while names and not names[-1]:
        names.pop()
    empty = [str(number) for number, name in enumerate(names, 1) if not name]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if empty or duplicates:
        problem = f"line {empty[0]} is empty" if empty else f"{duplicates[0]!r} is listed twice"
        raise DataError(f"--class-names {listed}: {problem}; one class name per line")
    return tuple(Class(name, color_of(index)) for index, name in enumerate(names))


def class_list_path(data: MaskData) -> Path:
    """Return the file that names the classes of a folder or hub data set, whether it is there or not."""
    return Path(data.classes or Path(data.source or "") / "classes.txt").expanduser()


def rule_of(data: MaskData) -> LabelRule:
    """Return which number in the masks of a config's data set is which class."""
    return LabelRule(len(classes_of(data)), data.label_offset, data.ignore_label)


def ade20k() -> tuple[Class, ...]:
    """Return ADE20K's 150 classes in the order of the scene-parsing benchmark, with the colours of its toolkit."""
    rows = csv.DictReader((files("tasks.segment") / "ade20k.csv").read_text("utf-8").splitlines())
    return tuple(Class(row["name"], (int(row["red"]), int(row["green"]), int(row["blue"]))) for row in rows)


def color_of(index: int) -> Color:
    """Return a colour for class number `index`, the first one grey: it is the background more often than not."""
    if index == 0:
        return 120, 120, 120
    red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN % 1, (0.9, 0.6)[index // 7 % 2], (0.95, 0.7)[index // 3 % 2])
    return round(255 * red), round(255 * green), round(255 * blue)
