"""Sequences that take little memory: strings in one piece, integers of eight bytes, rows of another sequence."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

ItemT = TypeVar("ItemT")
Rows = NDArray[np.int64]


class PackedStrings(Sequence[str]):
    """Strings in one piece of memory.

    A list of a million strings takes four times as much, and as much again in every process that reads it: reading an
    object counts a reference, which copies the page that it shares with other processes.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.content, self.ends = bytearray(), array("q")
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Add a string."""
        self.content += os.fsencode(name)
        self.ends.append(len(self.content))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self.ends))[index]
        start = self.ends[position - 1] if position else 0
        return os.fsdecode(bytes(self.content[start : self.ends[position]]))

    def arrays(self, prefix: str) -> dict[str, Any]:
        """Return what `read` makes the strings of again."""
        return {f"{prefix}_bytes": np.frombuffer(self.content, np.uint8), f"{prefix}_ends": np.asarray(self.ends)}

    @classmethod
    def read(cls, arrays: Any, prefix: str) -> PackedStrings:
        """Return the strings of some `arrays`."""
        names = cls()
        names.content = bytearray(arrays[f"{prefix}_bytes"].tobytes())
        names.ends = pack_integers(arrays[f"{prefix}_ends"])
        return names


class Chosen(Sequence[ItemT]):
    """Some items of a sequence, looked up when they are asked for."""

    def __init__(self, items: Sequence[ItemT], rows: Sequence[int] | Rows) -> None:
        self.items, self.rows = items, pack_integers(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | list[ItemT]:
        if isinstance(index, slice):
            return [self.items[row] for row in self.rows[index]]
        return self.items[self.rows[index]]


def pack_integers(values: Any) -> array[int]:
    """Return integers in eight bytes each; in a list, they take forty."""
    packed = array("q")
    packed.frombytes(np.asarray(values, dtype=np.int64).tobytes())
    return packed
