"""`dpn lit eval --zeroshot-data`: several data sets in one call, with the mean recall of their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.functional.classification import multiclass_recall

from support.cli import run_dpn
from support.images import write_class_folders
from support.lit import make_towers
from tasks.lit import page
from tasks.lit.towers import load_lit, save_towers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained towers, and three folders of classes; the images of the third one's classes are not equally many."""
    root = tmp_path_factory.mktemp("sets")
    save_towers(make_towers(), root / "weights.safetensors")
    for name, classes, each in (("first", 3, 4), ("second", 2, 5), ("third", 4, 6)):
        write_class_folders(root / name / "val", classes=classes, each=each)
    for image in sorted((root / "third" / "val" / "class0").iterdir())[1:]:
        image.unlink()
    return root


def evaluate(place: Path, data: str, *arguments: str) -> Any:
    command = [
        "lit",
        "eval",
        str(place / "weights.safetensors"),
        "--data",
        str(place / data),
        "--force",
        "-q",
        "-j",
        "0",
    ]
    result = run_dpn(*command, "--prompts", "plain", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_each_data_set_is_scored_as_it_would_be_alone(place: Path) -> None:
    more = ",".join(str(place / name) for name in ("second", "third"))
    together = evaluate(place, "first", "--zeroshot-data", more)
    assert [one["data"] for one in together["more_data"]] == more.split(",")
    for one, name in zip((together, *together["more_data"]), ("first", "second", "third"), strict=True):
        alone = evaluate(place, name)
        for key in ("top1", "top5", "mean_recall", "images", "classes", "chance", "fingerprint", "prompts"):
            assert one[key] == alone[key], (name, key)


def test_the_mean_recall_is_torchmetrics(place: Path) -> None:
    towers = load_lit(str(place / "weights.safetensors"))
    paths = sorted((place / "third" / "val").rglob("*.jpg"))
    classes = sorted({path.parent.name for path in paths})
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    assert labels.bincount().tolist() == [1, 6, 6, 6]
    predicted = towers.predict(paths, classes).argmax(1)
    expected = multiclass_recall(predicted, labels, num_classes=4, average="macro")
    assert evaluate(place, "third")["mean_recall"] == pytest.approx(100 * float(expected))


def test_page_and_text_have_a_row_for_each(place: Path, tmp_path: Path) -> None:
    evaluate(place, "first", "--zeroshot-data", str(place / "second"), "-o", str(tmp_path / "report"))
    result = json.loads((tmp_path / "report" / "result.json").read_text())
    table = page._more_data(result, result["more_data"])
    assert [row[0] for row in table.rows] == [str(place / "first"), str(place / "second")]
    assert table.rows[1][1] == result["more_data"][0]["top1"]
    text = run_dpn(
        "lit", "eval", str(place / "weights.safetensors"), "--data", str(place / "first"), "--force", "-q",
        "--zeroshot-data", str(place / "second"),
    )  # fmt: skip
    assert f"{place / 'second'}: top-1" in " ".join(text.stdout.split())
    captions = run_dpn("lit", "eval", "run", "--data", "pairs.csv", "--zeroshot-data", "x")
    assert captions.exit_code == 2
    assert "--zeroshot-data: of zero-shot accuracy alone" in " ".join(captions.stderr.split())
