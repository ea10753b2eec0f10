"""Sweeps of VTAB that are killed, fail in part, or find another run in their folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, DpnError, NonFiniteError, SaveError
from dpn_cli.run.environment import config_digest
from support.cli import run_dpn
from support.vtab import Json, read_ledger
from tasks.vtab.train import Trainer


@pytest.mark.parametrize("cells_before", [0, 3, 5])
def test_a_killed_sweep_continues(
    cells_before: int, toy: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = toy(tmp_path / "whole")
    trained: list[float] = []
    original = Trainer.job

    def dying(self: Trainer, cell: Any, outputs: engine.Outputs) -> engine.TrainJob:
        trained.append(cell.lr)
        if len(trained) == cells_before + 1:
            raise KeyboardInterrupt
        return original(self, cell, outputs)

    monkeypatch.setattr(Trainer, "job", dying)
    with pytest.raises(KeyboardInterrupt):
        toy(tmp_path / "cut")
    resumed = toy(tmp_path / "cut", resume=True)
    assert len(trained) == 7  # six cells and the one that was begun twice
    for key in ("tasks", "groups", "mean_groups"):
        assert resumed[key] == full[key]


def test_a_kill_between_choice_and_score_retrains_nothing(
    toy: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = toy(tmp_path / "whole")
    original = Trainer.count_test

    def dying(self: Trainer, weights: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "count_test", dying)
    with pytest.raises(KeyboardInterrupt):
        toy(tmp_path / "cut")
    monkeypatch.setattr(Trainer, "count_test", original)
    monkeypatch.setattr(Trainer, "job", lambda *_: pytest.fail("trained again"))
    assert toy(tmp_path / "cut", resume=True)["tasks"] == full["tasks"]


def test_a_run_from_before_the_augmentation_key_continues(toy: Callable[..., Json], tmp_path: Path) -> None:
    path = tmp_path / "run"
    full = toy(path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    del config["data"]["augment"]
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    facts = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**facts, "config": config_digest(config)}))
    (path / "result.json").unlink()
    assert toy(path, resume=True)["tasks"] == full["tasks"]
    with pytest.raises(DpnError, match=r"data.augment.svhn: \['crop', 'flip'\] there, \['flip'\] now"):
        toy(path, "data.augment.svhn=[flip]", resume=True)


@pytest.mark.parametrize("allow", [False, True])
def test_a_failed_trial_is_shown_and_retried(
    allow: bool, toy: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.job
    broken = True

    def failing(self: Trainer, cell: Any, outputs: engine.Outputs) -> engine.TrainJob:
        if broken and (cell.lr, cell.seed) == (0.03, 1):
            raise NonFiniteError("step 3: loss nan")
        return original(self, cell, outputs)

    monkeypatch.setattr(Trainer, "job", failing)
    extra = [f"allow_failed={str(allow).lower()}"]
    first = toy(tmp_path / "run", *extra)
    assert first["failed"] == ["svhn dpn lr 0.03 seed 1: step 3: loss nan"]
    assert first["tasks"]["svhn"]["val"]["0.03"][1] is None
    assert not (tmp_path / "run" / "result.json").exists()
    assert (first["tasks"]["svhn"]["lr"] is None) is not allow
    assert (first["groups"]["natural"] is None) is not allow
    if not allow:
        assert not (tmp_path / "run" / "ledger.jsonl").exists()
    broken = False
    if allow:  # what finishes later must not bring another learning rate to the test split
        monkeypatch.setattr("tasks.vtab.task_sweep.choose_lr", lambda val, seeds: 0.03)
    second = toy(tmp_path / "run", *extra, resume=True)
    assert first["tasks"]["svhn"]["lr"] in {None, second["tasks"]["svhn"]["lr"]}
    assert len(read_ledger(tmp_path / "run")) == 2
    assert second["failed"] == []
    assert second["tasks"]["svhn"]["lr"] is not None
    assert (tmp_path / "run" / "result.json").exists()


def test_failed_cells_end_the_command_with_code_6(digits: Path, tmp_path: Path) -> None:
    arguments = [
        "finetune",
        "vtab",
        "--data",
        str(digits),
        "--tasks",
        "svhn",
        "--arch",
        "mu/8",
        "--image-size",
        "16",
        "--checkpoint",
        "none",
        "--steps",
        "3",
        "-b",
        "16",
        "--seeds",
        "1",
        "--lrs",
        "1e30,1e-3",
        "-q",
        "--set",
        "schedule.warmup=0",
        "--set",
        "optim.clip_norm=null",
        "-o",
        str(tmp_path / "run"),
    ]
    result = run_dpn(*arguments)
    assert result.exit_code == 6, result.stderr
    assert "lr 1e+30 seed 0: step" in " ".join(result.stdout.split())
    assert "1 training failed" in result.stderr  # the diverged network left nothing to the cell after it


def test_an_output_folder_with_another_run_is_never_mixed_up(toy: Callable[..., Json], tmp_path: Path) -> None:
    toy(tmp_path / "run", "seeds=1", "lrs=[0.01]")
    with pytest.raises(DpnError, match="holds a finished run; --resume continues it, --overwrite deletes it"):
        toy(tmp_path / "run", "seeds=1", "lrs=[0.01]")
    with pytest.raises(DpnError, match=r"a different config \(.*schedule.steps: 6 there, 7 now"):
        toy(tmp_path / "run", "seeds=1", "lrs=[0.01]", "schedule.steps=7", resume=True)
    result = toy(tmp_path / "run", "seeds=1", "lrs=[0.01]", "runtime.micro_batch_size=8", resume=True)
    assert result["tasks"]["svhn"]["test"]["n"] == 1
    toy(tmp_path / "run", "seeds=1", "lrs=[0.02]", overwrite=True)
    assert [row["lr"] for row in read_ledger(tmp_path / "run")] == [0.02]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for arguments in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(DpnError, match="the folder is not empty and is not a dpn run"):
            toy(tmp_path / "photos", **arguments)
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_too_little_disk_is_reported_before_training(
    toy: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.vtab.sweep.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(SaveError, match="0.0 GB free, and the 6 trials of a task keep"):
        toy(tmp_path / "run")


def test_damaged_files_of_a_sweep_are_named_in_one_line(toy: Callable[..., Json], tmp_path: Path) -> None:
    settings = ["seeds=1", "lrs=[0.01]", "schedule.steps=2", "schedule.warmup=0"]
    full = toy(tmp_path / "run", *settings)
    task = tmp_path / "run" / "trials" / "dpn" / "svhn"
    damaged = {
        task / "choice.json": "damaged .not a JSON object.; restore it, or delete it",
        next(task.glob("*/done.json")): "damaged .not a JSON object.; restore it, or delete it",
        tmp_path / "run" / "ledger.jsonl": "it records which networks were scored on test",
    }
    for path, message in damaged.items():
        content = path.read_text()
        path.write_text(content[:-9])
        (tmp_path / "run" / "result.json").write_text("{")  # a finished sweep is not looked at again
        with pytest.raises(DataError, match=message):
            toy(tmp_path / "run", *settings, resume=True)
        path.write_text(content)
    second_result = toy(tmp_path / "run", *settings, resume=True)
    assert second_result["tasks"] == full["tasks"]
