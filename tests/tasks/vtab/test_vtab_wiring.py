"""Which weights, splits, seeds and options reach the trainings of VTAB, and which weights reach the test split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import Tensor

from dpn_cli.data.resize import resize
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import export_backbone, load_backbone, load_with_head
from dpn_cli.weights.locate import open_checkpoint
from support.vtab import run_vtab
from tasks.vtab.config import VtabConfig
from tasks.vtab.result_tables import build_result
from tasks.vtab.tasks import TASKS
from tasks.vtab.train import Trainer
from tasks.vtab.trials import TaskOutcome

Json = dict[str, Any]
Toy = Callable[..., Json]


CONFIG = VtabConfig.model_validate(
    {
        "about": {"paper": "", "table": "", "command": "", "expected": ""},
        "lrs": [0.01],
        "seeds": [0, 1],
        "compare": ["none", "dpn"],
        "batch_size": 32,
        "schedule": {"steps": 6},
    }
)


class Start:
    """A training as it begins: weights, first batch, seed and learning rate."""

    def __init__(self, network: Any, batch: engine.Batch, job: engine.TrainJob) -> None:
        self.weights = {name: value.clone() for name, value in network.state_dict().items()}
        self.rates = [block.drop_path1.drop_prob for block in network.blocks[1:]]
        self.images, self.labels = batch["image"].clone(), batch["label"].clone()
        self.seed, self.lr = job.seed, job.lr


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """Every training of the test, in order, as `engine.fit` meets it."""
    observed: list[Start] = []
    original = engine.fit

    def recorded(model: Any, job: engine.TrainJob) -> engine.FitResult:
        observed.append(Start(engine.unwrap(model), next(job.batches(0)), job))
        return original(model, job)

    monkeypatch.setattr("tasks.vtab.train.engine.fit", recorded)
    return observed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a network without a head, each of them random."""
    path = tmp_path_factory.mktemp("weights") / "tower.safetensors"
    model = load_backbone("mu/8", stem="dpn", image_size=16, seed=5)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.02)
    export_backbone(model, path)
    return path


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_every_cell_starts_from_the_checkpoint_and_a_zero_head(
    toy: Toy, starts: list[Start], trained: Path, tmp_path: Path
) -> None:
    toy(tmp_path / "run", f"backbone.checkpoint={trained}", "backbone.arch=null")
    tower = load_backbone(checkpoint=str(trained), image_size=16).state_dict()
    assert len(starts) == 6
    for start in starts:
        assert same(tower, start.weights)
        assert not start.weights["head.weight"].any()


def test_a_seed_decides_initial_weights_and_batches_and_the_lr_neither(
    toy: Toy, starts: list[Start], tmp_path: Path
) -> None:
    toy(tmp_path / "run")
    by_seed = {seed: [start for start in starts if start.seed == seed] for seed in (0, 1)}
    assert [sorted(start.lr for start in cells) for cells in by_seed.values()] == [[0.001, 0.01, 0.03]] * 2
    for cells in by_seed.values():
        assert all(same(cells[0].weights, cell.weights) for cell in cells)
        assert all(torch.equal(cells[0].labels, cell.labels) for cell in cells)
    first, second = by_seed[0][0], by_seed[1][0]
    assert not torch.equal(first.weights["blocks.0.attn.qkv.weight"], second.weights["blocks.0.attn.qkv.weight"])
    assert not torch.equal(first.labels, second.labels)


def test_each_stem_of_a_comparison_is_trained(toy: Toy, starts: list[Start], tmp_path: Path) -> None:
    toy(tmp_path / "run", "compare=none,dpn", "seeds=1", "lrs=[0.01]")
    assert ["patch_embed.norm_in.weight" in start.weights for start in starts] == [False, True]


def distinct(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


@pytest.mark.parametrize(
    ("task", "crop", "flip"),
    [("svhn", True, True), ("dsprites_ori", True, False), ("clevr_dist", False, True), ("dsprites_loc", False, False)],
)
def test_training_images_are_cropped_and_mirrored_as_the_tasks_row_says(
    task: str, crop: bool, flip: bool, digits: Path, starts: list[Start], tmp_path: Path
) -> None:
    classes = next(row.classes for row in TASKS if row.name == task)
    folder = tmp_path / "data" / task
    folder.mkdir(parents=True)
    (folder / "images").symlink_to(digits / "svhn" / "images")
    for split in ("train800", "val200", "test"):
        rows = [line.split() for line in (digits / "svhn" / f"{split}.txt").read_text().splitlines()]
        rows = rows[:20] if split == "test" else rows
        (folder / f"{split}.txt").write_text("".join(f"{name} {int(label) % classes}\n" for name, label in rows))
    run_vtab(tmp_path / "data", tmp_path / "run", f"data.tasks={task}", "seeds=1", "lrs=[0.01]")
    images = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("images/train800/*"))]
    full = torch.stack([resize(image, size=(16, 16)) for image in images])
    larger = torch.stack([resize(image, size=(18, 18)) for image in images])  # 256 / 224 of 16
    windows = torch.cat([larger[..., top : top + 16, left : left + 16] for top in range(3) for left in range(3)])
    observed, upright = distinct(starts[0].images), distinct(windows if crop else full)
    assert len(observed) > 16
    assert observed <= upright | distinct((windows if crop else full).flip(-1))
    assert (observed <= upright) is not flip


@pytest.fixture(scope="module")
def dropping(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with stochastic depth that kept the weights of every cell."""
    folder = tmp_path_factory.mktemp("dropping") / "run"
    # A network of several blocks: the only block of mu is never dropped.
    settings = ("data.tasks=svhn", "backbone.arch=nano/8", "backbone.drop_path=0.5", "keep_weights=all")
    run_vtab(digits, folder, *settings)
    return folder


def accuracy(weights: Path, root: Path, split: str) -> float:
    """Score a cell's weights on a split by hand: files read by Pillow, the network in eval mode, one batch."""
    model = load_with_head(open_checkpoint(str(weights)), None).eval()
    lines = [line.split() for line in (root / "svhn" / f"{split}.txt").read_text().splitlines()]
    pixels = [np.asarray(Image.open(root / "svhn" / name).convert("RGB")) for name, _ in lines]
    images = torch.stack([resize(image, size=(16, 16)) for image in pixels])
    with torch.inference_mode():
        predictions = model(model.normalize(images)).argmax(-1)
    return float(100 * (predictions == torch.tensor([int(label) for _, label in lines])).double().mean())


def test_cells_are_validated_on_val200_in_eval_mode(dropping: Path, digits: Path) -> None:
    cells = sorted(dropping.glob("trials/dpn/svhn/train800_*"))
    assert len(cells) == 6
    for cell in cells:
        reported = json.loads((cell / "done.json").read_text())["val_accuracy"]
        assert reported == pytest.approx(accuracy(cell / "weights.safetensors", digits, "val200"))


def test_the_test_split_is_scored_in_eval_mode_with_each_seeds_own_weights(dropping: Path, digits: Path) -> None:
    task = json.loads((dropping / "result.json").read_text())["tasks"]["svhn"]
    by_hand = [
        accuracy(dropping / f"trials/dpn/svhn/train800_lr{task['lr']:g}_seed{seed}/weights.safetensors", digits, "test")
        for seed in (0, 1)
    ]
    assert task["test"]["values"] == pytest.approx(by_hand, abs=1e-3)
    assert by_hand[0] != by_hand[1]


def test_stochastic_depth_reaches_the_network(toy: Toy, starts: list[Start], tmp_path: Path) -> None:
    toy(tmp_path / "run", "backbone.arch=nano/8", "backbone.drop_path=0.5", "seeds=1", "lrs=[0.01]")
    depth = len(starts[0].rates) + 1
    assert depth > 1
    assert starts[0].rates == pytest.approx([0.5 * block / (depth - 1) for block in range(1, depth)])


def test_a_resumed_run_refuses_other_weights(toy: Toy, trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "tower.safetensors"
    weights.write_bytes(trained.read_bytes())
    settings = (f"backbone.checkpoint={weights}", "backbone.arch=null", "seeds=1", "lrs=[0.01]")
    toy(tmp_path / "run", *settings)
    (tmp_path / "run" / "result.json").unlink()
    export_backbone(load_backbone("mu/8", stem="dpn", image_size=16, seed=6), weights)
    with pytest.raises(DataError, match="the weights have changed since this run started"):
        toy(tmp_path / "run", *settings, resume=True)


def test_a_resumed_run_refuses_other_data(digits: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "svhn").mkdir(parents=True)
    (root / "svhn" / "images").symlink_to(digits / "svhn" / "images")
    for split in ("train800", "val200", "test"):
        (root / "svhn" / f"{split}.txt").write_text((digits / "svhn" / f"{split}.txt").read_text())
    settings = ("data.tasks=svhn", "seeds=1", "lrs=[0.01]")
    run_vtab(root, tmp_path / "run", *settings)
    (tmp_path / "run" / "result.json").unlink()
    path = root / "svhn" / "val200.txt"
    name, label = path.read_text().splitlines()[0].split()
    path.write_text(path.read_text().replace(f"{name} {label}", f"{name} {(int(label) + 1) % 10}", 1))
    with pytest.raises(DataError, match="the data have changed since this run started"):
        run_vtab(root, tmp_path / "run", *settings, resume=True)


def test_a_trial_of_another_length_is_retrained_on_resume(toy: Toy, starts: list[Start], tmp_path: Path) -> None:
    settings = ("seeds=1", "lrs=[0.01]")
    toy(tmp_path / "run", *settings)
    marker = tmp_path / "run" / "trials" / "dpn" / "svhn" / "train800_lr0.01_seed0" / "done.json"
    for steps, trainings in ((6, 1), (3, 2)):
        (tmp_path / "run" / "result.json").unlink()
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "steps": steps}))
        toy(tmp_path / "run", *settings, resume=True)
        assert len(starts) == trainings


@pytest.mark.parametrize("split", ["train800", "val200"])
def test_training_and_validation_images_are_decoded_before_any_training(
    split: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    (root / "svhn").mkdir(parents=True)
    (root / "svhn" / "images").symlink_to(digits / "svhn" / "images")
    for name in ("train800", "val200", "test"):
        (root / "svhn" / f"{name}.txt").write_text((digits / "svhn" / f"{name}.txt").read_text())
    lines = (root / "svhn" / f"{split}.txt").read_text().splitlines()
    (root / "svhn" / "broken.png").write_bytes(b"not an image")
    lines[123] = f"broken.png {lines[123].split()[1]}"  # a place that no sample of a hundred would meet
    (root / "svhn" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    # The training of a task reads both splits itself, but only after the tasks before it.
    monkeypatch.setattr(Trainer, "job", lambda *_: pytest.fail("trained"))
    with pytest.raises(DataError, match="broken.png"):
        run_vtab(root, tmp_path / "run", "data.tasks=svhn", "seeds=1", "lrs=[0.01]")


def test_the_learning_rate_is_chosen_by_val200_and_not_by_training_images(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one learning rate with scores on val200 wins; scored on any other set of pixels, all would be equal."""
    original = Trainer.job

    def scored(self: Trainer, cell: Any, outputs: engine.Outputs) -> engine.TrainJob:
        shown: list[int] = []
        monkeypatch.setattr(Trainer, "evaluate", lambda trainer, pixels: _by_size(pixels, shown, cell.lr))
        return original(self, cell, outputs)

    def _by_size(pixels: Any, shown: list[int], lr: float) -> dict[str, float]:
        shown.append(len(pixels.images))
        return {"accuracy": 90.0 if lr == 0.01 and len(pixels.images) == 200 else 10.0}

    monkeypatch.setattr(Trainer, "job", scored)
    assert toy(tmp_path / "run", "seeds=1")["tasks"]["svhn"]["lr"] == 0.01


def outcomes(config: VtabConfig, values: Iterator[list[float]]) -> list[TaskOutcome]:
    made = []
    for stem in config.networks:
        for task in TASKS[:4]:
            scores = dict(zip(config.seeds, next(values), strict=True))
            val = {0.01: dict(scores)}
            made.append(TaskOutcome(task, stem, val=val, test=scores, test_images=task.test, lr=0.01))
    return made


def test_the_interval_over_tasks_has_the_tasks_degrees_of_freedom() -> None:
    g = np.random.default_rng(0)
    values = g.uniform(40, 60, (8, 2)).round(2)
    result = build_result(CONFIG, outcomes(CONFIG, iter(values.tolist())), "mu/8", {}, {})
    difference = result["compare"]["differences"][0]["over_tasks"]
    of_tasks = values[4:].mean(1) - values[:4].mean(1)
    low, high = stats.t.interval(0.95, 3, of_tasks.mean(), stats.sem(of_tasks))
    assert difference["n"] == 4
    assert difference["ci95"] == pytest.approx([low, high], abs=1e-3)


def test_differences_pair_the_same_seeds() -> None:
    made = outcomes(CONFIG, iter([[60.0, 50.0]] * 4 + [[61.0, 53.0]] * 4))
    difference = build_result(CONFIG, made, "mu/8", {}, {})["compare"]["differences"][0]
    assert [task["values"] for task in difference["tasks"].values()] == [[1.0, 3.0]] * 4


def test_reported_intervals_of_accuracies_stay_between_0_and_100() -> None:
    made = outcomes(CONFIG, iter([[99.0, 100.0]] * 8))
    stem = build_result(CONFIG, made, "mu/8", {}, {})
    assert stem["tasks"]["cifar100"]["test"]["ci95"][1] == 100


def test_without_an_image_size_the_network_keeps_its_checkpoints(toy: Toy, tmp_path: Path) -> None:
    trained = tmp_path / "trained.safetensors"
    export_backbone(load_backbone("mu/8", stem="dpn", image_size=24, seed=5), trained)
    settings = ["seeds=1", "lrs=[0.01]", "schedule.steps=2", "backbone.image_size=null", "backbone.arch=null"]
    result = toy(tmp_path / "run", f"backbone.checkpoint={trained}", *settings)
    assert result["image_size"] == [24, 24]
