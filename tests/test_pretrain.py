"""`dpn pretrain`: Appendix C's recipe and numbers, whole runs on small pictures, the stages of a sweep, the plan."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Arrays
from test_cli import run
from test_loader import pictures
from torch import Tensor, nn

from dpn_cli import engine
from dpn_cli import recipe as recipes
from dpn_cli.arch import SIZES
from dpn_cli.backbone import load_backbone
from dpn_cli.classifier import load_classifier
from dpn_cli.commands import tower
from dpn_cli.console import Console
from dpn_cli.data.classified import ClassFolders, Part
from dpn_cli.data.loader import Augmentation, crop_batches
from dpn_cli.data.pixels import resize, rows_of_step
from dpn_cli.distributed import World
from dpn_cli.errors import DataError, DpnError, NonFiniteError, StoppedError
from dpn_cli.gradients import Gradients
from dpn_cli.losses import LOSSES, sigmoid_xent
from dpn_cli.memory import MicroBatch
from dpn_cli.recipe import Runtime
from dpn_cli.runstate import RunFolder
from dpn_cli.supervised import train as training
from dpn_cli.supervised.command import open_data
from dpn_cli.supervised.recipe import in_steps
from dpn_cli.supervised.train import check_batch, load_network
from tasks.pretrain import command
from tasks.pretrain.plan import describe, estimate, training_flops
from tasks.pretrain.recipe import PretrainRecipe, cells, differences, resolve, settle

ALONE = World(0, 1, torch.device("cpu"))
SMALL: dict[str, Any] = {
    "backbone": {"arch": "nano/8", "image_size": 32, "dropout": 0.1, "drop_path": 0.2},
    "data": {"val_fraction": 0.2},
    "batch_size": 16,
    "loss": "softmax",
    "head_bias": 0.0,
    "lr": 3e-3,
    "schedule": {"steps": 24},
    "runtime": {"workers": 0, "checkpoint_every": 5},
}


def built(arch: str, *, preset: Any = None, level: str | None = None, **asked: Any) -> PretrainRecipe:
    flags = recipes.merge({"backbone": {"arch": arch}, "data": {"source": "imagenet"}}, asked)
    return recipes.build(PretrainRecipe, resolve("imagenet", preset, level, None, flags, {}), "test")


def small(source: Path, **changes: Any) -> PretrainRecipe:
    asked = recipes.merge(SMALL, {"data": {"source": str(source)}}, changes)
    return settle(recipes.build(PretrainRecipe, resolve("imagenet", None, "medium2", None, asked, {}), "test"))


def train(recipe: PretrainRecipe, path: Path, **arguments: Any) -> dict[str, Any]:
    options = {"resume": False, "overwrite": False, "dry_run": False, **arguments}
    result = command.start(recipe, path, console=Console(quiet=True), **options)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("photos"), classes=3, each=30)


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
def test_the_recipe_is_appendix_c(
    arch: str, randaugment: tuple[int, float], mixup: float, dropout: float, drop_path: float, pre_logits: bool
) -> None:
    recipe = built(arch)
    assert (recipe.randaugment.layers, recipe.randaugment.magnitude) == randaugment
    assert (recipe.mixup, recipe.backbone.dropout, recipe.backbone.drop_path) == (mixup, dropout, drop_path)
    assert recipe.backbone.pre_logits == pre_logits
    assert not recipe.backbone.drop_path_rescale
    assert (recipe.lr, recipe.batch_size, recipe.loss, recipe.head_bias) == (1e-3, 4096, "sigmoid", -6.9)
    optim = recipe.optim
    assert (optim.name, optim.betas, optim.eps, optim.clip_norm) == ("adam", (0.9, 0.999), 1e-8, 1.0)
    assert (optim.weight_decay, optim.decay_unit, optim.decay_mask) == (1e-4, "schedule", "kernels")
    counted = in_steps(recipe, 1_268_355).schedule  # train[:99%]
    assert (counted.steps, counted.warmup, counted.decay) == (92_897, 10_000, "cosine")
    # One thing is not the paper's unless it is asked for.
    assert differences(recipe) == ["optim.state_dtype: float32 (bfloat16)"]
    assert differences(built(arch, optim={"state_dtype": "bfloat16"})) == []


def test_presets_and_levels_say_what_differs() -> None:
    parity: dict[str, Any] = {"optim": {"state_dtype": "bfloat16"}}
    short = built("S/16", preset="short", **parity)
    assert differences(short) == [
        "epochs: 90.0 (300.0)",
        "batch_size: 1024 (4096)",
        "loss: softmax (sigmoid)",
        "head_bias: 0.0 (-6.9)",
        "randaugment.magnitude: 10.0 (15.0)",
        "mixup: 0.2 (0.5)",
    ]
    assert in_steps(short, 1_268_355).schedule.steps == 111_477
    assert differences(built("B/32", level="strong2", **parity)) == [
        "randaugment.magnitude: 20.0 (15.0)",
        "mixup: 0.8 (0.5)",
    ]
    assert differences(built("B/32", backbone={"stem": "rms"}, **parity)) == []
    assert differences(built("B/32", data={"decode": "fast", "minival": 0.3}, **parity)) == [
        "data.decode: fast (exact)",
        "data.minival: 0.3 (None)",
    ]
    assert differences(built("S/8", level="medium2")) is None
    fixed = built("B/32", schedule={"steps": 9290})
    assert (fixed.epochs, fixed.schedule.warmup) == (None, 1000)
    assert {"schedule.steps: 9290 (92897)", "epochs: None (300.0)"} < set(differences(fixed) or ())
    both = built("S/16", preset="short", schedule={"steps": 929})
    assert (both.epochs, both.schedule.warmup, both.batch_size) == (None, 100, 1024)
    odd = built("H/14", level="light2", mixup=0.3)
    assert (odd.randaugment.magnitude, odd.mixup, odd.backbone.dropout) == (10, 0.3, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "S/16", "--steps", "5", "--epochs", "2"], "--steps 5 and --epochs 2.0: give one of them"),
        (["--arch", "S/16", "--epochs", "2", "--set", "schedule.warmup=3"], "keeps its share of them; give --steps"),
        (["--arch", "S/16", "--set", "data.minival=0.001"], r"fewer than 1 % of the images for minival: use at least"),
        (["--arch", "S/16", "--eval-fewshot", "2", "--set", "data.minival=0"], "tested on minival, and there is none"),
        (["--arch", "S/16", "--epochs", "1", "--set", "schedule.cooldown=9"], "cooldown and stairs count steps"),
        (["--arch", "S/16", "--epochs", "inf"], "epochs: input should be a finite number"),
        (["--arch", "S/16", "--set", "schedule.steps=20.0"], "schedule.steps: a whole number of steps .got 20.0"),
        (["--arch", "S/16", "--set", "randaugment.magnitude=31"], "randaugment.magnitude: input should be less"),
        (["sun397", "--arch", "S/16", "--epochs", "5"], "epochs=5.0: a sweep's stages decide it; change them"),
        (["sun397", "--arch", "S/16", "--lr", "0.1"], "lr=0.1: a sweep's stages decide it"),
        (["sun397", "--arch", "S/16", "--data", "demo"], "sun397 needs train/CLASS, val/CLASS and test/CLASS"),
        (["--arch", "H/14"], "Appendix C has lines for .* only; say how strongly"),
        ([], "--arch is needed: Ti/16"),
        (["--arch", "S/16", "--augment", "medium3"], "choose one of none.*did you mean 'medium"),
        (["--arch", "S/16", "--recipe", "sun397", "--preset", "short"], "shortens the recipe of ImageNet, not sun397"),
        (["--arch", "S/16", "--set", "schedule=3"], "schedule: a section of keys, not a value"),
        (["--arch", "S/16", "--preset", "long"], "--preset 'long': there is one, short"),
        (["--arch", "S/16", "--recipe", "jft"], "--recipe 'jft': choose imagenet or sun397"),
        (["sun397", "--recipe", "imagenet", "--arch", "S/16"], "give one of them"),
        (["--arch", "S/16", "--image-size", "100"], "the patch 16x16 does not divide it"),
        (["--arch", "B/32", "--micro-batch-size", "3", "-b", "16"], "does not divide the 16 images of a rank .* use 2"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, photos: Path, tmp_path: Path) -> None:
    split = [] if "sun397" in arguments else ["--set", "data.val_fraction=0.2"]
    done = run("pretrain", "--data", str(photos), "-o", str(tmp_path / "r"), *split, *arguments)
    assert done.exit_code == 2, done.output
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors


def test_without_data_it_is_the_demo_unless_an_arch_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipes.build(PretrainRecipe, resolve("imagenet", None, None, None, {}, {}), "test")
    assert (recipe.backbone.arch, recipe.data.source, recipe.demo) == ("nano/8", "demo:objects", True)
    with pytest.raises(DpnError, match=r"no images to train B/16 on: neither \$DPN_DATA_DIR/imagenet nor ./imagenet"):
        resolve("imagenet", None, None, None, {"backbone": {"arch": "B/16"}}, {})
    asked = {"backbone": {"arch": "mu/8"}, "data": {"source": "demo"}}
    assert resolve("imagenet", None, None, None, asked, {})["backbone"]["arch"] == "mu/8"


def test_batches_are_divided_or_refused_never_rounded() -> None:
    recipe = built("S/16", batch_size=100)
    with pytest.raises(DpnError, match="--batch-size 100: not divisible by the 3 ranks; use 99"):
        check_batch(recipe, World(0, 3, torch.device("cpu")))
    micro = built("S/16", batch_size=96, runtime={"micro_batch_size": 20})
    with pytest.raises(DpnError, match=r"20: does not divide the 48 images of a rank \(--batch-size 96 over 2 ranks\)"):
        check_batch(micro, World(0, 2, torch.device("cpu")))
    check_batch(built("S/16", batch_size=96, runtime={"micro_batch_size": 16}), World(0, 2, torch.device("cpu")))


def test_the_first_loss_is_the_papers() -> None:
    recipe = built("S/32").model_copy(update={"backbone": built("S/32").backbone.model_copy(update={"arch": "mu/8"})})
    model = load_network(recipe, 1000)
    target = nn.functional.one_hot(torch.arange(4), 1000).float()
    loss = sigmoid_xent(model(torch.randn(4, 3, 224, 224)), target)
    assert loss.item() == pytest.approx(7.907, abs=1e-3)  # of big_vision with a head bias of -6.9


def test_dropout_is_where_big_vision_has_it_and_drop_path_does_not_rescale() -> None:
    model = load_backbone("nano/8", image_size=32, dropout=0.25, drop_path=0.5, drop_path_rescale=False)
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    # After the position embedding, the attention's output, GELU and the MLP's output; not on attention weights.
    on = {name for name, rate in rates.items() if rate}
    blocks = ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    assert on == {"pos_drop", *(f"blocks.{i}.{part}" for i, part in itertools.product(range(4), blocks))}
    assert set(rates.values()) == {0.0, 0.25}
    for rescale, kept in ((False, 1.0), (True, 2.0)):
        model = load_backbone("nano/8", image_size=32, drop_path=0.5, drop_path_rescale=rescale)
        model.train()
        assert isinstance(model.blocks[0].drop_path1, nn.Identity)  # the first of the ramp 0 ... 0.5
        torch.manual_seed(0)
        dropped = model.blocks[3].drop_path1(torch.ones(200, 2, 3))
        assert set(dropped.unique().tolist()) == {0.0, kept}
        assert (dropped == dropped[:, :1, :1]).all()  # whole examples


def reference_step(
    parameters: dict[str, Tensor], gradients: dict[str, Tensor], moments: dict[str, list[Tensor]], step: int, total: int
) -> None:
    """big_vision's chain in float64: clip, Adam, times lr, plus decay, times schedule (optax.py make)."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    warm = min(1.0, step / 3)
    factor = warm * 0.5 * (1 + math.cos(math.pi * max(0, (step - 3) / (total - 3))))
    for name, gradient in gradients.items():
        g = gradient / max(norm, 1.0)
        first, second = moments.setdefault(name, [torch.zeros_like(g), torch.zeros_like(g)])
        first.mul_(0.9).add_(0.1 * g)
        second.mul_(0.999).add_(0.001 * g * g)
        adam = (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        decay = 1e-4 if name.endswith("weight") and gradient.ndim > 1 else 0.0
        parameters[name] -= factor * (1e-3 * adam + decay * parameters[name])


def test_twenty_four_steps_follow_the_reference_chain() -> None:
    recipe = built("S/16", schedule={"steps": 24, "warmup": 3})
    model = load_backbone("mu/8", stem="none", image_size=32, num_classes=10, pre_logits=True, seed=1)
    model.double()  # but for the stem, which projects in float32
    twin, moments = copy.deepcopy(model), dict[str, list[Tensor]]()
    g = torch.Generator().manual_seed(0)
    images = torch.randn(24, 8, 3, 32, 32, generator=g, dtype=torch.float64)
    labels = nn.functional.one_hot(torch.randint(10, (24, 8), generator=g), 10).double()

    def batches(start: int) -> Iterator[engine.Batch]:
        for step in range(start, 24):
            yield {"image": images[step], "label": labels[step]}

    def loss(network: nn.Module, batch: engine.Batch) -> Tensor:
        return sigmoid_xent(network(batch["image"]), batch["label"])

    setup = engine.Training(recipe.optim, recipe.schedule, recipe.lr, 8, 0)
    engine.fit(model, loss, batches, None, setup, Runtime(), ALONE, engine.Outputs(), MicroBatch(4))
    weights = {name: value.detach() for name, value in twin.named_parameters()}
    twin.train()
    for step in range(24):
        twin.zero_grad()
        loss(twin, {"image": images[step], "label": labels[step]}).backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in twin.named_parameters() if value.grad is not None}
        with torch.no_grad():
            reference_step(weights, gradients, moments, step, 24)
    for name, value in model.named_parameters():
        mine, theirs = value.detach(), weights[name]
        if name.endswith("qkv.bias"):  # the keys' gradient is zero, and Adam normalises its noise
            mine, theirs = (torch.cat([x[:32], x[64:]]) for x in (mine, theirs))
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0, msg=name)  # updates add up to 1e-2


def test_a_run_makes_a_checkpoint_that_says_what_it_is(photos: Path, tmp_path: Path) -> None:
    recipe = small(photos, fewshot=5, evaluate_every=6)
    result = train(recipe, tmp_path / "run")
    assert [record["step"] for record in result["curve"]] == [6, 12, 18, 24]
    assert all(0 <= record["fewshot_5"] <= 100 for record in result["curve"])
    assert result["curve"][-1]["fewshot_5"] > 60  # colours tell the classes apart
    assert (result["best_step"], result["minival_top1"]) == (24, result["curve"][-1]["accuracy"])
    facts = load_classifier(str(tmp_path / "run")).facts
    assert facts["parameters"] == result["parameters"]
    assert (facts["curve"], facts["data"]) == (result["curve"], result["data"])
    assert PretrainRecipe.model_validate(facts["recipe"]) == recipe
    assert facts["arch"] == "nano/8"
    model = load_backbone(checkpoint=str(tmp_path / "run" / "weights.safetensors"), image_size=None)
    assert (model.config.stem, model.config.image_size, model.config.pre_logits) == ("dpn", (32, 32), True)
    tuned = run(
        *("finetune", "highres", "--checkpoint", str(tmp_path / "run" / "weights.safetensors"), "--data", str(photos)),
        *("--val-fraction", "0.2", "--image-size", "32", "--steps", "2", "-b", "8", "-j", "0", "-q", "--json"),
        *("-o", str(tmp_path / "tuned")),
    )
    assert tuned.exit_code == 0, tuned.output
    assert json.loads(tuned.stdout)["arch"] == "nano/8"


def test_a_stopped_run_goes_on_to_the_same_weights(photos: Path, tmp_path: Path) -> None:
    whole = train(small(photos), tmp_path / "whole")

    recipe, seen = small(photos), 0
    evaluate = training.evaluate

    def stop(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "evaluate", stop)
        with pytest.raises(StoppedError):
            train(recipe, tmp_path / "cut")
    other = small(photos, backbone={"stem": "none"})
    with pytest.raises(DpnError, match=r"another recipe \(backbone.stem: dpn there, none now\)"):
        train(other, tmp_path / "cut", resume=True)
    resumed = train(recipe, tmp_path / "cut", resume=True)
    assert resumed["curve"] == whole["curve"]
    one, two = (load_classifier(str(tmp_path / name)).model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_too_few_images_for_a_probe_are_named_before_training(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--eval-fewshot 40: class class\d has \d+ training images to draw from"):
        train(small(photos, fewshot=40), tmp_path / "run")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    for split, each in (("train", 12), ("val", 4), ("test", 5)):
        pictures(root / split, classes=3, each=each)
    return root


def sweep(places: Path, stages: Sequence[Mapping[str, Any]]) -> PretrainRecipe:
    asked = recipes.merge(
        SMALL, {"backbone": {"arch": "nano/8"}, "data": {"source": str(places), "val_fraction": None}, "stages": stages}
    )
    asked.pop("schedule")
    asked.pop("lr")
    asked["backbone"].pop("dropout")
    return settle(recipes.build(PretrainRecipe, resolve("sun397", None, "none", None, asked, {}), "test"))


def test_appendix_f_searches_what_the_paper_says() -> None:
    flags = {"backbone": {"arch": "B/32"}, "data": {"source": "sun397"}}
    recipe = settle(recipes.build(PretrainRecipe, resolve("sun397", None, None, None, flags, {}), "test"))
    first, second, third = (list(cells(recipe, stage)) for stage in recipe.stages)
    assert {(c.lr, c.optim.weight_decay, c.backbone.dropout) for _, c in first} == set(
        itertools.product((1e-3, 3e-4, 1e-4), (0.03, 0.1), (0.0, 0.1))
    )
    assert {c.randaugment.layers for _, c in first} == {0}
    assert {(c.mixup, c.randaugment.magnitude) for _, c in second} == set(
        itertools.product((0.0, 0.2, 0.5), (0, 5, 10, 15))
    )
    assert [(name, c.epochs) for name, c in third] == [("only", 600)]
    assert in_steps(third[0][1], 76_128).schedule.steps == 44_606


def test_a_sweep_chooses_on_validation_and_scores_test_once(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[dict[str, Any]] = [
        {"epochs": 2, "grid": {"lr": [1e38, 3.5e-3, 1.5e-6]}},
        {"epochs": 1, "grid": {"mixup": [0, 0.5]}},
        {"epochs": 8},
    ]
    recipe, scored = sweep(places, stages), list[int]()
    evaluate = training.evaluate

    def watch(classifier: Any, split: Any, *arguments: Any) -> Any:
        scored.append(len(split.labels))
        return evaluate(classifier, split, *arguments)

    monkeypatch.setattr(training, "evaluate", watch)
    result = train(recipe, tmp_path / "sweep")
    assert result["images"] == {"train": 36, "minival": 12, "val": 15}
    assert scored.count(15) == 1
    assert result["stages"][0]["top1"]["lr=1e+38"] is None  # its loss is no number
    top1 = {name: value for name, value in result["stages"][0]["top1"].items() if value is not None}
    assert result["stages"][0]["chosen"] == max(top1, key=lambda name: top1[name])
    final = json.loads((tmp_path / "sweep" / "stage3" / "only" / "result.json").read_text())
    assert final["top1"] == result["top1"]
    chosen = load_classifier(str(tmp_path / "sweep" / "stage3" / "only")).facts["recipe"]
    assert set(result["stages"][0]["top1"]) == {"lr=1.5e-06", "lr=0.0035", "lr=1e+38"}
    assert f"lr={chosen['lr']:g}" == result["stages"][0]["chosen"] == "lr=0.0035"
    assert f"mixup={chosen['mixup']:g}" == result["stages"][1]["chosen"]
    assert load_classifier(str(tmp_path / "sweep" / result["weights"])).facts["minival_top1"] == final["minival_top1"]
    kept = [str(path.parent.name) for path in (tmp_path / "sweep").rglob("weights.safetensors")]
    assert kept == ["only"]
    assert "stage 1, 3 runs of 2 epochs" in command.describe(result)
    (tmp_path / "sweep" / "result.json").unlink()
    scored.clear()
    assert train(recipe, tmp_path / "sweep", resume=True)["top1"] == result["top1"]
    assert not [count for count in scored if count == 15]


def test_a_sweep_whose_runs_all_fail_says_so(places: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="stage 1: every run ended with a loss that is no number; lower lr"):
        train(sweep(places, [{"epochs": 2, "grid": {"lr": [1e38]}}, {"epochs": 1}]), tmp_path / "sweep")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"epochs": 1, "grid": {"lr": [1e-3, 1e-4]}}], "it is one training, not 2: empty its grid"),
        ([{"epochs": 1, "grid": {"lrr": [1e-3]}}, {"epochs": 1}], "lrr: unknown key; did you mean 'lr'"),
        ([{"epochs": 1, "grid": {"lr": [-1]}}, {"epochs": 1}], "lr: input should be greater than 0"),
        ([{"epochs": 1, "grid": {"lr": []}}, {"epochs": 1}], "stages.0.grid.lr: .* at least 1 item"),
        ([{"epochs": 1, "grid": {"lr": [0.5, 0.5]}}, {"epochs": 1}], "names a run twice"),
    ],
)
def test_wrong_stages_are_named_before_training(places: Path, stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DpnError, match=message):
        sweep(places, stages)


def test_a_sweep_needs_three_splits(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no val and no test images; a sweep chooses on val and reports test"):
        train(sweep(photos, [{"epochs": 1}]), tmp_path / "sweep")


def test_the_plan_counts_what_the_network_multiplies() -> None:
    recipe = built("S/16")
    flops, parameters = training_flops(recipe, 1000)
    size, tokens = SIZES["S"], 197
    block = tokens * (4 * size.width**2 + 2 * size.width * size.mlp)
    dense = size.depth * block + 196 * 768 * size.width + size.width**2 + size.width * 1000
    attention = size.depth * 2 * tokens**2 * size.width
    # Backward is twice forward; that of attention computes one of its two products again.
    assert flops == pytest.approx(2 * (3 * dense + 3.5 * attention), rel=1e-3)
    assert parameters == sum(p.numel() for p in load_network(recipe, 1000).parameters())
    result = estimate(recipe, 1_268_355, here=False, ranks=8)
    assert (result["steps"], result["images"]) == (92_897, 1_268_355)
    assert result["flops"] == flops * 4096 * 92_897
    seconds = result["hours_at_matrix_rate"] * 3600
    assert seconds == pytest.approx(result["flops"] / result["matrix_flops_per_second"] / 8)
    assert "92,897 steps of 4,096" in describe(result)


def test_the_plan_reads_packed_and_other_data(photos: Path) -> None:
    done = run("plan", "pretrain", "--arch", "Ti/16", "--data", str(photos), "--set", "data.val_fraction=0.5", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["images"] == 41
    assert result["steps"] == round(300 * 41 / 4096)


def test_the_demo_trains_a_tower(tmp_path: Path) -> None:
    done = run("pretrain", "--data", "demo", "--steps", "3", "-b", "8", "-j", "0", "-o", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert "nano/8 stem dpn at 64x64, 24 classes" in done.stdout
    assert "This is the demo" in done.stderr.replace("\n", " ")
    classes = load_classifier(str(tmp_path / "run")).classes
    assert classes[:2] == ("red circle", "red square")


def test_the_demo_tower_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def start(recipe: PretrainRecipe, output_dir: Path, **arguments: Any) -> dict[str, Any]:
        made.append(recipe.backbone.stem)
        output_dir.mkdir(parents=True)
        (output_dir / "weights.safetensors").write_text(recipe.backbone.stem)
        return {}

    monkeypatch.setattr(command, "start", start)
    monkeypatch.setenv("DPN_HOME", str(tmp_path))
    paths = [tower.demo_tower(stem, Console(quiet=True)) for stem in ("dpn", "none", "dpn")]
    assert made == ["dpn", "none"]
    assert [Path(path).read_text() for path in paths] == ["dpn", "none", "dpn"]
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"demo-dpn.safetensors", "demo-none.safetensors"}


def test_images_may_be_taken_whole(photos: Path) -> None:
    split = ClassFolders(photos)
    batch = next(crop_batches(split, Augmentation((24, 24), crop="whole"), 6, 3, ALONE, workers=0)(0))
    for place, row in enumerate(rows_of_step(90, 6, 3, 0).tolist()):
        plain = resize(split.pixels(row), (24, 24))
        assert any(np.array_equal(batch["image"][place], image) for image in (plain, plain.flip(-1)))


def test_a_recipe_reaches_the_network_the_images_and_the_labels(
    photos: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str], Arrays]
) -> None:
    recipe = small(photos, mixup=0.2)
    assert training.augmentation_of(recipe, (32, 32)) == Augmentation((32, 32), "exact", 0.2, 2, 15, "inception")
    model = load_network(recipe, 6)
    config = model.config
    assert (config.dropout, config.drop_path, config.drop_path_rescale, config.pre_logits) == (0.1, 0.2, False, True)
    # Mixup of images and labels, against big_vision's.
    arrays = golden("mixup")
    seen: dict[str, Tensor] = {}
    monkeypatch.setitem(LOSSES, "softmax", lambda logits, target: seen.update(target=target) or logits.sum())
    images = torch.from_numpy((arrays["images"] * 50).clip(0, 255)).permute(0, 3, 1, 2).byte()
    labels = torch.arange(5) % 6
    batch = {"image": images, "label": labels, "other_image": images.roll(1, 0), "other_label": labels.roll(1, 0)}
    share = float(arrays["p0.2/a"])

    def network(image: Tensor) -> Tensor:
        seen["image"] = image
        return torch.zeros(5, 6, requires_grad=True)

    training.loss_of(recipe, model, 6)(network, {**batch, "mix": torch.full((5,), share)})  # type: ignore[arg-type]
    one, other = model.normalize(images), model.normalize(images).roll(1, 0)
    torch.testing.assert_close(seen["image"], share * one + (1 - share) * other)
    hot = nn.functional.one_hot(labels, 6).float()
    torch.testing.assert_close(seen["target"], share * hot + (1 - share) * hot.roll(1, 0))
    theirs = torch.from_numpy(arrays["labels"])
    torch.testing.assert_close(
        share * theirs + (1 - share) * theirs.roll(1, 0), torch.from_numpy(arrays["p0.2/labels"]), atol=1e-6, rtol=0
    )


def test_every_step_augments_anew(photos: Path) -> None:
    split, augmentation = ClassFolders(photos), Augmentation((24, 24), layers=2, magnitude=9, crop="whole")
    stream = crop_batches(Part(split, [0]), augmentation, 4, 0, ALONE, workers=0)(0)
    pictures_seen = {image.numpy().tobytes() for _ in range(6) for image in next(stream)["image"]}
    assert len(pictures_seen) > 15


def test_the_probe_is_tested_on_minival(tmp_path: Path) -> None:
    # Classes that only the training images have in their colour: what is learnt from them is wrong on minival.
    root = pictures(tmp_path / "photos", classes=2, each=30)
    recipe = small(root, fewshot=5)
    data = open_data(recipe)
    flipped = Part(data.minival, range(len(data.minival.labels)))
    flipped.labels = [1 - label for label in flipped.labels]
    folder = RunFolder(tmp_path)
    scores = []
    for minival in (data.minival, flipped):
        now = dataclasses.replace(data, minival=minival)
        trained = training._Training(recipe, now, {}, "pretrain", folder, ALONE, Console(quiet=True))
        scores.append(trained.fewshot(5))
    assert scores[0] > 90
    assert scores[1] == pytest.approx(100 - scores[0])


def test_appendix_f_is_what_its_recipe_says() -> None:
    recipe = recipes.build(
        PretrainRecipe,
        resolve("sun397", None, None, None, {"backbone": {"arch": "B/32"}, "data": {"source": "sun397"}}, {}),
        "test",
    )
    assert (recipe.optim.decay_unit, recipe.optim.clip_norm, recipe.optim.name) == ("lr", 1.0, "adam")
    assert (recipe.head_bias, recipe.loss, recipe.batch_size) == (-6.0, "sigmoid", 1024)
    assert recipe.backbone.pre_logits
    assert (recipe.schedule.warmup, recipe.schedule.steps) == (4460, 44606)


def test_recipes_that_dpn_wrote_can_be_given_back_and_flags_win(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    whole = built("S/16")
    path.write_text(recipes.dump(whole))
    again = recipes.build(PretrainRecipe, resolve("imagenet", None, None, str(path), {}, {}), "test")
    assert again == whole
    shorter = recipes.build(
        PretrainRecipe, resolve("imagenet", None, None, str(path), {"schedule": {"steps": 929}}, {}), "test"
    )
    assert (shorter.epochs, shorter.schedule.steps, shorter.schedule.warmup) == (None, 929, 100)
    path.write_text("epochs: 9\nmixup: 0.9\nbatch_size: 64\nbackbone: {arch: S/16}\ndata: {source: x}\n")
    strong = recipes.build(PretrainRecipe, resolve("imagenet", "short", "strong2", str(path), {}, {}), "test")
    assert (strong.mixup, strong.batch_size, strong.epochs) == (0.8, 1024, 90)


def test_a_signal_during_the_last_evaluation_loses_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(photos, schedule={"steps": 4}, runtime={"checkpoint_every": 500})
    whole = train(recipe, tmp_path / "whole")
    monkeypatch.setattr(training, "evaluate", stopping_evaluation := Stopping(training.evaluate, at=4))
    with pytest.raises(StoppedError):
        train(recipe, tmp_path / "cut")
    assert stopping_evaluation.seen == 4
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "backward", None)  # nothing is left to train
        resumed = train(recipe, tmp_path / "cut", resume=True)
    assert resumed["curve"] == whole["curve"]
    assert resumed["top1"] == whole["top1"]


class Stopping:
    """An evaluation during which a signal comes at the given call."""

    def __init__(self, evaluate: Any, at: int) -> None:
        self.evaluate, self.at, self.seen = evaluate, at, 0

    def __call__(self, *arguments: Any) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise StoppedError(signal.SIGTERM)
        return self.evaluate(*arguments)
