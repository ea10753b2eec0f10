"""Images that are not ImageNet's: shown alike in training and evaluation, mirrored or not, learnt by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from dpn_cli.data.augment import Augmentation
from dpn_cli.data.crops import eval_crop
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from tasks.classify import train as training
from tasks.classify.classifier import Classifier, load_classifier, save_classifier
from tasks.classify.preflight import resize_side_of
from tasks.classify.training_batches import augmentation_of

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide images whose classes differ in a strip at the left edge, which a central crop cuts off."""
    return strips(tmp_path_factory.mktemp("edges"), 8)


def strips(root: Path, width: int) -> Path:
    """Write images of 16 x 64 whose classes differ in the leftmost `width` columns."""
    generator = np.random.default_rng(0)
    for label in range(2):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(30):
            pixels = generator.integers(0, 60, (16, 64, 3), dtype=np.uint8)
            pixels[:, :width] += np.uint8(190 * label)
            Image.fromarray(pixels).save(root / f"class{label}" / f"{number:02d}.png")
    return root


def test_images_that_train_whole_are_evaluated_whole(edges: Path, tmp_path: Path) -> None:
    config = highres_config(
        edges, backbone={"arch": "mu/8", "image_size": 32}, data={"crop": "whole", "flip": False, "minival": 0.2}
    )
    result = train_highres(config, tmp_path / "run")
    assert result["top1"] > 80  # the centre says nothing: chance is 50
    scored = run_dpn("eval", str(tmp_path / "run"), "--data", str(edges), "--json", "-q")
    assert yaml.safe_load(scored.stdout)["top1"] > 80
    split = ClassFolders(edges)
    trained = next(crop_batches(split, Augmentation((32, 32), crop="whole", flip=False), 6, 3, ALONE, workers=0)(0))
    transform = load_classifier(str(tmp_path / "run")).transform
    for place, row in enumerate(rows_of_step(60, 6, 3, 0).tolist()):
        assert torch.equal(transform(split.pixels(row)), trained["image"][place])


def test_the_probe_during_training_sees_whole_images_too(edges: Path, tmp_path: Path) -> None:
    data = {"crop": "whole", "flip": False, "minival": 0.3}
    config = highres_config(edges, backbone={"arch": "mu/8", "image_size": 32}, data=data, fewshot=5)
    result = train_highres(config, tmp_path / "run")
    assert result["curve"][-1]["fewshot_5"] == 100


def test_the_probe_of_a_finished_run_sees_whole_images_too(tmp_path: Path) -> None:
    """The probe's own crop takes 224 of 256 columns, so it cuts off the leftmost 3 of 64."""
    edges = strips(tmp_path / "edges", 3)
    for crop, shown in (("whole", "whole"), ("inception", "centre")):
        data = {"crop": crop, "flip": False, "minival": 0.0}
        train_highres(highres_config(edges, backbone={"arch": "mu/8", "image_size": 32}, data=data), tmp_path / crop)
        probed = ["--data", str(edges), "--val-fraction", "0.3", "--shots", "5", "--seeds", "1", "--device", "cpu"]
        completed = run_dpn("eval", "fewshot", str(tmp_path / crop), *probed, "-j", "0", "--json")
        assert completed.exit_code == 0, completed.output
        result = json.loads(completed.stdout)
        assert result["crop"] == shown
        assert (result["accuracy"]["5"]["mean"] > 90) is (crop == "whole")
        assert ("images are resized whole, as this classifier was trained" in completed.stderr) is (crop == "whole")


def test_the_preprocessing_of_a_classifier_is_saved(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    model = load_backbone("mu/8", image_size=32, num_classes=2)
    for side, words in ((None, "resized whole to 32 x 32"), (36, "shorter side resized to 36 by area")):
        save_classifier(Classifier(model, ("a", "b"), "softmax", side, {}), tmp_path / "weights.safetensors")
        reloaded = load_classifier(str(tmp_path / "weights.safetensors"))
        larger = load_classifier(str(tmp_path / "weights.safetensors"), (48, 48))
        expected = [resize(pixels, (s, s)) if side is None else eval_crop(pixels, side, (s, s)) for s in (32,)]
        assert torch.equal(reloaded.transform(pixels), expected[0])
        assert words in reloaded.preparation
        # At another size images stay whole, or keep the proportion of the centre.
        assert larger.resize_side == (None if side is None else 55)


def test_a_crop_that_is_asked_for_is_the_one_of_the_evaluation(edges: Path) -> None:
    config = highres_config(edges, data={"crop": "whole", "eval_resize": 40})
    assert resize_side_of(config, (32, 32)) == 40
    assert resize_side_of(highres_config(edges), (32, 32)) == 37


@pytest.mark.parametrize("layers", [0, 2])
def test_images_are_mirrored_unless_flips_are_off(layers: int, edges: Path) -> None:
    split = ClassFolders(edges)

    def images(flip: bool) -> torch.Tensor:
        options = Augmentation((16, 64), layers=layers, magnitude=0.0, crop="whole", flip=flip)
        stream = crop_batches(split, options, 8, 3, ALONE, workers=0)(0)
        return torch.cat([next(stream)["image"] for _ in range(5)])

    rows = [row for step in range(5) for row in rows_of_step(60, 8, 3, step).tolist()]
    full = torch.stack([resize(split.pixels(row), (16, 64)) for row in rows])
    flipped, plain = images(True), images(False)
    changed = (flipped != plain).flatten(1).any(1)
    assert 10 < int(changed.sum()) < 30
    assert torch.equal(plain[~changed], flipped[~changed])
    if not layers:
        assert torch.equal(plain, full)
        assert torch.equal(flipped[changed], full[changed].flip(-1))


@pytest.mark.parametrize("command", [["finetune", "highres"], ["pretrain", "--augment", "none"]])
def test_flips_are_an_option_of_both_commands(command: list[str]) -> None:
    def flips(*settings: str) -> Any:
        result = run_dpn(*command, "--arch", "mu/8", "--data", "x", *settings, "--print-config")
        assert result.exit_code == 0, result.output
        return yaml.safe_load(result.stdout)["data"]["flip"]

    assert flips("--no-flip") is False
    assert flips("--flip") is True


def test_the_flip_key_reaches_the_training_images(edges: Path) -> None:
    for flip in (True, False):
        config = highres_config(edges, data={"flip": flip})
        assert augmentation_of(config, training.load_network(config, 2)).flip is flip


def write_photos(root: Path, *, in_colour: bool) -> Path:
    """Write a folder of classes, most of whose images are in colour or grey; all of them are RGB."""
    write_class_folders(root, classes=2, each=20)
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        if (number % 4 == 0) is in_colour:
            with Image.open(path) as image:
                grey = image.convert("L").convert("RGB")
            grey.save(path, quality=95)
    return root


@pytest.mark.parametrize(
    ("in_colour", "options", "crop", "area", "flip"),
    [
        (True, [], "inception", 0.25, True),
        (False, [], "whole", None, False),
        (True, ["--no-flip"], "inception", 0.25, False),
        (True, ["--set", "data.crop=whole"], "whole", None, True),
        (False, ["--set", "data.crop_area=0.5"], "inception", 0.5, False),
        (False, ["--flip", "--set", "data.crop=whole"], "whole", None, True),
    ],
)
@pytest.mark.parametrize("command", [["pretrain"], ["finetune", "highres", "--checkpoint", "none"]])
def test_images_in_colour_are_cropped_and_flipped_unless_told_otherwise(
    command: list[str], in_colour: bool, options: list[str], crop: str, area: float | None, flip: bool, tmp_path: Path
) -> None:
    photos = write_photos(tmp_path / "photos", in_colour=in_colour)
    small = ["--arch", "mu/8", "--image-size", "16", "--steps", "2", "-b", "8", "-j", "0", "--device", "cpu"]
    asked = [*command, *small, "--data", str(photos), "--val-fraction", "0.3", *options]
    completed = run_dpn(*asked, "-o", str(tmp_path / "run"))
    assert completed.exit_code == 0, completed.output
    classifier = load_classifier(str(tmp_path / "run"))
    keys = classifier.facts["config"]["data"]
    assert (keys["crop"], keys["crop_area"], keys["flip"]) == (crop, area, flip)
    assert classifier.resize_side == (None if crop == "whole" else 18)  # the centre, in the proportion of 224 to 256
    said = completed.stderr.replace("\n", " ")
    assert (
        f"training images: {'whole' if crop == 'whole' else f'inception crops of {area} of the area or more'}" in said
    )
    assert ("flipped at random" in said) is flip
    decided = "which decides" in said
    assert decided is ("--flip" not in options)  # both keys are set
    assert not decided or f"most training images are {'in colour' if in_colour else 'grey'}" in said


def test_a_dry_run_has_the_crops_that_the_images_decide(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", in_colour=True)
    small = ["--arch", "mu/8", "--image-size", "16", "--steps", "2", "-b", "8", "-j", "0", "--device", "cpu"]
    completed = run_dpn("pretrain", *small, "--data", str(photos), "--val-fraction", "0.3", "--dry-run")
    assert completed.exit_code == 0, completed.output
    assert "in colour, which decides data.crop and data.flip" in completed.stderr.replace("\n", " ")
