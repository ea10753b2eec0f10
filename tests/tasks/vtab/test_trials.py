"""A trial of the sweep on disk: its name, its marker, and the ledger of the test split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpn_cli.errors import DataError
from tasks.vtab.tasks import choose_tasks
from tasks.vtab.trials import Ledger, VtabTrial


def trial(path: Path, split: str = "train800") -> VtabTrial:
    (task,) = choose_tasks(("demo_light",), demo=True)
    return VtabTrial("dpn", task, 0.01, 2, split, path)


def test_only_a_training_on_all_images_is_named_after_its_split(tmp_path: Path) -> None:
    assert trial(tmp_path).label == "demo_light dpn lr 0.01 seed 2"
    assert trial(tmp_path, "train800val200").label == "demo_light dpn lr 0.01 seed 2 (train800val200)"
    assert trial(tmp_path, "train1000").label == "demo_light dpn lr 0.01 seed 2 (train1000)"


@pytest.mark.parametrize(("steps", "done"), [(2, False), (3, True), (4, False)])
def test_a_marker_counts_for_as_many_steps_as_are_asked_for(steps: int, done: bool, tmp_path: Path) -> None:
    (tmp_path / "done.json").write_text(json.dumps({"steps": steps}))
    assert (trial(tmp_path).read_marker(3) is not None) == done


@pytest.mark.parametrize("line", ["{", "3"])
def test_a_damaged_ledger_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"ledger\.jsonl: damaged"):
        Ledger(tmp_path / "ledger.jsonl").entry(trial(tmp_path))
