"""`dpn eval RUN --data`: which images are scored, and that images of the training are called so."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.data import leakage
from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources.base import ImageSubset, fingerprint
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.sources.synthetic import SceneSplit
from dpn_cli.data.splits import open_class_data
from dpn_cli.errors import DataError
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from tasks.classify import evaluate as classification
from tasks.classify.classifier import load_classifier
from tasks.classify.eval_splits import ConcatImages, Split, open_part, run_source

Json = dict[str, Any]
ONE = World(0, 1, None)  # type: ignore[arg-type]  # counting needs no device
ONCE: Json = {"schedule": {"steps": 1}, "runtime": {"workers": 0}}


def folders(root: Path) -> Json:
    return {"source": str(write_class_folders(root / "photos", each=10)), "val_fraction": 0.2}


def train_and_val(root: Path) -> Json:
    full = write_class_folders(root / "whole", each=10)
    for label in range(3):
        for number, path in enumerate(sorted((full / f"class{label}").iterdir())):
            to = root / "photos" / ("val" if number < 2 else "train") / f"class{label}" / path.name
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
    return {"source": str(root / "photos"), "val_fraction": None}


def val_elsewhere(root: Path) -> Json:
    place = train_and_val(root)["source"]
    return {"source": f"{place}/train", "val_source": f"{place}/val", "val_fraction": None}


def hub(root: Path) -> Json:
    import datasets

    split = ClassFolders(write_class_folders(root / "whole", each=10))
    rows: dict[str, list[object]] = {
        "photo": [{"bytes": split.content(row), "path": None} for row in range(30)],
        "kind": list(split.labels),
    }
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=list(split.classes))})
    (root / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(root / "set" / "train-00000-of-00001.parquet"))
    return {"source": f"hf:{root / 'set'}", "val_fraction": 0.2, "image_column": "photo"}


def shards(root: Path) -> Json:
    split = ClassFolders(write_class_folders(root / "whole", each=10))
    with tarfile.open(root / "part.tar", "w") as archive:
        for index in range(30):
            for ending, content in (("jpg", split.content(index)), ("cls", str(split.labels[index]).encode())):
                member = tarfile.TarInfo(f"{index:04d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return {"source": f"wds:{root / 'part.tar'}", "val_fraction": 0.2}


def scored(network: Path | str, data: str | None, *arguments: str) -> Json:
    completed = run_dpn("eval", str(network), *(["--data", data] if data else []), *arguments, "--json", "-q")
    assert completed.exit_code == 0, completed.output
    result: Json = json.loads(completed.stdout)
    if result["trained_on"] and result["trained_on"]["images"]:
        assert "warning: the network was trained on" in " ".join(completed.stderr.split())
    else:
        assert completed.stderr == ""
    return result


def counts(result: Json) -> tuple[int, int | None]:
    return result["images"], result["trained_on"]["images"] if result["trained_on"] else None


@pytest.mark.parametrize("source", [folders, train_and_val, val_elsewhere, hub, shards])
def test_the_runs_own_validation_images_are_scored(source: Callable[[Path], Json], tmp_path: Path) -> None:
    data = source(tmp_path)
    train_highres(highres_config(data["source"], data=data, **ONCE), tmp_path / "run")
    own = scored(tmp_path / "run", data["source"])
    assert counts(own) == (6, 0)
    assert own["fingerprint"] == json.loads((tmp_path / "run" / "result.json").read_text())["data"]["val"]
    assert counts(scored(tmp_path / "run", data["source"], "--split", "val")) == (6, 0)
    assert counts(scored(tmp_path / "run", data["source"], "--split", "train")) == (22, 22)
    assert counts(scored(tmp_path / "run", data["source"], "--split", "all")) == (30, 22)
    without = scored(tmp_path / "run", None)
    assert (without["data"], without["fingerprint"]) == (data["source"], own["fingerprint"])


@pytest.mark.parametrize(
    ("arguments", "own", "scored"),
    [
        ("demo", "demo:objects", "demo:objects"),
        ("demo", "demo", "demo"),
        ("demo", "photos", "demo"),
        ("demo", None, "demo"),
        ("demo:objects", "demo", "demo:objects"),
        ("", "demo:objects", "demo:objects"),
        ("", "hf:owner/name", "hf:owner/name"),
    ],
)
def test_demo_is_the_demo_that_the_run_was_trained_on(arguments: str, own: str | None, scored: str) -> None:
    facts = {"config": {"data": {"source": own}}} if own else {}
    assert run_source(ImageSource(arguments), facts, "run").location == scored


def test_an_unknown_demo_is_refused_with_the_list_of_demos() -> None:
    with pytest.raises(DataError, match=r"no such demo; there are demo \(6 classes\), demo:objects \(24 classes\)"):
        open_split(ImageSource("demo:shapes"), "val")


def test_the_demos_scenes_are_split_too() -> None:
    data = open_class_data(ImageSource("demo"), None)
    fingerprints = {part: fingerprint(getattr(data, part)) for part in ("train", "minival", "val")}
    facts = {"config": {"data": {"source": "demo", "minival": None}}, "data": fingerprints}
    splits: tuple[Split | None, ...] = (None, "train", "all")
    dataset = [open_part(ImageSource("demo"), split, facts)[0] for split in splits]
    known = [leakage.count_overlap(part, leakage.record(data.train), ONE) for part in dataset]
    assert known == [leakage.Overlap(n, of, False) for n, of in ((0, 1000), (950, 950), (950, 2000))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on 22 of 30 images (2 in minival, 6 to validate), and the folder of all of them."""
    root = tmp_path_factory.mktemp("finished")
    data = folders(root)
    train_highres(highres_config(data["source"], data=data, **ONCE), root / "run")
    return root / "run", root / "photos"


def test_a_copy_of_the_data_is_split_as_the_run_did(finished: tuple[Path, Path], tmp_path: Path) -> None:
    network, photos = finished
    shutil.copytree(photos, tmp_path / "moved")
    exported = run_dpn("export", str(network), "-o", str(tmp_path / "out"))
    assert exported.exit_code == 0, exported.output
    for file in (network, network / "weights.safetensors", tmp_path / "out" / "model.safetensors"):
        assert counts(scored(file, str(tmp_path / "moved"))) == (6, 0)
    text = run_dpn("eval", str(network), "--data", str(tmp_path / "moved"))
    assert "6 images of 3 classes, the run's own validation images" in " ".join(text.stderr.split())
    assert "3 classes (the run's own validation images)" in text.stdout


def test_training_images_are_recognized_by_content_under_any_name(finished: tuple[Path, Path], tmp_path: Path) -> None:
    network, photos = finished
    own = open_class_data(ImageSource(str(photos), val_fraction=0.2), None)
    copies = [("class0", own.train, 3), ("class1", own.train, 0), ("class2", own.val, 1)]
    for number, (name, part, index) in enumerate(copies):
        to = tmp_path / "others" / name / f"renamed{number}.jpg"
        to.parent.mkdir(parents=True)
        shutil.copy(part.locate(index), to)
    Image.new("RGB", (40, 40), (9, 200, 30)).save(tmp_path / "others" / "class2" / "new.png")
    result = scored(network, str(tmp_path / "others"))
    assert (counts(result), result["part"]) == ((4, 2), None)
    text = run_dpn("eval", str(network), "--data", str(tmp_path / "others"), "-q").stdout
    assert "WARNING: the network was trained on 2 of these 4 images" in " ".join(text.split())


def test_a_probe_is_reported_too(finished: tuple[Path, Path]) -> None:
    network, photos = finished
    asked = ("--data", str(photos), "--val-fraction", "0.5", "--shots", "1")
    result = run_dpn("eval", "fewshot", str(network / "weights.safetensors"), *asked, "--json", "-q")
    known = json.loads(result.stdout)["trained_on"]
    assert (known["of"], known["estimated"]) == (15, False)
    assert 0 < known["images"] < 15
    sentence = f"the network was trained on {known['images']} of these 15 images"
    assert sentence in " ".join(result.stderr.split())
    text = run_dpn("eval", "fewshot", str(network / "weights.safetensors"), *asked, "-q")
    assert f"WARNING: {sentence}" in " ".join(text.stdout.split())


def test_changed_data_are_scored_in_full_and_reported(tmp_path: Path) -> None:
    data = folders(tmp_path)
    train_highres(highres_config(data["source"], data=data, **ONCE), tmp_path / "run")
    Image.new("RGB", (40, 40), (9, 200, 30)).save(tmp_path / "photos" / "class2" / "new.png")
    result = scored(tmp_path / "run", data["source"])
    assert counts(result) == (31, 22)
    assert "changed since the run" in result["part"]


def test_all_of_a_strangers_data_set_are_both_its_splits(finished: tuple[Path, Path], tmp_path: Path) -> None:
    folder = train_and_val(tmp_path)["source"]
    for path in (tmp_path / "photos").rglob("*.jpg"):
        with Image.open(path) as image:
            image.rotate(90, expand=True).save(path)
    sizes = [scored(finished[0], folder, *more)["images"] for more in ((), ("--split", "train"), ("--split", "all"))]
    assert sizes == [6, 24, 30]
    assert scored(finished[0], folder, "--split", "all")["trained_on"]["images"] == 0


def test_a_network_without_a_record_of_its_training_data_is_scored_in_full(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    from tasks.classify.classifier import save_classifier

    classifier = load_classifier(str(finished[0]))
    classifier.facts = {}
    save_classifier(classifier, tmp_path / "stranger.safetensors")
    result = scored(tmp_path / "stranger.safetensors", str(finished[1]))
    assert (counts(result), result["part"]) == ((30, None), None)
    completed = run_dpn("eval", str(tmp_path / "stranger.safetensors"))
    assert (completed.exit_code, "--data: which images?" in completed.stderr) == (2, True)


def test_images_of_a_run_that_are_gone_are_named(tmp_path: Path) -> None:
    data = folders(tmp_path)
    train_highres(highres_config(data["source"], data=data, **ONCE), tmp_path / "run")
    (tmp_path / "photos").rename(tmp_path / "moved")
    result = run_dpn("eval", str(tmp_path / "run"))
    assert result.exit_code == 3
    assert "photos, which is not here; name the images with --data" in " ".join(result.stderr.split())


def test_a_wrong_split_ends_with_one_line(finished: tuple[Path, Path]) -> None:
    result = run_dpn("eval", str(finished[0]), "--data", "demo", "--split", "test")
    assert result.exit_code == 3
    assert "--split test: demo has no test split; name its folder with --data" in result.stderr
    result = run_dpn("eval", str(finished[0]), "--data", "demo", "--split", "valid")
    assert result.exit_code == 2
    assert "--split: one of train, val, test, all (got 'valid')" in result.stderr


def test_more_images_than_are_read_give_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SceneSplit("demo_color", 0, 1000)
    half = ImageSubset(full, range(0, 1000, 2))
    exact = leakage.count_overlap(full, leakage.record(half), ONE)
    assert exact == leakage.Overlap(500, 1000, False)
    monkeypatch.setattr(leakage, "MAX_IMAGES", 300)
    described = leakage.record(half)
    assert (described["images"], described["described"], len(described["digests"])) == (500, 300, 300 * 8)
    known = leakage.count_overlap(full, described, ONE)
    assert known is not None
    assert known.estimated
    assert abs(known.images - 500) < 150
    assert "about" in str(known.warning())
    nothing = leakage.count_overlap(SceneSplit("demo_color", 5000, 5400), described, ONE)
    assert nothing == leakage.Overlap(0, 400, True)
    assert nothing.warning() is None
    assert leakage.count_overlap(full, None, ONE) is None


def test_unreadable_images_are_no_ones_that_were_trained_on(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "photos", classes=2, each=2)
    (root / "class0" / "000.jpg").write_text("no image")
    split = ClassFolders(root)
    known = leakage.count_overlap(split, leakage.record(split), ONE)
    assert known is not None
    assert (known.images, known.of) == (3, 4)


def test_joined_splits_keep_their_images_apart(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "photos", classes=3, each=3)
    full = open_split(ImageSource(str(root)), "train")[0]
    parts = [ImageSubset(full, [7, 0]), ImageSubset(full, []), ImageSubset(full, [4])]
    joined = ConcatImages(parts)
    assert [joined.key(i) for i in range(3)] == [full.key(row) for row in (7, 0, 4)]
    assert [joined.locate(i) for i in range(3)] == [full.locate(row) for row in (7, 0, 4)]
    assert (list(joined.labels), len(joined.sizes)) == ([2, 0, 1], 3)
    for index, row in enumerate((7, 0, 4)):
        assert np.array_equal(joined.pixels(index), full.pixels(row))
        assert joined.content(index) == (root / full.key(row)).read_bytes()


@pytest.mark.parametrize("content", ["{}", "[1, 2]", "[", "[" * 100_000])
def test_a_real_file_of_another_form_is_refused_without_assertions_too(content: str, tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(content)
    optimized: Json = {"__name__": classification.__name__}
    exec(compile(Path(classification.__file__).read_text(), "classification", "exec", optimize=1), optimized)
    with pytest.raises(DataError, match=r"--real .*real.json: (not the ReaL file|cannot be read)") as e:
        optimized["read_real"](path, SceneSplit("demo_color", 0, 1))
    assert "\n" not in str(e.value)
