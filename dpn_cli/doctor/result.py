"""What a check of the machine has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is well, what was found, and what to do about a warning or a problem."""

    name: str
    level: Level
    found: str
    remedy: str = ""
