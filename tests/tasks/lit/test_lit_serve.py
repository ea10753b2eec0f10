"""What `dpn lit eval`, `predict`, `search` and `cache` were asked reaches the towers: columns, prompts, folders."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pil
from torch import Tensor

from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.captions import write_caption_table
from support.cli import run_dpn
from support.images import png_bytes, write_png_images
from support.lit import make_towers
from tasks.lit.towers import Towers, save_towers
from tasks.lit.zeroshot import build_classifier

Json = dict[str, Any]
CLASSES = ["a dog", "a red car", "one tree", "two houses"]


@pytest.fixture(scope="module")
def own() -> Towers:
    return make_towers()


@pytest.fixture(scope="module")
def network(own: Towers, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("towers") / "weights.safetensors"
    save_towers(own, path)
    return str(path)


def asked(*arguments: str) -> Any:
    result = run_dpn("lit", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def features_of(own: Towers, numbers: list[int]) -> Tensor:
    pixels = [np.asarray(Pil.open(io.BytesIO(png_bytes(number)))) for number in numbers]
    return own.encode_images(torch.stack([own.prepare(image) for image in pixels]))


def test_labelled_images_come_from_the_requested_columns(own: Towers, network: str, tmp_path: Path) -> None:
    predictions = (features_of(own, list(range(24))) @ build_classifier(own, CLASSES, ("{}",)).T).argmax(1).tolist()
    stored = [{"bytes": png_bytes(number), "path": None} for number in range(24)]
    columns = {
        "image": stored,
        "damaged": [{"bytes": b"no image", "path": None}, *stored[1:]],
        "guessed": predictions,
        "other": [(prediction + 1) % len(CLASSES) for prediction in predictions],
    }
    kinds = {name: Image() if name in ("image", "damaged") else ClassLabel(names=CLASSES) for name in columns}
    (tmp_path / "hub").mkdir()
    Dataset.from_dict(columns, features=Features(kinds)).to_parquet(
        tmp_path / "hub" / "validation-00000-of-00001.parquet"
    )
    score = ["eval", network, "--data", f"hf:{tmp_path}/hub", "--prompts", "plain", "--force", "-q"]
    for column, label, top1, skipped in (
        ("image", "guessed", 100, 0),
        ("image", "other", 0, 0),
        ("damaged", "guessed", 100, 1),
    ):
        result = asked(*score, "--image-column", column, "--label-column", label, "--skip-bad-images")
        assert (result["top1"], result["skipped"]) == (top1, skipped)


def test_unreadable_labelled_images_are_named_or_left_out(network: str, tmp_path: Path) -> None:
    for number in range(2):
        write_png_images(tmp_path / f"class{number}", 3)
    (tmp_path / "class1" / "1.png").write_bytes(b"no image")
    score = ["eval", network, "--data", str(tmp_path), "--prompts", "plain", "--force", "-q"]
    assert "1.png: not a readable image" in run_dpn("lit", *score).stderr
    result = asked(*score, "--skip-bad-images")
    assert (result["images"], result["skipped"]) == (5, 1)


def test_features_are_cached_in_the_requested_folder(network: str, tmp_path: Path) -> None:
    pairs = write_caption_table(tmp_path / "pairs.csv", [(name, name) for name in write_png_images(tmp_path, 3)])
    for number, command in enumerate(
        (["eval", network, "--data", str(pairs)], ["search", network, "--images", str(tmp_path), "--query", "a dog"])
    ):
        asked(*command, "-q", "--cache-dir", str(tmp_path / f"cache{number}"))
        assert len(list((tmp_path / f"cache{number}").glob("*/cache.json"))) == 1
    assert not (Path(os.environ["DPN_HOME"]) / "cache").exists()


def test_labels_are_put_into_the_prompts(own: Towers, network: str, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png_bytes(0))
    (tmp_path / "templates").write_text("a photo of {}\nmany {}, drawn\n")
    label = ["predict", network, str(tmp_path / "0.png"), "--labels", ",".join(CLASSES), "-k", "2"]
    actual = {}
    for name, templates in (("plain", ("{}",)), (str(tmp_path / "templates"), ("a photo of {}", "many {}, drawn"))):
        cosine = (features_of(own, [0]) @ build_classifier(own, CLASSES, templates).T)[0]
        ((entry,),) = (asked(*label, "--prompts", name),)
        values, places = cosine.topk(2)
        assert [prediction["label"] for prediction in entry["labels"]] == [CLASSES[place] for place in places]
        assert [prediction["cosine"] for prediction in entry["labels"]] == pytest.approx(values.tolist(), abs=1e-5)
        actual[name] = entry["labels"]
    assert len({str(labels) for labels in actual.values()}) == 2


def test_a_search_leaves_out_the_excluded_images(network: str, tmp_path: Path) -> None:
    write_png_images(tmp_path, 3)
    (tmp_path / "1.png").unlink()
    (tmp_path / "1.png").symlink_to(tmp_path / "gone.png")
    search = ["search", network, "--images", str(tmp_path), "--query", "a dog", "-q"]
    (tmp_path / "3.png").write_bytes(b"no image")
    for _ in range(2):  # the second time without encoding anything
        result = run_dpn("lit", *search, "--json", "--html", str(tmp_path / "page.html"))
        assert result.exit_code == 3
        *warnings, error = result.stderr.splitlines()
        names = [f"{tmp_path}/{number}.png" for number in "13"]
        assert [line.partition(": not a readable")[0] for line in warnings] == [f"warning: {name}" for name in names]
        assert error.startswith("error: unreadable: 2 of 4 images, named above; the others are done.")
        output = json.loads(result.stdout)
        assert sorted(Path(entry["image"]).name for entry in output) == ["0.png", "2.png"]
        assert f"Not readable and left out: {', '.join(names)}." in (tmp_path / "page.html").read_text()
    accepted = run_dpn("lit", *search, "--json", "--skip-bad-images")
    assert (accepted.exit_code, json.loads(accepted.stdout)) == (0, output)
    assert accepted.stderr.splitlines() == warnings
    for number in "02":
        (tmp_path / f"{number}.png").unlink()
    assert "no other one is" in run_dpn("lit", *search).stderr


def test_a_filled_cache_leaves_nothing_to_encode_and_to_tokenize(tmp_path: Path) -> None:
    pairs = write_caption_table(tmp_path / "pairs.csv", [(name, name) for name in write_png_images(tmp_path, 12)])
    export_backbone(load_backbone("mu/8", image_size=16, seed=1), tmp_path / "tower.safetensors")
    same = ["--checkpoint", str(tmp_path / "tower.safetensors"), "--data", str(pairs), "--val-fraction", "0.25"]
    cache = tmp_path / "cache"
    same += ["--views", "2", "--seed", "3", "--cache-dir", str(cache)]
    result = asked("cache", *same)
    assert (result["images"], result["held_out"], result["views"], result["captions"]) == (9, 3, 2, 9)
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")}
    assert len(list(cache.glob("tokens-*.npy"))) == 1
    completed = run_dpn("lit", "train", *same, "--steps", "1", "-b", "4", "-j", "0", "-o", str(tmp_path / "run"))
    assert completed.exit_code == 0, completed.output
    assert "encoding" not in completed.stderr
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")} == made
