"""What `benchmarks/gpu.py` has found: the rows of its parts, as JSON and as tables."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpn_cli.run.console import print_columns, show
from dpn_cli.run.files import replace_json, replace_text

CHECKS = ("check", "found", "at most", "passed", "note")
SPEEDS = ("what", "per second", "at once", "of the peak", "beside", "per second there", "ratio", "note")
RIGHT = {"found", "at most", "per second", "at once", "of the peak", "per second there", "ratio"}


@dataclass(frozen=True)
class Settings:
    """What is measured where, and at which sizes; those of the class are for a GPU with 80 GB."""

    device: torch.device
    checked: tuple[str, int] = ("B/16", 224)
    trained: tuple[tuple[str, int], ...] = (("B/16", 224), ("L/16", 224), ("B/32", 224), ("B/16", 384))
    segmented: tuple[str, int] = ("B/16", 512)
    towers: tuple[str, str, int] = ("B/32", "B", 224)
    rows: int = 4
    batches: tuple[int, ...] = (64, 128, 256, 512)
    crops: tuple[int, ...] = (8, 16, 32, 64)
    pairs: int = 1024
    images: int = 1024
    steps: int = 20
    seconds: float = 2.0
    rounds: int = 3
    trial: bool = False

    @classmethod
    def small(cls, device: torch.device, arch: str, side: int) -> Settings:
        """Return settings with which all parts take little time on a CPU: one network, and little of everything."""
        one, few = (arch, side), (2, 4)
        letter = arch.partition("/")[0]
        return cls(device, one, (one,), one, (arch, letter, side), 2, few, few, 4, 8, 3, 0.1, 1, trial=True)


@dataclass(frozen=True)
class Check:
    """A number that must not be above a limit; one that is not a number is."""

    what: str
    value: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is not."""
        return self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values; a number that JSON does not know as text."""
        value = self.value if abs(self.value) < float("inf") else str(self.value)
        return {**asdict(self), "value": value, "passed": self.passed}

    def cells(self) -> tuple[str, ...]:
        """Return it as a line of a table."""
        return self.what, f"{self.value:.3g}", f"{self.limit:.3g}", "yes" if self.passed else "**no**", self.note


@dataclass(frozen=True)
class Speed:
    """Images, or pairs, per second, beside those of a peer.

    `share` is that of the measured matrix-product rate, which is to reach `bar`; `at_once` is the micro-batch.
    """

    what: str
    per_second: float
    at_once: int
    share: float | None = None
    bar: float | None = None
    peer: str = ""
    peer_per_second: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        ratio = self.per_second / self.peer_per_second if self.peer_per_second else None
        return {**asdict(self), "ratio": ratio}

    def cells(self) -> tuple[str, ...]:
        """Return it as a line of a table; a share below its bar is bold."""
        share = "" if self.share is None else f"{self.share:.1%}"
        if self.share is not None and self.bar is not None and self.share < self.bar:
            share = f"**{share}, below {self.bar:.0%}**"
        there = ("", "")
        if self.peer_per_second:
            there = f"{self.peer_per_second:.4g}", f"{self.per_second / self.peer_per_second:.3f}"
        return self.what, f"{self.per_second:.4g}", str(self.at_once), share, self.peer, *there, self.note


Row = Check | Speed


class NotHereError(Exception):
    """A part, or one row of it, cannot be measured on this machine; the text says what is missing."""


@dataclass
class Part:
    """A part of the report: `status` is not run, running, done, failed, missing, error or stopped."""

    status: str = "not run"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    traceback: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "rows": [row.to_dict() for row in self.rows]}


class Report:
    """All parts by name and the facts about the machine; `save` writes what there is so far to a JSON file."""

    def __init__(self, path: Path, facts: dict[str, Any], names: Iterable[str]) -> None:
        self.path, self.facts, self.began = path, facts, time.perf_counter()
        self.parts = {name: Part() for name in names}

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def names(self, *status: str) -> list[str]:
        """Return the names of the parts that have one of some statuses."""
        return [name for name, part in self.parts.items() if part.status in status]

    def save(self) -> None:
        """Replace the JSON file."""
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        replace_json(self.path, {**self.facts, "seconds": round(self.seconds, 1), "parts": parts})

    def rows(self, kind: type[Row]) -> list[tuple[str, ...]]:
        """Return the lines of the table of one kind of rows."""
        return [row.cells() for part in self.parts.values() for row in part.rows if isinstance(row, kind)]

    def endings(self) -> list[str]:
        """Return a line for every part that has no full result."""
        said = {"running": "stopped", "missing": "cannot be measured here"}
        lines = []
        for name, part in self.parts.items():
            if part.status not in {"done", "failed"}:
                lines.append(f"{name}: {said.get(part.status, part.status)}{part.error and f' ({part.error})'}")
        return lines

    def print(self) -> None:
        """Print the tables on stdout, and write them as Markdown beside the JSON file."""
        texts = []
        for heads, kind in ((CHECKS, Check), (SPEEDS, Speed)):
            if lines := self.rows(kind):
                plain = [[cell.replace("**", "") for cell in line] for line in lines]
                print_columns(dict(zip(heads, map(list, zip(*plain, strict=True)), strict=True)), RIGHT)
                show("")
                table = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
                texts.append("\n".join(f"| {' | '.join(line)} |" for line in table))
        endings = self.endings()
        show("\n".join(endings))
        replace_text(self.path.with_suffix(".md"), "\n\n".join([*texts, *endings]) + "\n")
