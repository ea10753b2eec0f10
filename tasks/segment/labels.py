"""Conversion of raw mask values to labels, and the check of those values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from PIL import Image

from dpn_cli.data.decode import DECODE_ERRORS, unreadable_error
from dpn_cli.errors import DataError, DpnError
from tasks.segment.config import MOST_CLASSES

Labels = npt.NDArray[np.uint8]
RawMask = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

IGNORE = 255
"""The label of pixels that loss and score ignore."""
_UNKNOWN = 254
# Modes of PIL with one number per pixel: black and white, grey, palette (the index counts), 16 and 32 bits.
_MODES = ("1", "L", "P", "I;16", "I;16B", "I")


@dataclass(frozen=True)
class LabelRule:
    """Raw value ``label_offset`` + c is class c of `classes`, `ignore` becomes label 255, any other value is an error.

    ADE20K's is (150, 1, 0): raw 0 is "other" and ignored, 1…150 are the classes 0…149.
    """

    classes: int
    offset: int = 0
    ignore: int | None = IGNORE

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= MOST_CLASSES:
            raise DpnError(f"{self.classes} classes: segmentation takes 2 to {MOST_CLASSES}")
        last = self.offset + self.classes - 1
        if last >= 2**16:
            raise DpnError(f"--label-offset {self.offset}: the last class would be {last}; masks hold 65535 at most")
        if self.ignore is not None and self.offset <= self.ignore <= last:
            raise DpnError(
                f"--ignore-label {self.ignore}: this is class number {self.ignore - self.offset} as well, as the "
                f"{self.classes} classes have {self.offset}…{last} (--label-offset {self.offset}). Leave its name out "
                "of the classes, or give a value that none of them has"
            )

    @cached_property
    def table(self) -> Labels:
        """Label of every raw value of 16 bits."""
        table = np.full(2**16, _UNKNOWN, np.uint8)
        table[self.offset : self.offset + self.classes] = np.arange(self.classes)
        if self.ignore is not None:
            table[self.ignore] = IGNORE
        return table

    def __str__(self) -> str:
        ignored = "" if self.ignore is None else f", {self.ignore} ignored"
        return f"{self.offset}…{self.offset + self.classes - 1} for the {self.classes} classes{ignored}"

    def labels(self, raw: RawMask, location: str) -> Labels:
        """Map raw values (h, w) to labels. Raises `DataError` naming values that stand for no class."""
        if raw.dtype == np.uint8:  # NumPy would make eight bytes of each value first
            values = bytearray(raw).translate(self.table[: 2**8].tobytes())
            labels: Labels = np.frombuffer(values, np.uint8).reshape(raw.shape)
        else:
            labels = self.table.take(raw)
        if (labels == _UNKNOWN).any():
            raise DataError(self.explain(np.unique(raw).tolist(), location))
        return labels

    def unknown(self, values: Sequence[int]) -> list[int]:
        """Return those of some raw values that stand for no class."""
        return [value for value in values if self.table[value] == _UNKNOWN]

    def raw(self, labels: Labels) -> RawMask:
        """Return the raw values of labels without ignored pixels, in as few bits as they need."""
        bits = np.uint8 if self.offset + self.classes <= 256 else np.uint16
        return (labels.astype(np.uint16) + self.offset).astype(bits)  # type: ignore[return-value]  # one of the two

    def explain(self, values: Sequence[int], location: str) -> str:
        """Describe the raw values of a mask that are no class, and guess their convention."""
        unknown = self.unknown(values)
        listed_values = ", ".join(map(str, unknown[:5])) + (", …" if len(unknown) > 5 else "")
        return f"{location}: the mask holds {listed_values}; allowed are {self}. {self._guess(values)}"

    def _guess(self, values: Sequence[int]) -> str:
        known_formats = {
            "starts at 0 and ignores 255": LabelRule(self.classes, 0, 255),
            "starts at 1 and ignores 0": LabelRule(self.classes, 1, 0),
        }
        for name, rule in known_formats.items():
            if (rule.offset, rule.ignore) != (self.offset, self.ignore) and not rule.unknown(values):
                return (
                    f"It looks like one that {name}: "
                    f"dpn segment folder --label-offset {rule.offset} --ignore-label {rule.ignore}"
                )
        if set(values) <= {0, 255}:
            return "It looks like a black-and-white image of one object: its values have to be class numbers"
        if len(self.unknown(values)) == 1:
            return "It looks like a class too many, or another value to ignore (dpn segment folder --ignore-label)"
        return "It looks like masks of another data set, or grey images of coloured masks"


def read_mask(image: Image.Image, location: str) -> RawMask:
    """Decode an opened mask to its raw values (h, w).

    Raises `DataError` for an image in colours, for values beyond 16 bits, and for damaged data.
    """
    with image:
        if image.mode not in _MODES:
            raise DataError(
                f"{location}: an image in colours ({image.mode}), where a mask has one class number per pixel. It "
                "looks like a coloured rendering, or the full ADE20K release, whose masks are coded in colours; "
                "ADEChallengeData2016 has the class numbers"
            )
        try:
            raw = np.asarray(image)
        except DECODE_ERRORS as error:
            raise unreadable_error(location, error) from error
    if raw.dtype in (np.uint8, np.uint16):
        return raw
    if raw.min() < 0 or raw.max() >= 2**16:
        raise DataError(f"{location}: the mask holds {raw.min()} to {raw.max()}, which are not class numbers")
    return raw.astype(np.uint16)
