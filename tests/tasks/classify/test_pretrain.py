"""`dpn pretrain`: Appendix C's config and numbers, whole runs on small images, the stages of a sweep, the plan."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources import synthetic
from dpn_cli.data.sources.base import ImageSubset
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine import fit as engine
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.losses import LOSSES, sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.run.run_dir import RunFolder
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.goldens import Arrays
from support.images import write_class_folders
from support.pretrain import pretrain_config, small_pretrain_config, train_pretrain
from tasks.classify import demo_weights
from tasks.classify import pretrain as command
from tasks.classify import train as training
from tasks.classify.classifier import load_classifier
from tasks.classify.data import open_data
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve
from tasks.classify.train import load_network
from tasks.classify.training_batches import augmentation_of

ALONE = World(0, 1, torch.device("cpu"))


def test_the_first_loss_is_the_papers() -> None:
    config = pretrain_config("S/32").model_copy(
        update={"backbone": pretrain_config("S/32").backbone.model_copy(update={"arch": "mu/8"})}
    )
    model = load_network(config, 1000)
    target = nn.functional.one_hot(torch.arange(4), 1000).float()
    loss = sigmoid_xent(model(torch.randn(4, 3, 224, 224)), target)
    assert loss.item() == pytest.approx(7.907, abs=1e-3)  # of big_vision with a head bias of -6.9


@pytest.mark.parametrize(("classes", "bias"), [(2, -0.7), (10, -2.3), (397, -6.0), (1000, -6.9), (21_843, -10.0)])
def test_the_heads_bias_follows_the_number_of_classes(classes: int, bias: float) -> None:
    small_arch = {"backbone": {"arch": "mu/8", "image_size": 32}, "data": {"source": "imagenet"}}
    for asked, expected in (({}, bias), ({"loss": "softmax"}, 0.0), ({"head_bias": 1.5}, 1.5)):
        plain = resolve("imagenet", None, "none", None, merge(small_arch, asked), {})
        model = load_network(finalize(build(PretrainConfig, plain, "test")), classes)
        assert model.get_parameter("head.bias").unique().tolist() == [pytest.approx(expected)]


def test_dropout_is_placed_like_big_visions_and_drop_path_does_not_rescale() -> None:
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
    config = pretrain_config("S/16", schedule={"steps": 24, "warmup": 3})
    model = load_backbone("mu/8", stem="none", image_size=32, num_classes=10, pre_logits=True, seed=1)
    model.double()  # but for the stem, which projects in float32
    twin, moments = copy.deepcopy(model), dict[str, list[Tensor]]()
    g = torch.Generator().manual_seed(0)
    images = torch.randn(24, 8, 3, 32, 32, generator=g, dtype=torch.float64)
    labels = nn.functional.one_hot(torch.randint(10, (24, 8), generator=g), 10).double()

    def batches(start: int) -> Generator[engine.Batch, None, None]:
        for step in range(start, 24):
            yield {"image": images[step], "label": labels[step]}

    def loss(network: nn.Module, batch: engine.Batch) -> Tensor:
        return sigmoid_xent(network(batch["image"]), batch["label"])

    job = engine.TrainJob(
        loss_fn=loss,
        batches=batches,
        optim=config.optim,
        schedule=config.schedule,
        lr=config.lr,
        batch_size=8,
        seed=0,
        world=ALONE,
        micro_batch=MicroBatch(4),
    )
    engine.fit(model, job)
    weights = {name: value.detach() for name, value in twin.named_parameters()}
    twin.train()
    for step in range(24):
        twin.zero_grad()
        loss(twin, {"image": images[step], "label": labels[step]}).backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in twin.named_parameters() if value.grad is not None}
        with torch.no_grad():
            reference_step(weights, gradients, moments, step, 24)
    for name, value in model.named_parameters():
        mine, expected = value.detach(), weights[name]
        if name.endswith("qkv.bias"):  # the keys' gradient is zero, and Adam normalises its noise
            mine, expected = (torch.cat([x[:32], x[64:]]) for x in (mine, expected))
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=0, msg=name)  # updates add up to 1e-2


def test_a_run_writes_a_checkpoint_with_its_description(photos: Path, tmp_path: Path) -> None:
    config = small_pretrain_config(photos, fewshot=5, evaluate_every=6)
    result = train_pretrain(config, tmp_path / "run")
    assert [record["step"] for record in result["curve"]] == [6, 12, 18, 24]
    assert all(0 <= record["fewshot_5"] <= 100 for record in result["curve"])
    assert result["curve"][-1]["fewshot_5"] > 60  # colours tell the classes apart
    assert (result["best_step"], result["minival_top1"]) == (24, result["curve"][-1]["accuracy"])
    facts = load_classifier(str(tmp_path / "run")).facts
    assert facts["parameters"] == result["parameters"]
    assert (facts["curve"], facts["data"]) == (result["curve"], result["data"])
    resolved = config.model_copy(update={"backbone": config.backbone.model_copy(update={"stem": "dpn"})})
    assert PretrainConfig.model_validate(facts["config"]) == resolved
    assert facts["arch"] == "nano/8"
    model = load_backbone(checkpoint=str(tmp_path / "run" / "weights.safetensors"), image_size=None)
    assert (model.config.stem, model.config.image_size, model.config.pre_logits) == ("dpn", (32, 32), True)
    tuned = run_dpn(
        *("finetune", "highres", "--checkpoint", str(tmp_path / "run" / "weights.safetensors"), "--data", str(photos)),
        *("--val-fraction", "0.2", "--image-size", "32", "--steps", "2", "-b", "8", "-j", "0", "-q", "--json"),
        *("-o", str(tmp_path / "tuned")),
    )
    assert tuned.exit_code == 0, tuned.output
    assert json.loads(tuned.stdout)["arch"] == "nano/8"


def test_a_stopped_run_continues_to_the_same_weights(photos: Path, tmp_path: Path) -> None:
    full = train_pretrain(small_pretrain_config(photos), tmp_path / "whole")

    config, observed = small_pretrain_config(photos), 0
    evaluate = training.evaluate

    def stop(*arguments: Any, **options: Any) -> Any:
        nonlocal observed
        observed += 1
        if observed == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "evaluate", stop)
        with pytest.raises(StoppedError):
            train_pretrain(config, tmp_path / "cut")
    other = small_pretrain_config(photos, backbone={"stem": "none"})
    with pytest.raises(DpnError, match=r"a different config \(backbone.stem: dpn there, none now\)"):
        train_pretrain(other, tmp_path / "cut", resume=True)
    resumed = train_pretrain(config, tmp_path / "cut", resume=True)
    assert resumed["curve"] == full["curve"]
    one, two = (load_classifier(str(tmp_path / name)).model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_too_few_images_for_a_probe_are_named_before_training(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--eval-fewshot 40: class class\d has \d+ training images to draw from"):
        train_pretrain(small_pretrain_config(photos, fewshot=40), tmp_path / "run")


def test_the_demo_trains_a_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, splits = synthetic.DEMO_SPLITS["demo:objects"]
    fewer = {name: (start, start + 100) for name, (start, _) in splits.items()}
    monkeypatch.setitem(synthetic.DEMO_SPLITS, "demo:objects", (task, fewer))
    result = run_dpn("pretrain", "--data", "demo", "--steps", "3", "-b", "8", "-j", "0", "-o", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "nano/8 stem dpn at 64x64, 24 classes" in result.stdout
    assert "This is the demo" in result.stderr.replace("\n", " ")
    classes = load_classifier(str(tmp_path / "run")).classes
    assert classes[:2] == ("red circle", "red square")


def test_the_demo_tower_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def trained(config: PretrainConfig, launch: LaunchOptions, console: Console) -> dict[str, Any]:
        made.append(str(config.backbone.stem))
        assert launch.folder
        launch.folder.mkdir(parents=True)
        (launch.folder / "weights.safetensors").write_text(made[-1])
        return {}

    monkeypatch.setattr(command, "run", trained)
    monkeypatch.setenv("DPN_HOME", str(tmp_path))
    paths = [demo_weights.demo_backbone(stem, Console(quiet=True)) for stem in ("dpn", "none", "dpn")]
    assert made == ["dpn", "none"]
    assert [Path(path).read_text() for path in paths] == ["dpn", "none", "dpn"]
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"demo-dpn.safetensors", "demo-none.safetensors"}


def test_a_dry_run_makes_no_demo_tower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path))
    for stem in ("dpn", "none"):
        model = load_backbone(
            checkpoint=demo_weights.demo_backbone(stem, Console(quiet=True), trained=False), stem=None
        )
        assert (model.config.arch, model.config.stem) == ("nano/8", stem)
    assert not list(tmp_path.iterdir())


def test_images_may_be_taken_whole(photos: Path) -> None:
    split = ClassFolders(photos)
    batch = next(crop_batches(split, Augmentation((24, 24), crop="whole"), 6, 3, ALONE, workers=0)(0))
    for place, row in enumerate(rows_of_step(90, 6, 3, 0).tolist()):
        plain = resize(split.pixels(row), (24, 24))
        assert any(np.array_equal(batch["image"][place], image) for image in (plain, plain.flip(-1)))


def test_a_config_reaches_the_network_the_images_and_the_labels(
    photos: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str], Arrays]
) -> None:
    config = small_pretrain_config(photos, mixup=0.2)
    model = load_network(config, 6)
    assert augmentation_of(config, model) == Augmentation((32, 32), "exact", 0.2, 2, 15, "inception")
    vit_config = model.config
    assert (vit_config.dropout, vit_config.drop_path, vit_config.drop_path_rescale, vit_config.pre_logits) == (
        0.1,
        0.2,
        False,
        True,
    )
    # Mixup of images and labels, against big_vision's.
    arrays = golden("mixup")
    observed: dict[str, Tensor] = {}
    monkeypatch.setitem(LOSSES, "softmax", lambda logits, target: observed.update(target=target) or logits.sum())
    images = torch.from_numpy((arrays["images"] * 50).clip(0, 255)).permute(0, 3, 1, 2).byte()
    labels = torch.arange(5) % 6
    batch = {"image": images, "label": labels, "other_image": images.roll(1, 0), "other_label": labels.roll(1, 0)}
    share = float(arrays["p0.2/a"])

    def network(image: Tensor) -> Tensor:
        observed["image"] = image
        return torch.zeros(5, 6, requires_grad=True)

    training.loss_of(config, model, 6)(network, {**batch, "mix": torch.full((5,), share)})  # type: ignore[arg-type]
    one, other = model.normalize(images), model.normalize(images).roll(1, 0)
    torch.testing.assert_close(observed["image"], share * one + (1 - share) * other)
    hot = nn.functional.one_hot(labels, 6).float()
    torch.testing.assert_close(observed["target"], share * hot + (1 - share) * hot.roll(1, 0))
    expected = torch.from_numpy(arrays["labels"])
    torch.testing.assert_close(
        share * expected + (1 - share) * expected.roll(1, 0), torch.from_numpy(arrays["p0.2/labels"]), atol=1e-6, rtol=0
    )


def test_every_step_augments_anew(photos: Path) -> None:
    split, augmentation = ClassFolders(photos), Augmentation((24, 24), layers=2, magnitude=9, crop="whole")
    stream = crop_batches(ImageSubset(split, [0]), augmentation, 4, 0, ALONE, workers=0)(0)
    images_seen = {image.numpy().tobytes() for _ in range(6) for image in next(stream)["image"]}
    assert len(images_seen) > 15


def test_the_probe_is_tested_on_minival(tmp_path: Path) -> None:
    # Classes that only the training images have in their colour: what is learnt from them is wrong on minival.
    root = write_class_folders(tmp_path / "photos", classes=2, each=30)
    config = small_pretrain_config(root, fewshot=5)
    data = open_data(config)
    flipped = ImageSubset(data.minival, range(len(data.minival.labels)))
    flipped.labels = [1 - label for label in flipped.labels]
    folder = RunFolder(tmp_path)
    scores = []
    for minival in (data.minival, flipped):
        current = dataclasses.replace(data, minival=minival)
        trained = training._ClassifierTraining(Run(config, folder, ALONE, Console(quiet=True)), current, {})
        scores.append(trained.fewshot(5))
    assert scores[0] > 90
    assert scores[1] == pytest.approx(100 - scores[0])


def test_a_signal_during_the_last_evaluation_loses_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_pretrain_config(photos, schedule={"steps": 4}, runtime={"checkpoint_every": 500})
    full = train_pretrain(config, tmp_path / "whole")
    monkeypatch.setattr(training, "evaluate", stopping_evaluation := Stopping(training.evaluate, at=4))
    with pytest.raises(StoppedError):
        train_pretrain(config, tmp_path / "cut")
    assert stopping_evaluation.seen == 4
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "compute", None)  # nothing is left to train
        resumed = train_pretrain(config, tmp_path / "cut", resume=True)
    assert resumed["curve"] == full["curve"]
    assert resumed["top1"] == full["top1"]


class Stopping:
    """An evaluation during which a signal comes at the given call."""

    def __init__(self, evaluate: Any, at: int) -> None:
        self.evaluate, self.at, self.seen = evaluate, at, 0

    def __call__(self, *arguments: Any, **mode: Any) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise StoppedError(signal.SIGTERM)
        return self.evaluate(*arguments, **mode)
