"""What is counted of a split, the best and the five best classes, and how images are prepared for it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dpn_cli.config.schema import Runtime
from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources.base import Images, ImageSubset
from dpn_cli.data.splits import hold_out
from dpn_cli.metrics import score
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from tasks.classify.classifier import Classifier, save_classifier
from tasks.classify.probe import draw_examples, encode, probe

CPU = World(0, 1, torch.device("cpu"))


class Numbers(Images):
    """Images of one pixel that holds their own number; the class is the number's remainder."""

    def __init__(self, count: int, classes: int) -> None:
        self.labels = [number % classes for number in range(count)]
        self.sizes = [1] * count

    def locate(self, index: int) -> str:
        return f"number {index}"

    def open(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1), (index, index, index))


def ranked(classes: int) -> Any:
    """Give the true class of image n the rank n // classes, counted from zero."""

    def logits(images: Tensor) -> Tensor:
        rows = []
        for number in images[:, 0, 0, 0].tolist():
            order = [label for label in range(classes) if label != number % classes]
            order.insert(number // classes, number % classes)
            rows.append([float(-order.index(label)) for label in range(classes)])
        return torch.tensor(rows)

    return logits


def first_pixel(pixels: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(pixels[:1, :1].copy()).permute(2, 0, 1)


@pytest.mark.parametrize(("classes", "expected"), [(8, 5 / 8), (5, 1.0), (3, 1.0)])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_five_best_classes_are_five(classes: int, expected: float, batch_size: int) -> None:
    split = Numbers(classes * classes, classes)
    scores = score(ranked(classes), split, first_pixel, classes, CPU, loss="softmax", batch_size=batch_size, workers=0)
    assert scores.images == classes * classes
    assert scores.top1 == pytest.approx(100 / classes)
    assert scores.top5 == pytest.approx(100 * expected)


def test_a_score_of_very_many_classes_counts_pairs_that_occur() -> None:
    split, classes = Numbers(12, 9), 2**15  # of which a matrix takes 8 GB

    def logits_of(images: Tensor) -> Tensor:
        return F.one_hot(images[:, 0, 0, 0].long() % 3, classes).float()

    scores = score(logits_of, split, first_pixel, classes, CPU, loss="softmax", batch_size=5, workers=0)
    assert scores.confusion.pairs == Counter(number % 9 * classes + number % 3 for number in range(12))
    assert scores.right == 6
    assert scores.confusion.true[:10] == [2, 2, 2, 1, 1, 1, 1, 1, 1, 0]
    assert scores.floors == {"chance": pytest.approx(100 / classes), "most_frequent_class": pytest.approx(100 / 6)}


def classifier_file(path: Path, resize_side: int) -> Path:
    model = load_backbone("mu/8", stem="none", pool="gap", image_size=32, num_classes=3)
    names = ("class0", "class1", "class2")
    save_classifier(Classifier(perturb(model), names, "softmax", resize_side, {}), path)
    return path


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 96 x 96 with noise in a frame of 32 around another image's centre."""
    root = write_class_folders(tmp_path_factory.mktemp("framed"), classes=3, each=4, size=(96, 96))
    noise = np.random.default_rng(0)
    for path in sorted(root.rglob("*.jpg")):
        with Image.open(path) as image:
            pixels = np.asarray(image).copy()
        frame = noise.integers(0, 256, pixels.shape, dtype=np.uint8)
        frame[32:64, 32:64] = pixels[32:64, 32:64]
        Image.fromarray(frame).save(path.with_suffix(".png"))
        path.unlink()
    return root


@pytest.mark.parametrize(("resize_side", "start"), [(96, 32), (48, 8), (32, 0)])
def test_the_saved_side_prepares_the_images_of_eval_and_predict(
    resize_side: int, start: int, framed: Path, tmp_path: Path
) -> None:
    file = str(classifier_file(tmp_path / "weights.safetensors", resize_side))
    model = load_backbone(checkpoint=file, stem=None, image_size=32, num_classes=3, head="load").eval()
    shrink, paths, probabilities = 96 // resize_side, sorted(framed.rglob("*.png")), []
    for path in paths:
        with Image.open(path) as image:
            blocks = np.asarray(image).astype(np.float64).reshape(resize_side, shrink, resize_side, shrink, 3)
        resized = np.floor(blocks.mean(axis=(1, 3)) + 1e-3)[start : start + 32, start : start + 32]
        with torch.no_grad():
            probabilities.append(model((torch.from_numpy(resized).float().permute(2, 0, 1)[None] / 255 - 0.5) / 0.5)[0])
    expected = torch.stack(probabilities).softmax(-1)
    predicted = json.loads(run_dpn("predict", file, str(framed), "--json").stdout)
    assert [prediction["image"] for prediction in predicted] == [str(path) for path in paths]
    for prediction, row in zip(predicted, expected.tolist(), strict=True):
        actual = {entry["class"]: entry["probability"] for entry in prediction["classes"]}
        assert actual == pytest.approx({f"class{label}": value for label, value in enumerate(row)}, abs=1e-4)
    scored = json.loads(run_dpn("eval", file, "--data", str(framed), "--json", "-q").stdout)
    labels = torch.tensor([int(path.parent.name[-1]) for path in paths])
    assert scored["resize_side"] == resize_side
    assert scored["loss"] == pytest.approx(-expected.log()[range(12), labels].mean().item(), abs=1e-4)
    assert scored["top1"] == pytest.approx(100 * (expected.argmax(1) == labels).float().mean().item())


def test_data_of_some_of_the_classes_are_scored_among_these(framed: Path, tmp_path: Path) -> None:
    file = str(classifier_file(tmp_path / "weights.safetensors", 48))
    for name in ("class1", "class2"):
        shutil.copytree(framed / name, tmp_path / "some" / name)
    predicted = json.loads(run_dpn("predict", file, str(tmp_path / "some"), "--json").stdout)
    actual = [{entry["class"]: entry["probability"] for entry in prediction["classes"]} for prediction in predicted]
    both = torch.tensor([[probabilities["class1"], probabilities["class2"]] for probabilities in actual])
    labels = torch.tensor([int(Path(prediction["image"]).parent.name[-1]) - 1 for prediction in predicted])
    scored = json.loads(run_dpn("eval", file, "--data", str(tmp_path / "some"), "--json", "-q").stdout)
    expected = (both / both.sum(1, keepdim=True)).log()[range(8), labels]
    assert scored["loss"] == pytest.approx(-expected.mean().item(), abs=1e-4)
    assert scored["top1"] == pytest.approx(100 * (both.argmax(1) == labels).float().mean().item())


def test_the_side_that_a_run_was_asked_for_is_saved(framed: Path, tmp_path: Path) -> None:
    train_highres(highres_config(framed, data={"eval_resize": 48}, schedule={"steps": 1}), tmp_path / "run")
    own = json.loads(run_dpn("eval", str(tmp_path / "run"), "--data", str(framed), "--json", "-q").stdout)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (own["resize_side"], own["loss"]) == (48, pytest.approx(result["loss"], abs=1e-6))


def test_every_seed_of_the_few_shot_probe_draws_its_own_images(tmp_path: Path) -> None:
    photos = tmp_path / "noise"
    generator = np.random.default_rng(0)
    for number in range(60):
        path = photos / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    file = str(classifier_file(tmp_path / "weights.safetensors", 37))
    arguments = ["--data", str(photos), "--val-fraction", "0.5", "--shots", "2,5", "--seeds", "3,0,7", "--json", "-q"]
    result = run_dpn("eval", "fewshot", file, *arguments)
    assert result.exit_code == 0, result.output
    actual = json.loads(result.stdout)["accuracy"]
    model = load_backbone(checkpoint=file, stem=None, image_size=None).eval()
    parts = hold_out(open_split(ImageSource(str(photos)), "train")[0], 0.5)
    train, test = (encode(model, ImageSubset(part, range(30)), Runtime(workers=0), CPU.device, 64) for part in parts)
    for shots in (2, 5):
        expected = [100 * probe(*draw_examples(*train, 3, shots, seed), *test, 3) for seed in (3, 0, 7)]
        assert actual[str(shots)]["seeds"] == [3, 0, 7]
        assert actual[str(shots)]["values"] == pytest.approx(expected, abs=1e-3)
        assert len(set(expected)) > 1
