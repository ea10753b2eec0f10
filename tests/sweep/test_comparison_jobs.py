"""``--jobs``: the trainings of a comparison in processes are those that one process runs one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.load import dump
from dpn_cli.run.console import Console
from dpn_cli.sweep.grid import SweepConfig
from support.cli import run_dpn
from support.programs import program_environment

SMALL = {"arch": "mu/8", "image_size": 16, "stem": "rms", "norm": "bn", "steps": 7, "seed": 3, "workers": "0"}
GIVEN: dict[str, list[dict[str, Any]]] = {
    "pretrain": [
        {"data": "demo"},
        {"name": "imagenet", "data": "nowhere", "arch": "B/16", "batch_size": 512},
        {"name": "imagenet21k", "data": "nowhere", "arch": "S/32", "steps": 930_000},
        {"config_name": "deit", "data": "nowhere", "arch": "S/16", "epochs": 100.0},
        {"name": "cifar10", "data": "nowhere", "preset": "short"},
        {"data": "photos", "val_fraction": 0.2, "augment": "none", **SMALL},
    ],
    "finetune highres": [
        {"data": "demo", **SMALL, "checkpoint": "none"},
        {"data": "nowhere", "checkpoint": "a.npz", "arch": "B/32", "image_size": 224},
        {"data": "photos", "val_fraction": 0.2, "checkpoint": "a.npz", "epochs": 3.0},
    ],
    "lit train": [{"data": "pairs.csv", "checkpoint": "a.npz", "batch_size": 64, "epochs": 2.0, "zeroshot_data": "x"}],
    "distill": [{"data": "photos", "teacher": "a.npz", "steps": 9, "stem": "dpn", "cache_teacher": 2}],
    "segment ade20k": [{"data": "nowhere", "checkpoint": "a.npz", "arch": "B/16", "fraction": "1/8", "steps": 40}],
    "segment folder": [{"data": "nowhere", "checkpoint": "none", **SMALL, "epochs": 2.0, "steps": None}],
}


@pytest.mark.parametrize(
    ("command", "arguments"), [(command, member) for command, several in GIVEN.items() for member in several]
)
def test_a_training_of_a_comparison_is_written_down_whole(
    command: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """What a process reads from the file is the config that the comparison would have run itself."""
    training, console = TRAIN_COMMANDS[command], Console(quiet=True)
    config = training.finalize(training.layers(arguments, console.info), console, False)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    second = training.finalize(training.layers({"config": str(path)}, console.info), console, False)
    assert yaml.safe_load(dump(second)) == yaml.safe_load(dump(config))


def test_every_training_that_can_be_compared_is_tried() -> None:
    assert set(GIVEN) == {name for name, one in TRAIN_COMMANDS.items() if issubclass(one.schema, SweepConfig)}


def trained(out: Path, photos: Path, *arguments: str) -> Any:
    size = ("--arch", "mu/8", "--image-size", "16", "--augment", "none", "-b", "8", "--steps", "3", "-j", "0")
    words = ("--data", str(photos), "--val-fraction", "0.4", *size, "--device", "cpu", "-o", str(out))
    return run_dpn("pretrain", *words, "--compare", "none,dpn", *arguments)


@pytest.mark.slow
def test_processes_train_the_same_networks(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in program_environment().items():
        monkeypatch.setenv(name, value)
    one, two = tmp_path / "one", tmp_path / "two"
    assert trained(one, photos).exit_code == 0
    process = trained(two, photos, "--jobs", "2")
    assert process.exit_code == 0, process.stderr
    results = [json.loads((out / "result.json").read_text()) for out in (one, two)]
    networks = [{name: part["top1"] for name, part in result["compare"]["networks"].items()} for result in results]
    assert networks[0] == networks[1]
    for stem in ("none", "dpn"):
        assert (two / f"logs/{stem}-seed0.log").is_file()
        states = [load_file(out / f"{stem}/seed0/weights.safetensors") for out in (one, two)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        configs = [yaml.safe_load((out / f"{stem}/seed0/config.yaml").read_text()) for out in (one, two)]
        assert configs[0] == configs[1]


@pytest.mark.parametrize(("code", "ends"), [(5, 6), (3, 2)])
def test_the_exit_code_of_a_process_decides_whether_the_others_continue(
    code: int, ends: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 5, a loss that is not finite, is noted; a mistake, such as missing data, ends the comparison."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho 'error: told so' >&2\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    process = trained(tmp_path / "out", photos, "--jobs", "2")
    assert process.exit_code == ends
    assert "told so" in process.stderr
    if code == 5:
        report = json.loads((tmp_path / "out/partial.json").read_text())
        assert report["failed"] == [f"stem {stem}, seed 0: told so" for stem in ("none", "dpn")]
        assert not list((tmp_path / "out").rglob("result.json"))  # neither is trained here instead
    else:
        assert f"(exit code 3; {tmp_path / 'out/logs'}" in process.stderr.replace("\n", "")


@pytest.mark.parametrize("words", [("pretrain", "--data", "demo"), ("lit", "train")])
def test_one_training_has_nothing_to_share_out(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path))  # without the demo's tower, which is not made first
    result = run_dpn(*words, "--jobs", "2")
    assert result.exit_code == 2
    assert result.stderr == "error: --jobs 2: this is one training; --compare and --seeds make several\n"
