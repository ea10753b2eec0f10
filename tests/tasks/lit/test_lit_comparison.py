"""Towers and seeds side by side: ``--compare`` and ``--seeds`` of ``dpn lit train``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

# a fixture
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError, NonFiniteError
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.captions import write_colour_pairs
from support.cli import run_dpn
from support.engine import fail_training
from support.images import write_class_folders
from tasks.lit.features import ImageEncoder

RECALLS = ["retrieval.image_to_text@1", "retrieval.text_to_image@1"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A training of two steps on 12 pairs, 6 of them held out, with a frozen tower for each of two stems."""
    root = tmp_path_factory.mktemp("towers")
    for stem in ("none", "dpn"):
        export_backbone(load_backbone("mu/8", stem=stem, image_size=16, pool="gap"), root / f"mu-{stem}.safetensors")
    pairs = write_colour_pairs(root / "pairs", range(12))
    small = ["--text-size", "mu", "--steps", "2", "-b", "4", "-j", "0", "--device", "cpu", "-q", "--json"]
    cached = ["--cache-dir", str(root / "cache"), "--views", "2"]
    towers = ["--checkpoint", f"{root}/mu-{{stem}}.safetensors", *cached]
    return ["lit", "train", "--data", str(pairs), "--val-fraction", "0.5", *small, *towers]


def test_all_seeds_of_a_tower_share_features_and_each_has_its_own_order(
    command: list[str],
    tmp_path: Path,
    started_jobs: list[engine.TrainJob],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode_views = ImageEncoder.encode_views

    def counted(encoder: ImageEncoder, images: torch.Tensor, rows: list[int]) -> torch.Tensor:
        encoded.append(len(images))
        return encode_views(encoder, images, rows)

    monkeypatch.setattr(ImageEncoder, "encode_views", counted)
    several = [*command, "--compare", "none,dpn", "--seeds", "0,2", "-o", str(tmp_path / "all")]
    completed = run_dpn(*several)
    assert completed.exit_code == 0, completed.output
    assert sum(count for count in encoded if count > 1) == 2 * (6 + 6)  # one at a time are the checks of a cache
    batches = [next(job.batches(0)) for job in started_jobs]
    tokens = [batch["tokens"] for batch in batches]
    assert torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[1], tokens[3])
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(batches[0]["image"], batches[2]["image"])
    result = json.loads(completed.stdout)
    assert (result["score"], result["scores"]) == (RECALLS[0], RECALLS)
    networks, (difference,) = result["compare"]["networks"], result["compare"]["differences"]
    for way in ("image_to_text@1", "text_to_image@1"):
        key = f"retrieval.{way}"
        plain, dual = ([run["retrieval"][way] for run in networks[name]["runs"].values()] for name in ("none", "dpn"))
        assert networks["dpn"][key]["values"] == pytest.approx(dual, abs=1e-4)
        minus = [actual - expected for actual, expected in zip(dual, plain, strict=True)]
        assert difference[key]["values"] == pytest.approx(minus, abs=1e-4)
    single = [word.replace("{stem}", "dpn") for word in command]
    assert run_dpn(*single, "--seed", "2", "-o", str(tmp_path / "one")).exit_code == 0
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "all/dpn/seed2"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    (listed,) = json.loads(run_dpn("runs", str(tmp_path / "all"), "--json").stdout)
    assert (listed["metric"], listed["value"]) == ("image to text R@1, dpn", networks["dpn"][RECALLS[0]]["mean"])


def test_images_are_encoded_before_processes_start_that_would_wait_for_them(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[int] = []

    def run_all(*arguments: object) -> None:
        caches.append(len(list((tmp_path / "cache").glob("*/cache.json"))))
        raise DpnError("enough")

    monkeypatch.setattr("dpn_cli.sweep.engines.dispatch.run_all", run_all)
    at_once = ("--seeds", "0,2", "--jobs", "2", "--cache-dir", str(tmp_path / "cache"))
    single = [word.replace("{stem}", "dpn") for word in command]
    for more in (("--compare", "none,dpn"), ("--no-cache",), ()):
        words = command if "--compare" in more else single
        result = run_dpn(*words, *more, *at_once, "-o", str(tmp_path / f"run{len(caches)}"))
        assert "enough" in result.stderr, result.output
    # Two towers, which two processes encode with; one tower: its images, in two views, and the held-out ones.
    assert caches == [0, 0, 2]


def test_towers_are_compared_by_zero_shot_accuracy_if_labelled_images_exist(command: list[str], tmp_path: Path) -> None:
    """That of 'dpn lit eval'; a run without them has none."""
    photos = write_class_folders(tmp_path / "photos", classes=3, each=4)
    words = [*command, "--compare", "none,dpn", "--zeroshot-data", str(photos), "-o", str(tmp_path / "all")]
    result = json.loads(run_dpn(*words).stdout)
    assert result["scores"] == ["zeroshot.top1", *RECALLS]
    for name, network in result["compare"]["networks"].items():
        scored = run_dpn(
            "lit", "eval", str(tmp_path / "all" / name / "seed0"), "--data", str(photos), "--force", "--json"
        )
        (value,) = network["zeroshot.top1"]["values"]
        assert value == pytest.approx(json.loads(scored.stdout)["top1"], abs=1e-4)
    (photos / "class0" / "000.jpg").unlink()
    for place in ("result.json", "dpn/seed0/result.json"):
        (tmp_path / "all" / place).unlink()
    changed = run_dpn(*words, "--resume")
    assert changed.exit_code == 3
    assert "images have changed since this run started" in changed.stderr
    missing = run_dpn(*words[:-3], str(tmp_path / "nowhere"), "-o", str(tmp_path / "other"))
    assert missing.exit_code == 3
    assert "nowhere" in missing.stderr


def test_a_training_that_fails_is_named_and_retried(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started_jobs: list[engine.TrainJob],
) -> None:
    words = [*(word for word in command if word != "--json"), "--compare", "none,dpn", "-o", str(tmp_path / "all")]
    with pytest.MonkeyPatch.context() as patch:
        fail_training(2, NonFiniteError("the loss is NaN"), patch)
        result = run_dpn(*words)
    assert result.exit_code == 6
    assert "failed: stem dpn, seed 0: the loss is NaN" in result.stdout
    result = run_dpn(*words, "--resume")
    assert result.exit_code == 0, result.output
    assert len(started_jobs) == 2
    output = " ".join(result.stdout.split())
    assert "lit: image to text R@1 in %, and the difference to none" in output
    assert "lit: text to image R@1 in %, and the difference to none" in output
