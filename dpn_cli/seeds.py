"""Random numbers as functions of where they are used, so that nothing has to be remembered between steps."""

from __future__ import annotations

# What every library takes that draws random numbers.
MOST_SEED = 2**32 - 1


def fold(*numbers: int) -> int:
    """Fold numbers into one seed so that nearby steps get unrelated seeds (splitmix64's multiplier)."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 1) & 0x7FFF_FFFF_FFFF_FFFF
    return mixed
