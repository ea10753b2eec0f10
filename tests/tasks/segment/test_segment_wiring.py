"""Which split, seed, weights, size, option or file reaches which part of segmentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from dpn_cli.commands import trainers as commands
from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine.fit import Outputs
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.segment import CLASS_NAMES, segment_config, train_segment, write_scenes
from tasks.segment import command as trainer
from tasks.segment import train as training
from tasks.segment.artifact import Segmenter, load_segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData, SegmentConfig, finalize
from tasks.segment.iou import SegmentScores
from tasks.segment.labels import LabelRule
from tasks.segment.model import LinearSegmenter, initialize_head
from tasks.segment.pairs import open_pairs
from tasks.segment.palette import Class, rule_of

ALONE = World(0, 1, torch.device("cpu"))


class _StopError(Exception):
    pass


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight scenes to train on and three others to validate."""
    return write_scenes(tmp_path / "data", {"training": 8, "validation": 3})


@pytest.fixture
def new_segmenter(data: Path, tmp_path: Path) -> Path:
    """The folder of a run that ended before its first step."""
    vit = load_backbone("mu/16", image_size=64, num_classes=len(CLASS_NAMES), drop_path=0.5, seed=1)
    initialize_head(vit, "lecun_normal", 2)
    classes = tuple(Class(name, (1, 2, 3)) for name in CLASS_NAMES)
    source = MaskData(source=str(data), label_offset=1, ignore_label=0)
    save_segmenter(
        Segmenter(LinearSegmenter(vit, final_norm=False), classes, source, Evaluation(), {}),
        tmp_path / "run" / "weights.safetensors",
    )
    (tmp_path / "run" / "run.json").write_text("{}")
    return tmp_path / "run"


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace scoring; gives what each was asked for."""
    observed: list[dict[str, Any]] = []

    def score(network: Any, pairs: Any, rule: LabelRule, *_: Any, workers: Any, **__: Any) -> SegmentScores:
        bf16 = torch.is_autocast_enabled("cpu")
        observed.append({"names": list(pairs.names), "rule": rule, "workers": workers, "bf16": bf16})
        return SegmentScores(torch.eye(rule.classes, dtype=torch.int64), len(pairs))

    monkeypatch.setattr("tasks.segment.evaluate.score", score)
    return observed


def test_weights_are_the_checkpoints_with_and_without_an_arch(tmp_path: Path) -> None:
    tower = load_backbone("mu/16", image_size=64, seed=9)
    export_backbone(tower, tmp_path / "tower.safetensors")
    for arch in (None, "mu/16"):
        section = {"arch": arch, "checkpoint": str(tmp_path / "tower.safetensors"), "pool": None}
        vit = training.load_network(segment_config("demo", backbone=section), 5).vit
        for part in ("blocks", "patch_embed", "norm"):
            actual, expected = getattr(vit, part).state_dict(), getattr(tower, part).state_dict()
            assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_the_networks_options_reach_it() -> None:
    for pool, size in (("tok", 32), ("gap", 64)):
        section = {"pool": pool, "image_size": size, "grad_checkpointing": pool == "tok"}
        vit = training.load_network(segment_config("demo", backbone=section), 5).vit
        assert (vit.config.pool, vit.config.image_size, vit.grad_checkpointing) == (pool, (size, size), pool == "tok")


def test_seeds_differ_in_their_first_weights() -> None:
    first, second, other = (training.load_network(segment_config("demo", seed=seed), 5).vit for seed in (1, 1, 2))
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name))
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "head.weight"):
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_the_config_decides_batches_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = segment_config("demo", seed=7, lr=0.123, evaluate_every=20, optim={"weight_decay": 0.5}, batch_size=4)
    data = training.open_data(config)
    segmenter = Segmenter(training.load_network(config, 5), data.classes, config.data, config.evaluation, {})
    observed: list[Any] = []

    def batches(*arguments: Any, **_: Any) -> Callable[[int], None]:
        observed.extend(arguments)
        return lambda start: None

    monkeypatch.setattr(training, "segment_batches", batches)
    job = training.job_of(config, data, segmenter, ALONE, Outputs())
    pairs, rule, _, batch_size, seed, _ = observed
    assert (pairs, rule, batch_size, seed) == (data.train, data.rule, 4, 7)
    assert (job.seed, job.lr, job.batch_size, job.schedule, job.optim) == (7, 0.123, 4, config.schedule, config.optim)
    assert (job.evaluate_every, job.monitor) == (20, "miou")


def test_the_demo_is_scored_on_other_scenes_than_it_is_trained_on() -> None:
    parts = [open_pairs(MaskData(source="demo"), split) for split in ("train", "val")]
    assert [len(part) for part in parts] == [1000, 200]
    assert set(parts[0].names).isdisjoint(parts[1].names)


def test_masks_are_read_as_the_config_says() -> None:
    assert rule_of(MaskData(source="demo", label_offset=1, ignore_label=0)) == LabelRule(5, 1, 0)
    assert rule_of(MaskData(source="demo", label_offset=3, ignore_label=None)) == LabelRule(5, 3, None)


def test_looks_and_result_are_scores_of_the_validation_images(data: Path, tmp_path: Path) -> None:
    config = segment_config(data, lr=1e-30, schedule={"steps": 2}, evaluate_every=1)  # weights stay as they are
    result = train_segment(config, tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    looks = [record["miou"] for record in log if "miou" in record]
    assert looks == pytest.approx([result["miou"]] * 2)
    assert 0 < result["miou"] < 100
    assert (result["images"], result["pixels"]) == (3, 3 * 64 * 64)


def test_a_training_is_scored_with_its_own_runtime_and_rule(
    data: Path, tmp_path: Path, scored: list[dict[str, Any]]
) -> None:
    runtime = {"precision": "bf16", "workers": 0}
    settings = {"schedule": {"steps": 2}, "evaluate_every": 1, "runtime": runtime, "data": {"source": str(data)}}
    train_segment(segment_config(data, **settings), tmp_path / "run")
    assert len(scored) == 3
    expected = {"names": ["0000", "0001", "0002"], "rule": LabelRule(5, 1, 0), "workers": 0, "bf16": True}
    assert all(one == expected for one in scored)
    train_segment(
        segment_config(data, **{**settings, "runtime": {"precision": "fp32", "workers": 0}}), tmp_path / "other"
    )
    assert not any(one["bf16"] for one in scored[3:])


def test_eval_scores_the_validation_images_with_its_own_options(
    new_segmenter: Path, data: Path, scored: list[dict[str, Any]]
) -> None:
    base = ["segment", "eval", str(new_segmenter), "--json", "-q"]
    assert json.loads(run_dpn(*base, "--precision", "bf16", "-j", "3").stdout)["images"] == 3
    run_dpn(*base)
    expected = {"names": ["0000", "0001", "0002"], "rule": LabelRule(5, 1, 0), "workers": 3, "bf16": True}
    assert scored == [expected, {**expected, "workers": "auto", "bf16": False}]
    mask = data / "annotations" / "validation" / "0001.png"
    Image.fromarray(np.full((64, 64), 77, np.uint8)).save(mask)
    spoilt = run_dpn(*base)
    assert spoilt.exit_code == 3
    assert f"{mask}: the mask holds 77" in " ".join(spoilt.stderr.split())
    assert len(scored) == 2  # found before anything is scored


def test_predict_has_its_own_precision(new_segmenter: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[bool] = []

    def label_map(*arguments: Any) -> torch.Tensor:
        observed.append(torch.is_autocast_enabled("cpu"))
        return torch.zeros(arguments[2], dtype=torch.uint8)

    monkeypatch.setattr("tasks.segment.predict.label_map", label_map)
    image = str(data / "images" / "validation" / "0000.jpg")
    for precision in ("bf16", "fp32"):
        run_dpn("segment", "predict", str(new_segmenter), image, "-o", str(new_segmenter), "--precision", precision)
    assert observed == [True, False]


def test_a_loaded_segmenter_drops_nothing(new_segmenter: Path) -> None:
    segmenter = load_segmenter(str(new_segmenter))
    assert not any(module.training for module in segmenter.network.modules())


@pytest.mark.parametrize("part", ["annotations/validation", "images/validation", "images/training"])
def test_any_file_that_changes_between_run_and_resume_is_noticed(part: str, data: Path, tmp_path: Path) -> None:
    config = segment_config(data, schedule={"steps": 1})
    train_segment(config, tmp_path / "run")
    for name in ("result.json", "weights.safetensors"):
        (tmp_path / "run" / name).unlink()
    path = next((data / part).iterdir())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="the images or masks have changed since this run started"):
        train_segment(config, tmp_path / "run", resume=True)


def test_the_weights_folder_is_for_those_who_name_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mu-16-dpn.safetensors").touch()

    def chosen(stem: str, checkpoint: str | None) -> str | None:
        section = {"arch": "mu/16", "stem": stem, "checkpoint": "none"}
        config = segment_config("somewhere", backbone=section)
        backbone = config.backbone.model_copy(update={"checkpoint": checkpoint})
        return finalize(config.model_copy(update={"backbone": backbone})).backbone.checkpoint

    assert chosen("dpn", None) == str(tmp_path / "weights" / "mu-16-dpn.safetensors")
    assert chosen("dpn", "mine.npz") == "mine.npz"
    with pytest.raises(DpnError, match="no weights were given"):
        chosen("none", None)


def test_a_run_has_the_folder_of_its_task_network_and_fraction(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    observed: list[Path] = []

    def trained(run: Run[SegmentConfig]) -> dict[str, str]:
        observed.append(run.folder.path)
        return {"task": "none"}

    monkeypatch.setattr("tasks.segment.command.train", trained)
    for source, share in ((str(data), 1), (str(data), "1/2"), ("demo", 1)):
        trainer.run(
            segment_config(source, data={"source": source, "fraction": share}), LaunchOptions(), Console(quiet=True)
        )
    assert [str(path) for path in observed] == [
        "runs/segment_folder/mu-16-dpn",
        "runs/segment_folder/mu-16-dpn-0.5",
        "runs/segment_demo/mu-16-dpn",
    ]


def test_a_dry_run_counts_the_steps_of_the_epochs(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def rehearsed(run: Any, opened: Any) -> Cost:
        calls.append(run.config.schedule.steps)
        return Cost(
            name="mu/8 dpn", memory=1, step_seconds=1.0, steps=1, trainings=1, evaluation_seconds=0.0, kept=1, passing=1
        )

    monkeypatch.setattr("tasks.segment.command.dry_run_training", rehearsed)
    trainer.run(segment_config(data).model_copy(update={"epochs": 5.0}), LaunchOptions(dry_run=True), Console())
    assert calls == [5]
    assert "5 steps of 8: 5 passes" in capsys.readouterr().err


def test_each_command_has_its_own_config() -> None:
    for name, expected in (("folder", ("folder", 0, 255, 128)), ("ade20k", ("ade20k", 1, 0, None))):
        config = yaml.safe_load(run_dpn("segment", name, "--data", "somewhere", "--print-config").stdout)
        data = config["data"]
        assert (data["dataset"], data["label_offset"], data["ignore_label"], config["epochs"]) == expected


def test_the_demo_starts_from_the_tower_of_its_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "demo_backbone", lambda stem, console, trained: f"tower of {stem}, {trained}")
    config = segment_config("demo", backbone={"arch": None, "checkpoint": None, "stem": "none"})
    assert config.backbone.checkpoint is None
    for dry_run in (False, True):
        resolved = commands.ADE20K.finalize(config, Console(quiet=True), dry_run)
        assert resolved.backbone.checkpoint == f"tower of none, {not dry_run}"
