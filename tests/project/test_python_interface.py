"""The four functions for Python: their names, and that they give what the commands give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import dpn_cli
from dpn_cli import load_backbone, load_classifier, load_lit, load_segmenter
from dpn_cli.errors import DataError, DpnError
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from support.lit import make_towers
from support.programs import run_program
from support.segment import segment_config, train_segment, write_scenes
from tasks.lit.towers import save_towers


def output_of(*arguments: str) -> Any:
    result = run_dpn(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_public_names_are_these() -> None:
    assert dpn_cli.__all__ == ["__version__", "load_backbone", "load_classifier", "load_lit", "load_segmenter"]
    assert set(dpn_cli.__all__) <= set(dir(dpn_cli))
    with pytest.raises(AttributeError, match="has no attribute 'load'; public are __version__, load_backbone"):
        getattr(dpn_cli, "load")  # noqa: B009


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, dpn_cli; assert not {'torch', 'timm', 'tasks'} & set(sys.modules)"
    result = run_program([sys.executable, "-c", program])
    assert result.returncode == 0, result.stderr


def test_another_module_of_the_name_tasks_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("")
    result = run_program([sys.executable, "-c", "import dpn_cli; dpn_cli.load_classifier"], cwd=tmp_path)
    assert result.returncode == 1
    assert "tasks.py hides the package 'tasks' of dpn-cli; rename it" in result.stderr


def test_a_classifier_predicts_as_the_command_does(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", each=6)
    image = next(photos.rglob("*.jpg"))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(image) as opened:
        opened.resize((40, 24)).save(image, quality=95, exif=exif)
    train_highres(
        highres_config(photos, data={"exif": True, "decode": "pillow"}, schedule={"steps": 3}), tmp_path / "run"
    )
    paths = sorted(photos.rglob("*.jpg"))
    expected = output_of("predict", str(tmp_path / "run"), *map(str, paths), "--json", "--top", "9")
    classifier = load_classifier(str(tmp_path / "run"))
    actual = classifier.predict(paths, batch_size=4)
    assert actual.shape == (len(paths), len(classifier.classes))
    for row, result in zip(actual, expected, strict=True):
        chances = {entry["class"]: entry["probability"] for entry in result["classes"]}
        assert dict(zip(classifier.classes, row.tolist(), strict=True)) == pytest.approx(chances, abs=1e-6)
    opened_images = [Image.open(path) for path in paths]
    assert torch.allclose(classifier.predict(opened_images), actual, atol=1e-6)
    array = np.array(opened_images[-1].convert("RGB"))
    assert torch.allclose(classifier.predict(array), actual[-1:], atol=1e-6)
    assert torch.allclose(classifier.predict(torch.from_numpy(array).permute(2, 0, 1)), actual[-1:], atol=1e-6)
    assert classifier.predict([]).shape == (0, len(classifier.classes))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "image 0: float32, shape .4, 4, 3.; pass a path"),
        (np.zeros((4, 4), np.uint8), "image 0: uint8, shape .4, 4.; pass a path"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "image 0: torch.uint8, shape"),
        ([3], "image 0: int, shape none"),
    ],
)
def test_other_values_than_images_are_refused_in_one_line(image: Any, message: str, tmp_path: Path) -> None:
    lit = make_towers()
    with pytest.raises(DpnError, match=message):
        lit.predict(image, ["a"])


def test_a_segmenter_predicts_as_the_command_does(tmp_path: Path) -> None:
    scenes = write_scenes(tmp_path / "scenes", {"training": 8, "validation": 2})
    train_segment(segment_config(scenes, schedule={"steps": 3}), tmp_path / "run")
    images = sorted((scenes / "images" / "validation").iterdir())
    output_of("segment", "predict", str(tmp_path / "run"), *map(str, images), "-o", str(tmp_path / "out"), "--json")
    segmenter = load_segmenter(str(tmp_path / "run"))
    maps = segmenter.predict(images)
    assert len(maps) == len(images)
    for path, labels in zip(images, maps, strict=True):
        with Image.open(tmp_path / "out" / f"{path.stem}.labels.png") as expected:
            raw = np.asarray(expected).astype(int)
        assert np.array_equal(labels.numpy().astype(int) + segmenter.data.label_offset, raw)


def test_lit_towers_predict_as_the_command_does(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)).save(image)
    save_towers(make_towers(), tmp_path / "weights.safetensors")
    lit = load_lit(str(tmp_path / "weights.safetensors"))
    names = ["red", "blue", "green"]
    arguments = ("--labels", ",".join(names), "--prompts", "plain", "--top", "3", "--json")
    (expected,) = output_of("lit", "predict", str(tmp_path / "weights.safetensors"), str(image), *arguments)
    chances = {entry["label"]: entry["probability"] for entry in expected["labels"]}
    assert dict(zip(names, lit.predict(image, names)[0].tolist(), strict=True)) == pytest.approx(chances, abs=1e-6)


def test_a_backbone_is_a_timm_vit() -> None:
    vit = load_backbone("mu/8", image_size=16)
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    assert vit(vit.normalize(pixels)).shape == (2, 32)


def test_a_missing_run_is_an_error_of_the_program() -> None:
    with pytest.raises(DataError, match="no such"):
        load_classifier("runs/none")
