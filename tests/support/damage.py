"""Damage done to the bytes of a file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Damage = Callable[[bytes, np.random.Generator], bytes]


def truncate(data: bytes, g: np.random.Generator) -> bytes:
    """Cut the end off."""
    return data[: int(g.integers(0, len(data)))]


def flip_bits(data: bytes, g: np.random.Generator) -> bytes:
    """Flip up to 19 bits."""
    changed = bytearray(data)
    # Half of the flips fall on the first or last kilobyte, where the containers keep their tables.
    for _ in range(int(g.integers(1, 20))):
        edge = int(g.integers(0, min(1024, len(data))))
        place = [edge, len(data) - 1 - edge, int(g.integers(0, len(data)))][int(g.integers(0, 3))]
        changed[place] ^= 1 << int(g.integers(0, 8))
    return bytes(changed)


def overwrite(data: bytes, g: np.random.Generator) -> bytes:
    """Overwrite a range with random bytes."""
    start, length = int(g.integers(0, len(data))), int(g.integers(1, 400))
    noise = g.integers(0, 256, length, dtype=np.uint8).tobytes()
    return data[:start] + noise + data[start + length :]


def cut_out(data: bytes, g: np.random.Generator) -> bytes:
    """Remove a range."""
    start, length = int(g.integers(0, len(data))), int(g.integers(1, 400))
    return data[:start] + data[start + length :]


def swap_halves(data: bytes, g: np.random.Generator) -> bytes:
    """Swap what lies before and after a random position."""
    cut = int(g.integers(0, len(data)))
    return data[cut:] + data[:cut]


DAMAGES: tuple[Damage, ...] = (truncate, flip_bits, overwrite, cut_out, swap_halves)
