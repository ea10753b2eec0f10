"""What a run has produced, and whether two runs have produced the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# Keys of results and records that are times, or that say what was lost of a damaged log.
TIMES = {"timing", "images_per_second", "wait_share", "time"}
LOST = {"lost_records"}


@dataclass
class Outcome:
    """Result, curves and scores on test without their times, and trained tensors, of a run's folder.

    A scoring on test that was stopped is announced in the ledger again; each has one score all the same.
    """

    result: Any
    curves: dict[str, list[Any]]
    ledger: list[Any]
    tensors: dict[str, dict[str, Tensor]] = field(repr=False)

    @classmethod
    def read(cls, folder: Path, weights: str, *, curves: bool = True) -> Outcome:
        """Read a finished run, with its weight files, and unless they may be damaged the curves."""
        read = {}
        for path in sorted(folder.rglob("metrics.jsonl")) if curves else ():
            read[str(path.relative_to(folder))] = [_timeless(record) for record in _lines(path)]
        return cls(
            _timeless(json.loads((folder / "result.json").read_text())),
            read,
            [_timeless(row) for row in _lines(folder / "ledger.jsonl") if row["accuracy"] is not None],
            {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.glob(weights))},
        )

    def differences(self, other: Outcome, *, curves: bool = True, files: bool = True) -> list[str]:
        """Return what differs; without `curves`, they may lack records.

        Weight files hold curves and say which images were trained on: without `files` they differ where tensors do.
        """
        but = ([] if curves else ["curve"]) + ([] if files else ["weights_sha256"])
        ours, theirs = ({**one, **dict.fromkeys(but)} for one in (self.result, other.result))
        found = [] if ours == theirs else [f"result: {_first(ours, theirs)}"]
        if curves and self.curves != other.curves:
            found.append(f"curves: {_first(self.curves, other.curves)}")
        if self.ledger != other.ledger:
            found.append(f"ledger: {len(self.ledger)} and {len(other.ledger)} rows")
        if self.tensors.keys() != other.tensors.keys():
            found.append(f"weight files: {sorted(self.tensors)} and {sorted(other.tensors)}")
        for name in self.tensors.keys() & other.tensors.keys():
            one, two = self.tensors[name], other.tensors[name]
            if one.keys() != two.keys() or not all(torch.equal(one[key], two[key]) for key in one):
                found.append(f"weights: {name}")
        return found


def finished_cells(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the trainings of a sweep that have ended, with what changes when one is done again."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("done.json")
    }


def _lines(path: Path) -> list[Any]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in TIMES | LOST}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def _first(one: Any, two: Any, path: str = "") -> str:
    """Return the first place where two values differ, with both."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(key for key in two if key not in one)]:
            if one.get(key) != two.get(key):
                return _first(one.get(key), two.get(key), f"{path}.{key}")
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, pair in enumerate(zip(one, two, strict=True)):
            if pair[0] != pair[1]:
                return _first(*pair, f"{path}[{index}]")
    return f"{path.lstrip('.')} {str(one)[:100]} and {str(two)[:100]}"
