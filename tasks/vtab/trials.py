"""The sweep on disk: a folder per training, the choice per task, and the ledger of the test split."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from dpn_cli.errors import DataError
from dpn_cli.run.files import file_digest, replace_text
from dpn_cli.weights.safetensors_io import read_weights
from tasks.vtab.tasks import Task

Json = dict[str, Any]


@dataclass(frozen=True)
class VtabTrial:
    """One training of the sweep: network, task, learning rate, seed and training split, and its folder.

    `network` is its name: its stem, unless the sweep compares networks that differ in other keys.
    """

    network: str
    task: Task
    lr: float
    seed: int
    split: str
    path: Path

    @property
    def label(self) -> str:
        """The trial's name in messages."""
        return f"{self.task.name} {self.network} lr {self.lr:g} seed {self.seed}" + (
            "" if self.split == "train800" else f" ({self.split})"
        )

    @property
    def weights(self) -> Path:
        """The file of the trained weights, deleted when it is no longer needed."""
        return self.path / "weights.safetensors"

    def load(self) -> dict[str, Tensor]:
        """Return the trained weights, by the names of the network.

        Raises `DataError` when the file is damaged, or is not the one that the training wrote.
        """
        written_digest = (read_json(self.path / "done.json") or {}).get("weights_sha256")
        try:
            if written_digest not in (None, file_digest(self.weights)):
                raise DataError("not the file that this training wrote, whose SHA-256 is in done.json")
            return read_weights(self.weights)[0]
        except (DataError, OSError, SafetensorError) as error:
            raise DataError(f"{self.weights}: {error}; delete {self.path}, and --resume trains it again") from error

    def read_marker(self, steps: int) -> Json | None:
        """Return the marker of a training that finished all its `steps`, or None."""
        marker = read_json(self.path / "done.json")
        return marker if marker and marker.get("steps") == steps else None


@dataclass
class TaskOutcome:
    """Results for one task and network, named as in `VtabTrial`: accuracies in percent, by lr and seed."""

    task: Task
    network: str
    val: dict[float, dict[int, float]] = field(default_factory=dict)
    test: dict[int, float] = field(default_factory=dict)
    test_images: int = 0
    lr: float | None = None
    failed: list[str] = field(default_factory=list)


class Ledger:
    """ledger.jsonl: every scoring of a trained network on the test split."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entry(self, trial: VtabTrial) -> Json | None:
        """Return a trial's score on test, or None when it was never scored."""
        for row in self._rows():
            if row["accuracy"] is not None and (
                row["stem"],
                row["task"],
                row["lr"],
                row["seed"],
                row["trained_on"],
            ) == (
                trial.network,
                trial.task.name,
                trial.lr,
                trial.seed,
                trial.split,
            ):
                return dict(row)
        return None

    def _rows(self) -> list[Json]:
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        try:
            return [dict(json.loads(line)) for line in text.splitlines()]
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self.path}: damaged ({error}); restore it: it records which networks were scored on test"
            ) from error

    def add(self, rows: Sequence[tuple[VtabTrial, Mapping[str, Any]]]) -> None:
        """Append the start of a scoring (accuracy None) or its result for several trials, all of them or none."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        for trial, scored in rows:
            row = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "stem": trial.network,
                "task": trial.task.name,
                "lr": trial.lr,
                "seed": trial.seed,
                "trained_on": trial.split,
                "scored_on": "test",
                "weights_sha256": (read_json(trial.path / "done.json") or {}).get("weights_sha256"),
                **scored,
            }
            text += json.dumps(row) + "\n"
        replace_text(self.path, text)


def choose_lr(val: Mapping[float, Mapping[int, float]], seeds: int) -> float | None:
    """Return the learning rate with the best mean validation accuracy; ties go to the smaller one.

    Learning rates with an unfinished seed are left out. Returns None when that leaves none.
    """
    means = {lr: fmean(by_seed.values()) for lr, by_seed in val.items() if len(by_seed) == seeds}
    return min(means, key=lambda lr: (-means[lr], lr)) if means else None


def read_json(path: Path) -> Json | None:
    """Return the object in a JSON file, or None when there is no such file. Raises `DataError` when it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))  # one look: other processes write and delete such files
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path}: damaged (not a JSON object); restore it, or delete it to repeat that part")
    return value
