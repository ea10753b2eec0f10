"""`dpn pretrain`: Appendix C's config, what presets change, wrong input, and the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dpn_cli.config.load import build, dump
from dpn_cli.config.provenance import differences
from dpn_cli.errors import DpnError
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.pretrain import pretrain_config
from tasks.classify.config import resolve_steps
from tasks.classify.plan import describe_plan, estimate
from tasks.classify.preflight import check_batch
from tasks.classify.pretrain_config import PretrainConfig, resolve
from tasks.classify.train import load_network


def differing(config: PretrainConfig) -> list[str] | None:
    """The values that differ from Appendix C's, without the sentences."""
    actual = differences(config, "fp32")
    return actual and [match for match in actual if "(paper: " in match]


@pytest.mark.parametrize(
    ("arch", "randaugment", "mixup", "dropout", "drop_path", "pre_logits"),
    [
        ("Ti/16", (2, 0), 0.0, 0.0, 0.0, True),
        ("S/32", (2, 15), 0.2, 0.0, 0.0, False),
        ("S/16", (2, 15), 0.5, 0.0, 0.0, True),
        ("B/32", (2, 15), 0.5, 0.1, 0.1, True),
        ("B/16", (2, 15), 0.5, 0.1, 0.1, True),
        ("L/16", (2, 15), 0.5, 0.1, 0.1, True),
    ],
)
def test_the_config_is_appendix_c(
    arch: str, randaugment: tuple[int, float], mixup: float, dropout: float, drop_path: float, pre_logits: bool
) -> None:
    config = pretrain_config(arch)
    assert (config.randaugment.layers, config.randaugment.magnitude) == randaugment
    assert (config.mixup, config.backbone.dropout, config.backbone.drop_path) == (mixup, dropout, drop_path)
    assert config.backbone.pre_logits == pre_logits
    assert not config.backbone.drop_path_rescale
    assert (config.lr, config.batch_size, config.loss, config.head_bias) == (1e-3, 4096, "sigmoid", None)
    optim = config.optim
    assert (optim.name, optim.betas, optim.eps, optim.clip_norm) == ("adam", (0.9, 0.999), 1e-8, 1.0)
    assert (optim.weight_decay, optim.decay_unit, optim.decay_mask) == (1e-4, "schedule", "kernels")
    counted = resolve_steps(config, 1_268_355).schedule  # train[:99%]
    assert (counted.steps, counted.warmup, counted.decay) == (92_897, 10_000, "cosine")
    # One value is not the paper's unless it is asked for.
    assert differing(config) == ["optim.state_dtype: float32 (paper: bfloat16)"]
    assert differing(pretrain_config(arch, optim={"state_dtype": "bfloat16"})) == []


def test_presets_and_levels_report_differences() -> None:
    parity: dict[str, Any] = {"optim": {"state_dtype": "bfloat16"}}
    short = pretrain_config("S/16", preset="short", **parity)
    assert differing(short) == [
        "epochs: 90.0 (paper: 300.0)",
        "batch_size: 1024 (paper: 4096)",
        "loss: softmax (paper: sigmoid)",
        "head_bias: 0.0 (paper: -6.9)",
        "randaugment.magnitude: 10.0 (paper: 15.0)",
        "mixup: 0.2 (paper: 0.5)",
    ]
    assert resolve_steps(short, 1_268_355).schedule.steps == 111_477
    assert differing(pretrain_config("B/32", level="strong2", **parity)) == [
        "randaugment.magnitude: 20.0 (paper: 15.0)",
        "mixup: 0.8 (paper: 0.5)",
    ]
    assert differing(pretrain_config("B/32", backbone={"stem": "rms"}, **parity)) == []
    assert differing(pretrain_config("B/32", data={"decode": "fast", "minival": 0.3}, **parity)) == [
        "data.minival: 0.3 (paper: null)",
        "data.decode: fast (paper: exact)",
    ]
    assert differing(pretrain_config("B/32", head_bias=-6.9, data={"eval_resize": 256}, **parity)) == []
    # The paper does not say whether stochastic depth rescales what it keeps, so neither way differs from it.
    assert differing(pretrain_config("B/32", backbone={"drop_path_rescale": True}, **parity)) == []
    assert differences(pretrain_config("S/8", level="medium2"), "fp32") is None
    fixed = pretrain_config("B/32", schedule={"steps": 9290})
    assert (fixed.epochs, fixed.schedule.warmup) == (None, 1000)
    assert {
        "schedule.steps: 9290 (paper: 92897)",
        "schedule.warmup: 1000 (paper: 10000)",
        "epochs: null (paper: 300.0)",
    } < set(differing(fixed) or ())
    both = pretrain_config("S/16", preset="short", schedule={"steps": 929})
    assert (both.epochs, both.schedule.warmup, both.batch_size) == (None, 100, 1024)
    odd = pretrain_config("H/14", level="light2", mixup=0.3)
    assert (odd.randaugment.magnitude, odd.mixup, odd.backbone.dropout) == (10, 0.3, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "S/16", "--steps", "5", "--epochs", "2"], "--steps 5 and --epochs 2.0: give one of them"),
        (["--arch", "S/16", "--epochs", "2", "--set", "schedule.warmup=3"], "decide the warmup too; give --steps"),
        (["--arch", "S/16", "--set", "data.minival=0.001"], r"fewer than 1 % of the images for minival: use at least"),
        (["--arch", "S/16", "--eval-fewshot", "2", "--set", "data.minival=0"], "tested on minival, and there is none"),
        (["--arch", "S/16", "--epochs", "1", "--set", "schedule.cooldown=9"], "--epochs 1.0 and schedule.cooldown=9"),
        (["--arch", "S/16", "--epochs", "inf"], "--epochs: a finite number above 0 .got inf"),
        (["--arch", "S/16", "--set", "schedule.steps=20.0"], "schedule.steps: a whole number of steps .got 20.0"),
        (
            ["--arch", "S/16", "--set", "randaugment.magnitude=31"],
            "randaugment.magnitude: a number from 0 to 30 .got 31",
        ),
        (["sun397", "--arch", "S/16", "--epochs", "5"], "epochs=5.0: a sweep's stages decide it; change them"),
        (["sun397", "--arch", "S/16", "--lr", "0.1"], "lr=0.1: a sweep's stages decide it"),
        (["sun397", "--arch", "S/16", "--data", "demo"], "sun397 needs train/CLASS, val/CLASS and test/CLASS"),
        (["imagenet", "--arch", "H/14"], "Appendix C has lines for .* only; say how strongly"),
        (["imagenet"], "--arch is needed: Ti/16"),
        ([], "--arch is needed to train from scratch"),
        (["--arch", "S/16", "--augment", "medium3"], "choose one of none, light1"),
        (
            ["--arch", "S/16", "--base-config", "sun397", "--preset", "short"],
            "shortens the configs of imagenet, .*, not that of sun397",
        ),
        (["--arch", "S/16", "--set", "schedule=3"], "schedule: a section of keys, not a value"),
        (["--arch", "S/16", "--preset", "long"], "--preset 'long': the only preset is short"),
        (["--arch", "S/16", "--base-config", "jftt"], "--base-config 'jftt': choose one of imagenet, deit"),
        (["sun397", "--base-config", "imagenet", "--arch", "S/16"], "give one of them"),
        (["--arch", "S/16", "--image-size", "100"], "the patch 16x16 does not divide it"),
        (["--arch", "B/32", "--micro-batch-size", "3", "-b", "16"], "does not divide the 16 images of a rank .* use 2"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, photos: Path, tmp_path: Path) -> None:
    split = [] if "sun397" in arguments else ["--set", "data.val_fraction=0.2"]
    result = run_dpn("pretrain", "--data", str(photos), "-o", str(tmp_path / "r"), *split, *arguments)
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors


def test_without_data_it_is_the_demo_unless_an_arch_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build(PretrainConfig, resolve("imagenet", None, None, None, {}, {}), "test")
    assert (config.backbone.arch, config.data.source, config.demo) == ("nano/8", "demo:objects", True)
    with pytest.raises(DpnError, match=r"no images to train B/16 on: neither \$DPN_DATA_DIR/imagenet nor ./imagenet"):
        resolve("imagenet", None, None, None, {"backbone": {"arch": "B/16"}}, {})
    asked = {"backbone": {"arch": "mu/8"}, "data": {"source": "demo"}}
    assert resolve("imagenet", None, None, None, asked, {})["backbone"]["arch"] == "mu/8"


def test_batches_are_divided_or_refused_never_rounded() -> None:
    config = pretrain_config("S/16", batch_size=100)
    with pytest.raises(DpnError, match="--batch-size 100: less than one for each of the 300 ranks; use 300 at least"):
        check_batch(config, World(0, 300, torch.device("cpu")))
    uneven = pretrain_config("S/16", batch_size=100, runtime={"micro_batch_size": 30})
    with pytest.raises(DpnError, match="--micro-batch-size 30: does not divide --batch-size 100; use 25, or auto"):
        check_batch(uneven, World(0, 3, torch.device("cpu")))
    micro = pretrain_config("S/16", batch_size=96, runtime={"micro_batch_size": 20})
    with pytest.raises(DpnError, match=r"20: does not divide the 48 images of a rank \(--batch-size 96 over 2 ranks\)"):
        check_batch(micro, World(0, 2, torch.device("cpu")))
    check_batch(
        pretrain_config("S/16", batch_size=96, runtime={"micro_batch_size": 16}), World(0, 2, torch.device("cpu"))
    )


def test_the_plan_counts_the_networks_multiplications() -> None:
    config = pretrain_config("S/16")
    result = estimate(config, 1_268_355, count_data=False, ranks=8)
    assert (result["steps"], result["images"]) == (92_897, 1_268_355)
    assert result["flops_per_image"] == pytest.approx(27.95e9, rel=1e-3)
    assert result["parameters"] == sum(p.numel() for p in load_network(config, 1000).parameters())
    assert result["flops"] == result["flops_per_image"] * 4096 * 92_897
    seconds = result["hours_at_matrix_rate"] * 3600
    assert seconds == pytest.approx(result["flops"] / result["matrix_flops_per_second"] / 8)
    assert "92,897 steps of 4,096" in describe_plan(result)


def test_the_plan_reads_packed_and_other_data(photos: Path) -> None:
    completed = run_dpn(
        "plan", "pretrain", "--arch", "Ti/16", "--data", str(photos), "--set", "data.val_fraction=0.5", "--json"
    )
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert result["images"] == 41
    assert result["steps"] == round(100 * 41 / 64)
    completed = run_dpn(
        "plan",
        "pretrain",
        "imagenet",
        "--arch",
        "Ti/16",
        "--data",
        str(photos),
        "--json",
        "--set",
        "data.val_fraction=0.5",
    )
    assert json.loads(completed.stdout)["steps"] == round(300 * 41 / 4096)


def test_configs_that_dpn_wrote_can_be_given_back_and_flags_win(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    full = pretrain_config("S/16")
    path.write_text(dump(full))
    second = build(PretrainConfig, resolve("imagenet", None, None, str(path), {}, {}), "test")
    assert second == full
    shorter = build(
        PretrainConfig, resolve("imagenet", None, None, str(path), {"schedule": {"steps": 929}}, {}), "test"
    )
    assert (shorter.epochs, shorter.schedule.steps, shorter.schedule.warmup) == (None, 929, 100)
    path.write_text("epochs: 9\nmixup: 0.9\nbatch_size: 64\nbackbone: {arch: S/16}\ndata: {source: x}\n")
    strong = build(PretrainConfig, resolve("imagenet", "short", "strong2", str(path), {}, {}), "test")
    assert (strong.mixup, strong.batch_size, strong.epochs) == (0.8, 1024, 90)


@pytest.mark.parametrize("policy", [{"auto_augment": "cifar10"}, {"randaugment": {"layers": 2, "magnitude": 10}}])
def test_jitter_and_a_policy_exclude_each_other(policy: dict[str, Any]) -> None:
    base: dict[str, Any] = {"randaugment": {"layers": 0}, "data": {"source": "demo", "jitter": 0.4}}
    assert pretrain_config("nano/8", **base).data.jitter == 0.4
    with pytest.raises(DpnError, match=r"data\.jitter \(0\.4\) and .*leave data\.jitter at 0 or the policy out"):
        pretrain_config("nano/8", **base | policy)
