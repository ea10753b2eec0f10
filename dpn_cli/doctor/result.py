"""Result of a check of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: its subject, its level, the finding, and the remedy of a warning or a problem."""

    name: str
    level: Level
    found: str
    remedy: str = ""
