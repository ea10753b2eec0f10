"""Images with masks that are stored turned: upright for people's own data, as stored for the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpn_cli.errors import DataError
from support.cli import run_dpn
from support.images import turn_files
from support.segment import write_scenes
from tasks.segment.config import MaskData, resolve
from tasks.segment.pairs import open_pairs


def test_images_are_turned_and_masks_are_not(tmp_path: Path) -> None:
    data = write_scenes(tmp_path / "data", {"training": 1, "validation": 1})
    before = open_pairs(MaskData(source=str(data)), "train").load(0)
    turn_files(data / "images")
    upright = open_pairs(MaskData(source=str(data), exif=True), "train").load(0)
    as_stored = open_pairs(MaskData(source=str(data)), "train").load(0)
    assert np.abs(upright[0].astype(int) - before[0]).mean() < 3
    assert np.abs(as_stored[0].astype(int) - np.rot90(before[0])).mean() < 3
    assert np.array_equal(upright[1], before[1])
    assert np.array_equal(as_stored[1], before[1])


def test_a_mask_for_the_other_orientation_names_the_flag(tmp_path: Path) -> None:
    for kind in ("images", "annotations"):
        (tmp_path / kind / "training").mkdir(parents=True)
    Image.new("RGB", (6, 4)).save(tmp_path / "images/training/a.jpg")
    mask = tmp_path / "annotations/training/a.png"
    Image.new("L", (6, 4)).save(mask)
    turn_files(tmp_path / "images")  # stored as 4x6 (width x height), upright 6x4
    assert open_pairs(MaskData(source=str(tmp_path), exif=True), "train").load(0)[0].shape == (4, 6, 3)
    with pytest.raises(
        DataError, match="has 6x4 pixels, its image 4x6; .*; if it was drawn for .* upright, add --exif"
    ):
        open_pairs(MaskData(source=str(tmp_path)), "train").load(0)
    Image.new("L", (4, 6)).save(mask)
    with pytest.raises(DataError, match="has 4x6 pixels, its image 6x4; .*; if it was drawn .* stored, add --no-exif"):
        open_pairs(MaskData(source=str(tmp_path), exif=True), "train").load(0)


def test_the_papers_data_are_read_as_stored() -> None:
    assert resolve("segment", None, {"data": {"source": "x"}}, {})["data"]["exif"] is True
    assert "exif" not in resolve("ade20k", None, {"data": {"source": "x"}}, {})["data"]


def test_a_training_tells_of_turned_images_and_its_runs_turn_them(tmp_path: Path) -> None:
    data = write_scenes(tmp_path / "data", {"training": 8, "validation": 4})
    image = tmp_path / "image.jpg"
    image.write_bytes((data / "images/validation/0000.jpg").read_bytes())
    turn_files(data / "images")
    command = ["segment", "folder", "--data", str(data), "--class-names", str(data / "classes.txt")]
    command += ["--label-offset", "1", "--ignore-label", "0", "--checkpoint", "none", "--arch", "mu/16"]
    command += ["--image-size", "64", "--steps", "1", "-b", "4", "-j", "0", "--no-report"]
    scores = {}
    for name, flags in (("upright", []), ("stored", ["--no-exif"])):
        trained = run_dpn(*command, *flags, "-o", str(tmp_path / name))
        assert trained.exit_code == 0, trained.output
        state = "stay so; --exif turns them" if flags else "are turned; --no-exif leaves them"
        message = f"training: 8 of 8 inspected images are stored turned, by their EXIF orientation, and {state}"
        assert message in " ".join(trained.stderr.split())
        for reading in ("", "--exif", "--no-exif"):
            scored = run_dpn("segment", "eval", str(tmp_path / name), "-j", "0", "--json", *filter(None, [reading]))
            scores[name, reading] = json.loads(scored.stdout)["miou"]
    assert scores["upright", ""] == scores["upright", "--exif"] != scores["upright", "--no-exif"]
    assert scores["stored", ""] == scores["stored", "--no-exif"] != scores["stored", "--exif"]
    labels = {}
    turned = data / "images/validation/0000.jpg"
    for name, picture, flags in (("image", image, []), ("turned", turned, []), ("as stored", turned, ["--no-exif"])):
        out = tmp_path / name
        predicted = run_dpn(
            "segment", "predict", str(tmp_path / "upright"), str(picture), *flags, "-j", "0", "-o", str(out)
        )
        assert predicted.exit_code == 0, predicted.output
        labels[name] = np.asarray(Image.open(next(out.glob("*.labels.png"))))
    # Not all pixels, since a second JPEG adds noise.
    assert (labels["turned"] == labels["image"]).mean() > 0.9 > (labels["as stored"] == labels["image"]).mean()
