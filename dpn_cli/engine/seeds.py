"""Random numbers as functions of where they are used, so that nothing has to be remembered between steps.

Our own instead of `numpy.random.SeedSequence`: other seeds would change what runs in progress draw, and recorded
results. `dpn_cli.data.pixels` multiplies its seeds by numbers of its own for the same reason.
"""

from __future__ import annotations


def fold(*numbers: int) -> int:
    """Fold numbers into one seed; nearby steps get unrelated seeds (splitmix64's multiplier)."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 1) & 0x7FFF_FFFF_FFFF_FFFF
    return mixed
