"""Captioned images that are stored turned: a training turns them, and all that uses its towers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.captions import write_caption_table
from support.cli import run_dpn
from support.images import turn_files, write_class_folders
from tasks.lit.towers import load_lit


def _json(*command: str) -> Any:
    completed = run_dpn(*command, "--json", "-q")
    assert completed.exit_code == 0, completed.output
    return json.loads(completed.stdout)


def test_the_towers_turn_images_as_their_training_did(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", classes=3, each=4)
    cache = ["--cache-dir", str(tmp_path / "cache")]
    upright = shutil.copytree(photos, tmp_path / "before")
    turn_files(photos)
    names = [path.relative_to(photos).as_posix() for path in sorted(photos.rglob("*.jpg"))]
    pairs = write_caption_table(photos / "pairs.csv", [(name, f"a {name[5]} picture") for name in names])
    command = ["lit", "train", "--data", str(pairs), "--val-data", str(pairs), "--checkpoint", "none", "--arch", "mu/8"]
    command += ["--image-size", "16", "--text-size", "mu", "--steps", "1", "-b", "6", "-j", "0", "--no-report"]
    command += ["--set", "schedule.warmup=0", "--set", "text.context=12", *cache]
    query, found = ["--query", "a picture", "-k", "12", *cache], {}
    for name, flags in (("upright", []), ("stored", ["--no-exif"])):
        run = str(tmp_path / name)
        trained = run_dpn(*command, *flags, "-o", run)
        assert trained.exit_code == 0, trained.output
        state = "stay so; --exif turns them" if flags else "are turned; --no-exif leaves them"
        assert f"12 of 12 inspected images are stored turned, by their EXIF orientation, and {state}" in " ".join(
            trained.stderr.split()
        )
        assert load_lit(run).exif is not bool(flags)
        for folder in (photos, upright):
            for reading in ([], ["--exif"], ["--no-exif"]):
                results = _json("lit", "search", run, "--images", str(folder), *query, *reading)
                found[name, folder.name, *reading] = sorted(result["cosine"] for result in results)
        labels = ["--labels", "a red picture,a blue one", "-j", "0"]
        predicted = [_json("lit", "predict", run, str(photos), *labels, *flag) for flag in ([], ["--exif"])]
        assert (predicted[0] == predicted[1]) is not bool(flags)
        scored = [_json("lit", "eval", run, "--data", str(photos), "--force", *flag) for flag in ([], ["--exif"])]
        assert (scored[0]["top1"] == scored[1]["top1"]) or flags
    for name, flag in (("upright", "--exif"), ("stored", "--no-exif")):
        assert found[name, "photos"] == found[name, "photos", flag]
    before = found["upright", "before"]
    assert found["upright", "photos"] == pytest.approx(before, abs=0.02)  # the noise of JPEGs that are stored twice
    assert found["upright", "photos", "--no-exif"] != pytest.approx(before, abs=0.02)


def test_labelled_images_may_lie_elsewhere(tmp_path: Path) -> None:
    data = ["--data", str(write_class_folders(tmp_path / "train", classes=2, each=3))]
    other = str(write_class_folders(tmp_path / "others", classes=2, each=5))
    run = str(tmp_path / "run")
    names = [path.relative_to(tmp_path / "train").as_posix() for path in sorted((tmp_path / "train").rglob("*.jpg"))]
    pairs = write_caption_table(tmp_path / "train" / "pairs.csv", [(name, "a picture") for name in names])
    trained = run_dpn(
        "lit", "train", "--data", str(pairs), "--val-data", str(pairs), "--checkpoint", "none", "--arch", "mu/8",
        "--image-size", "16", "--text-size", "mu", "--steps", "1", "-b", "6", "-j", "0", "--no-report", "-o", run,
        "--set", "schedule.warmup=0", "--set", "text.context=12", "--cache-dir", str(tmp_path / "cache"),
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    assert _json("lit", "eval", run, *data, "--val-data", other, "--force")["images"] == 10
    assert _json("lit", "eval", run, *data, "--split", "train", "--val-data", other, "--force")["images"] == 6
