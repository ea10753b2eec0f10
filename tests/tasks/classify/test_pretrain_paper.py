"""The paper's other pre-trainings: S/16+, ImageNet-21k and JFT-like by steps, and the few-shot probe at their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpn_cli.config.load import build, merge
from dpn_cli.config.provenance import differences
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.vit import posemb_sincos2d
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.images import write_class_folders
from support.pretrain import train_pretrain
from tasks.classify.config import resolve_steps
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve

TINY: dict[str, Any] = {
    "backbone": {"arch": "mu/8", "image_size": 32},
    "data": {"val_fraction": 0.2, "minival": 0.2},
    "batch_size": 8,
    "schedule": {"steps": 2},
    "runtime": {"workers": 0},
}


def config_of(name: str, source: object = "x", level: str | None = None, **settings: Any) -> PretrainConfig:
    plain = resolve(name, None, level, None, merge({"data": {"source": str(source)}}, settings), {})
    return finalize(build(PretrainConfig, plain, "test"))


def differing(config: PretrainConfig) -> list[str]:
    return [line for line in differences(config, "fp32") or () if "(paper: " in line]


def test_s16plus_is_the_better_plain_vit() -> None:
    config = config_of("s16plus")
    backbone = config.backbone
    assert (backbone.arch, backbone.pool, backbone.posemb, backbone.pre_logits) == ("S/16", "gap", "sincos2d", True)
    assert (config.randaugment.layers, config.randaugment.magnitude, config.mixup) == (2, 10, 0.2)
    assert (config.loss, config.head_bias, config.batch_size, config.epochs) == ("softmax", 0, 1024, 90)
    counted = resolve_steps(config, 1_268_355).schedule
    assert (counted.steps, counted.warmup) == (111_477, 10_000)
    assert differing(config) == []


@pytest.mark.parametrize(
    ("name", "steps", "longer", "augmented"),
    [("imagenet21k", 93_000, 930_000, (2, 15, 0.5, 0.1, 0.1)), ("jft", 220_000, 1_100_000, (0, 0, 0.0, 0.0, 0.0))],
)
def test_by_steps(name: str, steps: int, longer: int, augmented: tuple[float, ...]) -> None:
    config = config_of(name, backbone={"arch": "B/16"})
    assert (config.schedule.steps, config.schedule.warmup, config.epochs) == (steps, 10_000, None)
    assert (config.batch_size, config.loss, config.head_bias) == (4096, "sigmoid", None)
    actual = [config.randaugment.layers, config.randaugment.magnitude, config.mixup]
    assert [*actual, config.backbone.dropout, config.backbone.drop_path] == list(augmented)
    long = config_of(name, backbone={"arch": "B/16"}, schedule={"steps": longer})
    assert (long.schedule.steps, long.schedule.warmup) == (longer, 10_000)
    for item in (config, long):
        assert not [line for line in differing(item) if "steps" in line or "batch" in line]
    other = config_of(name, backbone={"arch": "B/16"}, schedule={"steps": 5000})
    assert f"schedule.steps: 5000 (paper: {steps})" in differing(other)


def test_fixed_positions_are_not_trained(photos: Path, tmp_path: Path) -> None:
    train_pretrain(config_of("s16plus", photos, **TINY), tmp_path / "run")
    model = load_backbone(checkpoint=str(tmp_path / "run" / "weights.safetensors"), image_size=None)
    assert (model.config.posemb, model.config.pool) == ("sincos2d", "gap")
    assert torch.equal(model.pos_embed, posemb_sincos2d((4, 4), 32))
    with pytest.raises(DpnError, match="posemb=learn: .* was trained with sincos2d; leave the key out"):
        load_backbone(checkpoint=str(tmp_path / "run" / "weights.safetensors"), posemb="learn")


def test_the_probe_at_the_end_equals_eval_fewshot(photos: Path, tmp_path: Path) -> None:
    """It has images of its own, with validation images, and the shots of --eval-fewshot or 25."""
    for split, item in (("train", 6), ("val", 3)):
        write_class_folders(tmp_path / "other" / split, classes=4, each=item)
    shared = ["--data", str(photos), "--arch", "mu/8", "--augment", "light2", "--image-size", "32", "-b", "8"]
    shared += ["--steps", "2", "-j", "0", "--device", "cpu", "-q", "--fewshot-data", str(tmp_path / "other")]
    arguments = ["pretrain", "imagenet21k", *shared, "--set", "data.minival=0.2", "--eval-fewshot", "2"]
    completed = run_dpn(*arguments, "--json", "-o", str(tmp_path / "run"))
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert (result["fewshot"]["images"], result["fewshot"]["classes"]) == ({"train": 24, "test": 12}, 4)
    weights = str(tmp_path / "run" / "weights.safetensors")
    probed = run_dpn("eval", "fewshot", weights, "--data", str(tmp_path / "other"), "--shots", "2", "-j", "0", "--json")
    assert result["fewshot"]["accuracy"] == json.loads(probed.stdout)["accuracy"]
    second_result = run_dpn(*arguments, "--resume", "-o", str(tmp_path / "run"))
    assert f"{tmp_path / 'other'}: 2-shot " in second_result.stdout


def test_an_impossible_probe_is_refused_before_the_training(photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_class_folders(tmp_path / "few" / split, classes=2, each=3)
    tiny = merge(TINY, {"fewshot_data": str(tmp_path / "few")})
    with pytest.raises(DataError, match=r"--fewshot-data .*few: shots 25: class .* has 3 training images"):
        train_pretrain(config_of("jft", photos, **tiny), tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.safetensors"))
    with pytest.raises(DataError, match=r"--fewshot-data .*train: no images to test on; put them next to"):
        train_pretrain(
            config_of("jft", photos, **merge(tiny, {"fewshot_data": str(tmp_path / "few/train")})), tmp_path / "two"
        )


def test_imagenet_is_found_for_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    flags = {"backbone": {"arch": "B/16"}, "data": {"source": "x"}}
    assert resolve("jft", None, None, None, flags, {}, said.append).get("fewshot_data") is None
    assert said == ["no ImageNet for the few-shot probe at the end; name it with --fewshot-data"]
    (tmp_path / "imagenet").mkdir()
    assert resolve("jft", None, None, None, flags, {})["fewshot_data"] == "imagenet"
    assert resolve("imagenet", None, None, None, flags, {}).get("fewshot_data") is None
    with pytest.raises(DpnError, match=r"no images to train B/16 on: neither \$DPN_DATA_DIR/jft nor ./jft is there"):
        resolve("jft", None, None, None, {"backbone": {"arch": "B/16"}}, {})
