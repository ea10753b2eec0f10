"""Every command with a run folder, killed with `kill -9` at its start and in its training, then damaged and resumed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.report.reading import read_run
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console
from dpn_cli.run.files import file_digest
from dpn_cli.run.run_dir import RunFolder
from support.captions import write_caption_table
from support.distill import distill_config, train_distill, write_teacher
from support.highres import highres_config, train_highres
from support.images import write_class_folders, write_png_images
from support.lit import lit_config, train_lit
from support.pretrain import small_pretrain_config, stages_config, train_pretrain
from support.processes import run_in_child
from support.programs import LIMIT
from support.segment import segment_config, train_segment, write_scenes
from support.vtab import run_vtab
from tasks.classify.train import describe_training

STEPS: dict[str, Any] = {"schedule": {"steps": 4, "warmup": 0}, "runtime": {"workers": 0, "checkpoint_every": 2}}
STAGES: list[dict[str, Any]] = [{"epochs": 1, "grid": {"lr": [1e-3]}}, {"epochs": 1}]
Start = Callable[..., dict[str, Any]]


def highres(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    return train_highres(highres_config(data / "photos", **STEPS), path, **options)


def pretrain(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    return train_pretrain(small_pretrain_config(data / "photos", **STEPS), path, **options)


def pretrain_sweep(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    config = stages_config(data / "places", STAGES)
    runtime = config.runtime.model_copy(update={"checkpoint_every": 1})
    return train_pretrain(config.model_copy(update={"runtime": runtime}), path, **options)


def vtab(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    toy = ["data.tasks=svhn", "seeds=1", "lrs=[0.01]", "schedule.steps=4", "schedule.warmup=0"]
    return run_vtab(data / "vtab-1k", path, *toy, "runtime.checkpoint_every=2", **options)


def lit(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    config = lit_config(data / "captioned" / "pairs.csv", batch_size=4, cache={"folder": str(data)}, **STEPS)
    return train_lit(config, path, **options)


def segment(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    return train_segment(segment_config(data / "scenes", batch_size=2, **STEPS), path, **options)


def distill(data: Path, path: Path, **options: Any) -> dict[str, Any]:
    config = distill_config(data / "photos", data / "teacher.safetensors", **STEPS)
    return train_distill(config, path, **options)


RUNS: dict[str, tuple[Start, str]] = {
    "highres": (highres, "classifier"),
    "pretrain": (pretrain, "classifier"),
    "pretrain sweep": (pretrain_sweep, "classifier"),
    "vtab": (vtab, "sweep"),
    "lit": (lit, "towers"),
    "segment": (segment, "segmenter"),
    "distill": (distill, "classifier"),
}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all(data: Path, folder: Path) -> None:
    """Start every run twice, in processes that die between its first two files and after its first saved state."""
    save, fork = Checkpoints.save, multiprocessing.get_context("fork")

    def save_and_die(self: Checkpoints, name: str, *state: Any) -> None:
        save(self, name, *state)
        die()

    for name, (start, _) in RUNS.items():
        for moment, owner, method, deadly in (
            ("begun", RunFolder, "_write_config", die),
            ("trained", Checkpoints, "save", save_and_die),
        ):
            process = fork.Process(target=_start, args=(start, data, folder / moment / name, owner, method, deadly))
            process.start()
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL, (name, moment, process.exitcode)


def _start(start: Start, data: Path, path: Path, owner: type, method: str, deadly: Callable[..., None]) -> None:
    setattr(owner, method, deadly)
    start(data, path)


@pytest.fixture(scope="module")
def data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_class_folders(root / "photos", classes=3, each=10)
    for split in ("train", "val", "test"):
        write_class_folders(root / "places" / split, classes=3, each=6)
    (root / "captioned").mkdir()
    names = write_png_images(root / "captioned", 12)
    write_caption_table(root / "captioned" / "pairs.csv", [(name, f"image {name}") for name in names])
    write_scenes(root / "scenes", {"training": 4, "validation": 2})
    (root / "vtab-1k").symlink_to(digits)
    write_teacher(root / "teacher.safetensors")
    return root


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    assert run_in_child(kill_all, data, folder) == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_between_its_first_files_restarts(name: str, killed: Path, data: Path, tmp_path: Path) -> None:
    start, kind = RUNS[name]
    assert [entry.name for entry in (killed / "begun" / name).iterdir()] == ["run.json"]
    for mode in ({}, {"resume": True}, {"overwrite": True}):
        if mode and name not in ("highres", "vtab"):
            continue  # it is one function for all of them
        path = tmp_path / str(mode)
        shutil.copytree(killed / "begun" / name, path)
        result = start(data, path, **mode)
        assert json.loads((path / "result.json").read_text()) == result
        assert json.loads((path / "run.json").read_text())["kind"] == kind


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("moment", ["begun", "trained"])
def test_a_killed_run_is_called_interrupted(moment: str, name: str, killed: Path) -> None:
    assert json.loads((killed / moment / name / "run.json").read_text())["status"] == "running"
    assert read_run(killed / moment / name).status == "interrupted"


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_is_resumed_for_any_state_of_its_run_json(
    name: str,
    killed: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, kind = RUNS[name]
    said, finished = list[str](), dict[str, Any]()
    monkeypatch.setattr(Console, "info", lambda self, text: said.append(text))
    for damage in ("none", "cut off" if name in ("pretrain", "lit") else "missing"):
        path = tmp_path / damage
        shutil.copytree(killed / "trained" / name, path)
        last = json.loads(next(path.rglob("metrics.jsonl")).read_text().splitlines()[-1])
        if damage != "none":
            (path / "run.json").write_text('{"kind": "cl')
            (path / ".metrics.jsonl.999999999.tmp").write_text("left")
        if damage == "missing":
            (path / "run.json").unlink()
        capsys.readouterr()
        result = start(data, path, resume=True)
        warned = "run.json was missing or damaged and is written again" in " ".join(capsys.readouterr().err.split())
        assert warned is (damage != "none")
        says_where_it_continues(name, last["step"], said)
        said.clear()
        report = json.loads((path / "run.json").read_text())
        assert (report["kind"], report["status"]) == (kind, "finished")
        assert not list(path.rglob(".*.tmp"))
        weights = path / result.get("weights", "weights.safetensors")
        if name != "vtab":
            assert file_digest(weights) == result["weights_sha256"] == report["weights_sha256"]
        assert result["timing"]["train_seconds"] > 0
        if name == "highres":
            assert result["lost_records"] == 0
            assert "incomplete" not in describe_training(result)
        finished[damage] = {key: value for key, value in result.items() if key not in ("timing", "floors")}
    first, second = finished.values()
    assert first == second


def says_where_it_continues(name: str, step: int, said: list[str]) -> None:
    continued = [line for line in said if "continues after step" in line]
    assert len(continued) == 1
    prefix = {"vtab": "svhn dpn lr 0.01 seed 0: ", "distill": "stem: "}.get(name, "")
    assert continued[0].startswith(f"{prefix}continues after step {step} of ")
    fresh = [line for line in said if "from scratch (" in line]
    # A frozen tower has no saved state; the second stage of a sweep and every new cell of VTAB do start from scratch.
    assert len(fresh) == {"lit": 1, "pretrain sweep": 1, "vtab": 1}.get(name, 0), fresh
    shown = [line for line in said if "from what this run saved in" in line]
    assert len(shown) == (name not in ("lit", "vtab"))


@pytest.mark.parametrize("cut", ["deleted", "cut"])
def test_a_result_reports_that_its_curve_lacks_records(cut: str, killed: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed / "trained" / "highres", path)
    log = path / "metrics.jsonl"
    lines = log.read_text().splitlines()
    if cut == "deleted":
        log.unlink()
    else:
        log.write_text(lines[0][:20] + "\n" + "\n".join(lines[1:]))
    result = highres(data, path, resume=True)
    assert result["lost_records"] == {"deleted": len(lines), "cut": 1}[cut]
    assert "the curve is incomplete: " in describe_training(result)
