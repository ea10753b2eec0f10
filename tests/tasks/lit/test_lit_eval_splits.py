"""`dpn lit eval RUN --data`: which pairs are scored, and that images of the training are called so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.config.load import merge
from dpn_cli.errors import DataError
from support.captions import write_caption_table, write_karpathy_dataset, write_table_dataset
from support.cli import run_dpn
from support.images import write_png_images
from support.lit import lit_config, train_lit
from tasks.lit.cache import data_fingerprint
from tasks.lit.data import CaptionSource, open_pairs
from tasks.lit.eval_splits import open_part
from tasks.lit.towers import load_lit

Json = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on 9 of 12 images with a caption each, and their table."""
    root = tmp_path_factory.mktemp("finished")
    rows = [(name, f"image {number}") for number, name in enumerate(write_png_images(root / "photos", 12))]
    pairs = write_caption_table(root / "photos" / "pairs.csv", rows)
    changes = {
        "data": {"val_source": None, "val_fraction": 0.25},
        "schedule": {"steps": 1, "warmup": 0},
        "batch_size": 4,
        "cache": {"folder": str(root / "cache")},
    }
    train_lit(lit_config(pairs, **changes), root / "run")
    return root / "run", pairs


def scored(network: Path, data: Path | str, *arguments: str) -> Json:
    completed = run_dpn(
        "lit", "eval", str(network), "--data", str(data), *arguments, "--json", "-q", "--cache-dir", f"{network}-cache"
    )
    assert completed.exit_code == 0, completed.output
    result: Json = json.loads(completed.stdout)
    assert ("the network was trained on" in " ".join(completed.stderr.split())) == bool(result["trained_on"]["images"])
    return result


def counts(result: Json) -> tuple[int, int]:
    return result["retrieval"]["images"], result["trained_on"]["images"]


def test_the_runs_held_out_pairs_are_scored(finished: tuple[Path, Path], tmp_path: Path) -> None:
    network, pairs = finished
    own = scored(network, pairs)
    assert (counts(own), own["part"]) == ((3, 0), "the pairs that the run held out")
    trained = json.loads((network / "result.json").read_text())["retrieval"]
    assert own["retrieval"] == trained
    assert counts(scored(network, pairs, "--split", "train")) == (9, 9)
    assert counts(scored(network, pairs, "--split", "all")) == (12, 9)
    shutil.copytree(pairs.parent, tmp_path / "moved")
    assert counts(scored(network, tmp_path / "moved" / "pairs.csv")) == (3, 0)
    text = run_dpn("lit", "eval", str(network), "--data", str(pairs), "--split", "all", "-q")
    assert "WARNING: the network was trained on 9 of these 12 images" in " ".join(text.stdout.split())


def test_another_table_with_images_of_the_training_is_called_so(finished: tuple[Path, Path], tmp_path: Path) -> None:
    network, pairs = finished
    towers = load_lit(str(network))
    names = [open_part(CaptionSource(str(pairs)), "train", towers.facts)[0].key(index) for index in range(2)]
    for number, name in enumerate(names):
        shutil.copy(pairs.parent / name, tmp_path / f"renamed{number}.png")
    write_png_images(tmp_path / "new", 14)
    shutil.copy(tmp_path / "new" / "13.png", tmp_path / "13.png")
    other = write_caption_table(tmp_path / "other.csv", [(f, f) for f in ("renamed0.png", "renamed1.png", "13.png")])
    result = scored(network, other)
    assert (counts(result), result["part"]) == ((3, 2), None)
    for number in range(2):
        (tmp_path / "classes" / f"class{number}").mkdir(parents=True)
        shutil.copy(tmp_path / f"renamed{number}.png", tmp_path / "classes" / f"class{number}")
    labelled = scored(network, tmp_path / "classes", "--prompts", "plain", "--force")
    assert labelled["trained_on"] == {"images": 2, "of": 2, "estimated": False}


def test_validation_data_of_their_own_are_scored(finished: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside the run's own pairs, too: then nothing is held out of those."""
    network, pairs = finished
    names = write_png_images(tmp_path / "new", 17)[12:]
    other = write_caption_table(tmp_path / "new" / "pairs.csv", [(name, f"image {name}") for name in names])
    both = scored(network, pairs, "--val-data", str(other))
    assert (counts(both), both["part"]) == ((5, 0), None)
    assert both["retrieval"] == scored(network, other)["retrieval"]
    assert both["data"] == str(other)
    for part, numbers in (("seen", (12, 13)), ("unseen", (14, 15, 16))):
        for number in numbers:
            folder = tmp_path / part / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "new" / f"{number}.png", folder)
    options = "--prompts", "plain", "--force"
    labelled = scored(network, tmp_path / "seen", "--val-data", str(tmp_path / "unseen"), *options)
    missing = run_dpn("lit", "eval", str(network), "--data", str(pairs), "--val-data", "missing.csv")
    assert (missing.exit_code, "--val-data missing.csv: no such file or folder" in missing.output) == (3, True)
    two = run_dpn("lit", "eval", str(network), "--data", str(pairs), "--val-data", str(other), "--split", "test")
    assert (two.exit_code, "--split test: --val-data names the val images" in " ".join(two.output.split())) == (2, True)
    expected = scored(network, tmp_path / "unseen", *options)
    assert (labelled["images"], labelled["top1"]) == (3, expected["top1"])
    assert labelled["fingerprint"] == expected["fingerprint"]


def facts_of(source: CaptionSource, **data: Any) -> Json:
    train_part, val = open_pairs(source)
    prints = {"train": data_fingerprint(train_part), "val": data_fingerprint(val)}
    return {"config": {"data": merge({"source": source.location}, data)}, "data": prints}


def test_pairs_to_validate_from_elsewhere_are_the_runs_own(tmp_path: Path) -> None:
    names = write_png_images(tmp_path, 8)
    first = write_caption_table(tmp_path / "first.csv", [(name, "a") for name in names[:6]])
    second = write_caption_table(tmp_path / "second.csv", [(name, "b") for name in names[6:]])
    facts = facts_of(CaptionSource(str(first), val_location=str(second)), val_source=str(second))
    part, message = open_part(CaptionSource(str(first)), None, facts)
    assert ([part.key(i) for i in range(2)], message) == (names[6:], "the pairs that the run held out")
    full, message = open_part(CaptionSource(str(second)), None, facts)
    assert (len(full.captions), message) == (2, None)


def test_a_data_set_that_has_splits_keeps_them(tmp_path: Path) -> None:
    folder = write_karpathy_dataset(tmp_path)
    source = CaptionSource(folder)
    part, message = open_part(source, None, facts_of(source))
    assert ([part.key(i) for i in range(len(part.captions))], message) == (
        [open_pairs(source)[1].key(i) for i in range(len(part.captions))],
        None,
    )
    with pytest.raises(DataError, match="--split all: .* has splits of its own"):
        open_part(source, "all", {})


@pytest.mark.parametrize("facts", [{}, {"config": {"data": {"source": "x", "val_fraction": 0.5}}, "data": {}}])
def test_towers_of_other_pairs_are_scored_on_all(facts: Json, tmp_path: Path) -> None:
    part, message = open_part(CaptionSource(write_table_dataset(tmp_path)), None, facts)
    assert (len(part.captions), message) == (6, None)


def test_an_export_keeps_the_digests_in_the_weights_alone(finished: tuple[Path, Path], tmp_path: Path) -> None:
    result = run_dpn("lit", "export", str(finished[0]), "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "trained_on" not in json.loads((tmp_path / "out" / "config.json").read_text())["facts"]
    assert load_lit(str(tmp_path / "out")).facts["trained_on"]["images"] == 9
