"""What a checkpoint knows need not be said: its stem for every command that takes one, a frozen tower's image size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpn_cli.config.load import build
from dpn_cli.errors import DpnError
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.captions import write_caption_table
from support.cli import run_dpn
from tasks.classify.classifier import load_classifier
from tasks.lit.config import LitConfig, finalize, resolve

TRAINING = ("-b", "8", "-j", "0", "--device", "cpu", "--json")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain network of 32 px, whose file's name says nothing."""
    path = tmp_path_factory.mktemp("weights") / "tower.safetensors"
    export_backbone(load_backbone("mu/8", stem="none", image_size=32), path)
    return str(path)


def commands(plain: str, photos: Path, digits: Path) -> dict[str, list[str]]:
    own, small = ["--checkpoint", plain], ["--image-size", "32", "--steps", "2", *TRAINING]
    images = ["--data", str(photos), "--val-fraction", "0.2"]
    return {
        "highres": ["finetune", "highres", *own, *images, *small],
        "pretrain": ["pretrain", "--arch", "mu/8", "--augment", "none", "--set", f"backbone.checkpoint={plain}",
                     "--set", "backbone.pre_logits=false", *images, *small],
        "vtab": ["finetune", "vtab", *own, "--data", str(digits), "--tasks", "svhn", "--lrs", "0.01", "--seeds", "1",
                 "--set", "schedule.warmup=0", *small],
        "segment": ["segment", "ade20k", "--data", "demo", *own, "--fraction", "0.01", *small],
        "lit": ["lit", "train", *own, "--data", str(photos / "pairs.csv"), "--val-data", str(photos / "pairs.csv"),
                "--steps", "2", *TRAINING],
    }  # fmt: skip


@pytest.fixture(scope="module")
def captioned(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captioned") / "photos"
    shutil.copytree(photos, root)
    files = sorted(root.rglob("*.jpg"))[:40]
    write_caption_table(
        root / "pairs.csv", [(str(file.relative_to(root)), f"an image of {file.stem}") for file in files]
    )
    return root


@pytest.mark.parametrize("task", ["highres", "pretrain", "vtab", "segment", "lit"])
def test_the_stem_is_the_checkpoints(
    task: str, plain: str, captioned: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = commands(plain, captioned, digits)[task]
    completed = run_dpn(*command)
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert result["stem"] == "none"
    initial, _, final = completed.stderr.partition("run folder ")
    assert f"{plain}: mu/8, stem none, 32x32 px; its stem is used, since --stem was left out\n" in initial
    assert "mu/8, stem none, 32x32 px: " in final
    (config,) = Path("runs").rglob("config.yaml")
    assert config.parent.name.startswith(("tower-none", "mu-8-none"))
    assert yaml.safe_load(config.read_text())["backbone"]["stem"] == "none"
    cli_result = run_dpn(*command, "--stem", "dpn", "-o", "other")
    assert cli_result.exit_code == 2
    assert "--stem dpn: " in cli_result.stderr
    assert "has stem 'none'" in cli_result.stderr


def test_networks_from_scratch_are_dual(captioned: Path, tmp_path: Path) -> None:
    scratch = ["--checkpoint", "none", "--arch", "mu/8", "--data", str(captioned), "--val-fraction", "0.2"]
    result = run_dpn(
        "finetune", "highres", *scratch, "--image-size", "32", "--steps", "1", *TRAINING, "-o", str(tmp_path / "r")
    )
    assert json.loads(result.stdout)["stem"] == "dpn"
    assert load_classifier(str(tmp_path / "r")).model.config.stem == "dpn"
    assert load_backbone("mu/8", image_size=32).config.stem == "dpn"


def test_stems_that_are_compared_are_asked_for(plain: str, digits: Path, tmp_path: Path) -> None:
    common = ["finetune", "vtab", "--data", str(digits), "--tasks", "svhn", "--lrs", "0.01", "--seeds", "1",
              "--compare", "none,dpn", "--set", "schedule.warmup=0", "--image-size", "32", "--steps", "1",
              *TRAINING]  # fmt: skip
    result = run_dpn(*common, "--checkpoint", plain, "-o", str(tmp_path / "a"))
    assert result.exit_code == 2
    assert "--stem dpn: " in result.stderr
    for stem in ("none", "dpn"):
        export_backbone(load_backbone("mu/8", stem=stem, image_size=32), tmp_path / f"w-{stem}.safetensors")
    completed = run_dpn(*common, "--checkpoint", str(tmp_path / "w-{stem}.safetensors"), "-o", str(tmp_path / "b"))
    assert completed.exit_code == 0, completed.output
    assert set(json.loads(completed.stdout)["compare"]["stems"]) == {"none", "dpn"}


def test_a_frozen_tower_is_read_at_its_own_size(plain: str, captioned: Path, tmp_path: Path) -> None:
    pairs = ["--data", str(captioned / "pairs.csv"), "--val-data", str(captioned / "pairs.csv")]
    train = ["lit", "train", "--checkpoint", plain, *pairs, "--steps", "1", *TRAINING]
    result = run_dpn(*train, "-o", str(tmp_path / "own"))
    assert json.loads(result.stdout)["image_size"] == [32, 32]
    asked = [*train[:-1], "--image-size", "48", "-o", str(tmp_path / "asked")]
    assert "mu/8 stem none at 48x48, text tower mu" in run_dpn(*asked).stdout
    # A run at another size, as all were that did not say one before it followed the tower.
    completed = run_dpn(*train, "-q", "-o", str(tmp_path / "asked"), "--resume")
    assert completed.exit_code == 2
    assert "(backbone.image_size: 48 there, left out now); give the same options" in " ".join(completed.stderr.split())
    assert "mu/8 stem none at 48x48, text tower mu" in run_dpn(*asked, "--resume").stdout
    shots = run_dpn(
        "eval", "fewshot", plain, "--data", str(captioned), "--val-fraction", "0.5", "--shots", "1", "--json"
    )
    probed = json.loads(shots.stdout)
    assert (probed["arch"], probed["stem"], probed["image_size"]) == ("mu/8", "none", [32, 32])
    assert "mu/8, stem none, 32x32 px: " in shots.stderr.splitlines()[0]


@pytest.mark.parametrize(("source", "pixels"), [("demo", 64), ("x.csv", 224)])
def test_towers_from_scratch_have_the_size_of_their_images(source: str, pixels: int) -> None:
    def settled(**settings: Any) -> LitConfig:
        flags = {"backbone": {"arch": "mu/8", "checkpoint": "none", **settings}, "data": {"source": source}}
        return finalize(build(LitConfig, resolve(None, flags, {}), "test"))

    assert settled().backbone.image_size == pixels
    assert settled(image_size=32).backbone.image_size == 32
    with pytest.raises(DpnError, match="the patch 8x8 does not divide it"):
        settled(image_size=30)
