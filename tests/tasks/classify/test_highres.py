"""`finetune highres` and what follows it, on small images: train, stop, resume, eval, predict, export."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.optim import param_groups_layer_decay
from torch import nn

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build
from dpn_cli.config.schema import Optim
from dpn_cli.engine.optim import build_optimizer, set_lr
from dpn_cli.engine.state import Ema
from dpn_cli.errors import DpnError, StoppedError
from dpn_cli.metrics import Confusion
from dpn_cli.model.freeze import freeze
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.goldens import GOLDENS
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from tasks.classify import highres as command
from tasks.classify.classifier import Classifier, resize_for, save_classifier
from tasks.classify.config import resolve_steps
from tasks.classify.evaluate import match_classes, real_accuracy
from tasks.classify.highres_config import HighresConfig, resolve
from tasks.classify.predictions_file import per_class, worst_pairs


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("photos"), classes=3, each=30)


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("run") / "run"
    return path, train_highres(highres_config(photos), path)


def test_the_config_is_the_papers() -> None:
    plain = resolve(None, {"data": {"source": "imagenet"}, "backbone": {"arch": "B/32", "checkpoint": "x"}}, {})
    built = build(HighresConfig, plain, "test")
    optim, schedule = built.optim, built.schedule
    assert (schedule.steps, schedule.warmup, schedule.decay, built.batch_size, built.lr) == (
        5000,
        500,
        "cosine",
        512,
        0.03,
    )
    assert (optim.name, optim.momentum, optim.clip_norm, optim.weight_decay) == ("momentum", 0.9, 1.0, 0.0)
    assert (built.loss, built.mixup, built.ema, built.freeze, optim.layer_decay) == ("sigmoid", 0, None, (), 1)
    assert (built.backbone.image_size, built.backbone.drop_path, built.evaluate_every) == (384, 0, 2500)
    assert (resize_for((384, 384)), resize_for((224, 224))) == (418, 256)


def test_a_duration_brings_its_warmup_along() -> None:
    built = build(HighresConfig, resolve("highres", {"schedule": {"steps": 200}, "data": {"source": "x"}}, {}), "test")
    assert built.schedule.warmup == 20
    epochs = built.model_copy(update={"epochs": 8.0, "batch_size": 64})
    assert (resolve_steps(epochs, 1000).schedule.steps, resolve_steps(epochs, 1000).schedule.warmup) == (125, 12)
    imagenet = built.model_copy(update={"epochs": 300.0, "batch_size": 4096})
    assert resolve_steps(imagenet, 1_268_355).schedule.steps == 92_897  # the paper's 93000
    with pytest.raises(DpnError, match="--steps 5 and --epochs 2: give one of them"):
        resolve(None, {"schedule": {"steps": 5}, "epochs": 2}, {})


def test_images_are_learned_and_the_result_is_described(finished: tuple[Path, dict[str, Any]]) -> None:
    path, result = finished
    assert result["top1"] > 80  # chance is 33
    assert result["images"] == {"train": 65, "minival": 7, "val": 18}
    assert (result["classes"], result["steps"], result["image_size"]) == (3, 40, [32, 32])
    assert 1 <= result["best_step"] <= 40
    assert json.loads((path / "result.json").read_text()) == result
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    assert not (path / "checkpoints").exists()


@pytest.mark.parametrize("extra", [{}, {"ema": 0.9, "mixup": 0.2, "optim": {"layer_decay": 0.8}}])
def test_a_stopped_run_ends_with_the_weights_of_an_unbroken_one(
    extra: dict[str, Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without minival it is the last step's weights that are kept, not some from before the stop.
    config = highres_config(photos, schedule={"steps": 24}, data={"minival": 0.0}, **extra)
    train_highres(config, tmp_path / "whole")
    calls = iter(range(1000))
    monkeypatch.setattr(signals, "requested_signal", lambda: signal.SIGTERM if next(calls) == 13 else None)
    with pytest.raises(StoppedError):
        train_highres(config, tmp_path / "broken")
    assert json.loads((tmp_path / "broken" / "run.json").read_text())["status"] == "stopped"
    monkeypatch.undo()
    second = config.model_copy(update={"runtime": config.runtime.model_copy(update={"workers": 1})})
    train_highres(second, tmp_path / "broken", resume=True)
    full, broken = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in full.items())


def test_a_class_that_appears_between_run_and_resume_is_refused(photos: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    config = highres_config(data, schedule={"steps": 4})
    train_highres(config, tmp_path / "run")
    for name in ("result.json", "weights.safetensors"):
        (tmp_path / "run" / name).unlink()
    shutil.copytree(data / "class0", data / "new")
    with pytest.raises(DpnError, match=r"4 classes now, 3 others when this run started \(gone: none; new: new\)"):
        train_highres(config, tmp_path / "run", resume=True)
    shutil.rmtree(data / "new")
    (data / "class0" / "000.jpg").unlink()
    with pytest.raises(DpnError, match="the images have changed since this run started"):
        train_highres(config, tmp_path / "run", resume=True)


def test_the_commands_after_a_run_work(finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path: Path) -> None:
    path, _ = finished
    everything = ("--data", str(photos), "--split", "all", "--json", "-q")
    scored = run_dpn("eval", str(path), "-o", str(tmp_path / "report"), *everything)
    report = json.loads(scored.stdout)
    assert report["images"] == 90
    assert report["top1"] > 80
    assert json.loads((tmp_path / "report" / "result.json").read_text()) == report
    rows = list(csv.DictReader((tmp_path / "report" / "per_class.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == ["class0", "class1", "class2"]
    assert sum(int(row["right"]) for row in rows) == round(report["top1"] * 0.9)
    answers = list(csv.DictReader((tmp_path / "report" / "predictions.csv").read_text().splitlines()))
    assert [int(answer["row"]) for answer in answers] == list(range(90))
    assert all(Path(answer["image"]).parent.name == answer["true"] for answer in answers)
    invalid = {answer["row"] for answer in answers if answer["true"] != answer["predicted"]}
    assert {file.stem for file in (tmp_path / "report" / "mistakes").glob("*.jpg")} == invalid
    result = run_dpn("report", str(tmp_path / "report"), "-o", str(tmp_path / "page"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page" / "report.html").read_text().count("<img ") == len(invalid)
    predicted = run_dpn("predict", str(path), str(photos / "class1"), "--top", "2", "--json")
    predictions = json.loads(predicted.stdout)
    assert len(predictions) == 30
    assert sum(prediction["classes"][0]["class"] == "class1" for prediction in predictions) == int(rows[1]["right"])
    assert all(0 <= entry["probability"] <= 1 for prediction in predictions for entry in prediction["classes"])
    completed = run_dpn("predict", str(path), str(photos / "class1" / "000.jpg"))
    assert "class1" in completed.stdout
    text = run_dpn("eval", str(path), "--data", str(photos), "-q").stdout
    assert "top-1" in text
    probed = run_dpn("eval", "fewshot", str(path / "weights.safetensors"), "--data", str(photos), "--val-fraction",
                     "0.5", "--shots", "1,5", "--json", "-q")  # fmt: skip
    assert json.loads(probed.stdout)["accuracy"]["5"]["n"] == 3


def test_an_exported_plain_network_loads_in_timm(tmp_path: Path) -> None:
    model = load_backbone("mu/8", stem="none", image_size=32, num_classes=3)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    save_classifier(Classifier(model, ("a", "b", "c"), "softmax", 37, {}), tmp_path / "weights.safetensors")
    theirs: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3,
        act_layer="gelu_tanh", no_embed_class=True,
    ).eval()  # fmt: skip
    theirs.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(image), model.eval()(image), atol=1e-5, rtol=1e-5)


def test_layer_decay_is_timms() -> None:
    model = load_backbone("mu/8", image_size=16, num_classes=2, stem="none")
    optimizer = build_optimizer(model.named_parameters(), Optim(name="adam", layer_decay=0.7), 1.0)
    set_lr(optimizer, 0.5)
    actual = {id(p): group["lr"] / 0.5 for group in optimizer.param_groups for p in group["params"]}
    groups = param_groups_layer_decay(model, 0.0, layer_decay=0.7)
    expected = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    # timm counts the final norm to the last block; BEiT and MAE, whose rule this is, to the head.
    expected |= {id(p): 1.0 for p in model.norm.parameters()}
    assert actual == pytest.approx(expected)


def test_the_average_of_the_weights_follows_its_rule() -> None:
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    average, expected = Ema(network, 0.5), 0.0
    for step in range(8):
        nn.init.constant_(network.weight, step + 1.0)
        average.update(network, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (step + 1)
    with average.applied(network):
        assert network.weight.item() == pytest.approx(expected)
    assert network.weight.item() == 8


@pytest.mark.parametrize(
    ("parts", "trained"),
    [
        (("backbone",), {"head"}),
        (("stem", "positions"), {"blocks", "norm", "head"}),
        (("blocks:0",), {"patch_embed", "pos_embed", "cls_token", "norm", "head"}),
    ],
)
def test_frozen_parts_stay_as_they_are(parts: tuple[str, ...], trained: set[str]) -> None:
    model = load_backbone("mu/8", image_size=16, num_classes=2)
    frozen = freeze(model, parts)
    left = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert left == trained
    assert frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    ("parts", "message"),
    [(("stm",), "choose from stem"), (("blocks:0-5",), "blocks 0 to 0"), (("backbone", "blocks"), "nothing is left")],
)
def test_wrong_parts_to_freeze_are_named(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(DpnError, match=message):
        freeze(load_backbone("mu/8", image_size=16, num_classes=0 if "backbone" in parts else 2), parts)


def test_classes_are_matched_by_name_or_number() -> None:
    assert match_classes(["a", "b"], ["a", "b"]) is None
    columns = match_classes(["a", "b", "c"], ["c", "a"])
    assert columns is not None
    assert columns.tolist() == [2, 0]
    numbers = match_classes(["n01", "n02", "n03"], ["0", "2"])  # ImageNet-V2's folders
    assert numbers is not None
    assert numbers.tolist() == [0, 2]
    with pytest.raises(DpnError, match="does not know: dog; it knows 2, a, b"):
        match_classes(["a", "b"], ["a", "dog"])


def test_confusions_and_real_labels_are_counted() -> None:
    confusion = Confusion(3, {0: 8, 1: 2, 3: 5, 4: 5})
    assert worst_pairs(confusion) == [(1, 0, 5, 0.5), (0, 1, 2, pytest.approx(0.2))]
    assert per_class(["a", "b", "c"], confusion).splitlines()[1:] == [
        "a,a,10,8,80.00,61.54",
        "b,b,10,5,50.00,71.43",
        "c,c,0,0,,",
    ]
    assert real_accuracy([1, 2, 3, 4], [[1, 7], [9], [], [4]]) == {"top1": pytest.approx(200 / 3), "images": 3}


WRONG: list[tuple[list[str], int, str]] = [
    (["finetune", "highres", "--data", "nowhere", "--checkpoint", "none", "--arch", "mu/8"], 3, "no such folder"),
    (["finetune", "highres", "--data", "DATA", "--arch", "B/32"], 2, "no weights were given. Ways out"),
    (["finetune", "highres", "--data", "DATA", "--checkpoint", "none", "--arch", "mu/9"], 2, "nearest size that fits"),
    (["finetune", "highres", "--data", "DATA", "--checkpoint", "none", "--arch", "mu/8"], 3, "no validation images"),
    (["finetune", "highres", "--steps", "5", "--epochs", "1"], 2, "give one of them"),
    (["finetune", "highres", "--decode", "slow"], 2, "--decode: one of exact, fast, pillow"),
    (["finetune", "highres", "--data", "demo", "--freeze", "nose"], 2, "choose from stem"),
    (["eval", "nowhere", "--data", "DATA"], 3, "no such file"),
    (["eval", str(GOLDENS / "vit_dpn.params.npz"), "--data", "DATA"], 3, "does not know: class0"),
    (["eval", "fewshot", "none", "--data", "DATA"], 2, "--arch is needed"),
    (["eval", "fewshot", str(GOLDENS / "vit_dpn.params.npz"), "--data", "DATA"], 3, "no images to test on"),
    (
        ["eval", "fewshot", str(GOLDENS / "vit_dpn.params.npz"), "--data", "DATA", "--val-fraction", "0.5"],
        3,
        "--shots 25",
    ),
    (["predict", str(GOLDENS / "vit_dpn.params.npz"), "nowhere.jpg"], 3, "no such image"),
    (["predict", str(GOLDENS / "vit_dpn.params.npz"), "."], 3, "no image in this folder"),
    (["export", str(GOLDENS / "vit_dpn.params.npz"), "--to", "tflite"], 2, "--to: one of safetensors, pt2, onnx"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_wrong_commands_end_with_one_line(
    arguments: list[str], code: int, message: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = [] if arguments[0] in ("predict", "export") else ["-q"]
    result = run_dpn(*(str(photos) if word == "DATA" else word for word in arguments), *quiet)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_head_of_other_classes_is_replaced_and_reported(photos: Path, tmp_path: Path) -> None:
    config = highres_config(
        photos,
        backbone={"arch": None, "checkpoint": str(GOLDENS / "vit_dpn.params.npz"), "pool": None},
        schedule={"steps": 2},
    )
    train_highres(config, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "run.json").read_text())["backbone"]
    assert report["dropped"] == ["head.weight", "head.bias"]
    assert report["new"] == ["head.weight (zero)", "head.bias (zero)"]


def test_a_dry_run_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    done = command.run(highres_config(photos), LaunchOptions(tmp_path / "run", dry_run=True), Console(quiet=True))
    assert done is None
    assert not (tmp_path / "run").exists()


def test_the_demo_takes_the_network_of_a_checkpoint() -> None:
    own = resolve(None, {"data": {"source": "demo"}}, {})["backbone"]
    given = resolve(None, {"data": {"source": "demo"}, "backbone": {"checkpoint": "tower.safetensors"}}, {})["backbone"]
    assert (own["arch"], own["pool"]) == ("mu/16", "gap")
    assert (given["arch"], given["pool"]) == (None, None)
