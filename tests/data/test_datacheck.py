"""`dpn data check`: what is wrong with data is listed by file name, all of it, and clean data pass."""

from __future__ import annotations

import io
import json
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.commands.datacheck import CHECKS
from dpn_cli.data import image_source, loader_sizing, validate
from dpn_cli.data.image_errors import collect_errors, report_error
from dpn_cli.data.imagenet import imagenet_folders
from dpn_cli.data.sources import synthetic
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.validate import SplitInspection, describe_format, find_duplicates, inspect_image
from dpn_cli.errors import DataError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.run_dir import RunFolder
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from support.vtab import write_vtab_task
from tasks.lit import data as lit_data
from tasks.segment import pairs as segment_pairs
from tasks.vtab.tasks import TASKS

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
Json = dict[str, Any]


def checked(*words: str, code: int = 0) -> Json:
    """The result of a check, which ends with an exit code."""
    completed = run_dpn("data", "check", *words, "--json", "-q", "-j", "0")
    assert completed.exit_code == code, completed.output
    result: Json = json.loads(completed.stdout)
    assert (code == 3) == bool(result["problems"])
    text = run_dpn("data", "check", *words, "-q", "-j", "0")
    assert text.exit_code == code
    assert all(problem["text"] in text.stdout for problem in result["problems"])
    assert all(warning in text.stdout for warning in result["warnings"])
    last = text.stdout.splitlines()[-1]
    assert last.startswith("fingerprint")
    assert ("as listed above" in text.stderr.splitlines()[-1]) if code else not text.stderr
    return result


def texts(result: Json, kind: str) -> list[str]:
    return [problem["text"] for problem in result["problems"] if problem["kind"] == kind]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_class_folders(tmp_path / "data" / "train", each=10)
    write_class_folders(tmp_path / "data" / "val" / "wider", classes=3, each=2, size=(60, 40))
    for place in (tmp_path / "data" / "val" / "wider").iterdir():
        place.rename(place.parents[1] / place.name)
    (tmp_path / "data" / "val" / "wider").rmdir()
    return tmp_path / "data"


def test_clean_folders_pass_with_the_fingerprint_that_a_training_writes(folder: Path, tmp_path: Path) -> None:
    result = checked("highres", "--data", str(folder), "-b", "6")
    assert result["splits"]["val"] == {
        "images": 6,
        "unreadable": 0,
        "stored": {"JPEG 95": 6},
        "sides": {"smallest": [60, 40], "median": [60, 40], "largest": [60, 40]},
        "labels": {"classes": 3, "lowest": 0, "highest": 2, "counts": [2, 2, 2], "without": []},
    }
    assert result["warnings"] == []
    assert "6 on 1 rank: 6 each, 4.5 steps an epoch" in result["notes"][-1]
    changes = {"select": "last", "data": {"source": str(folder), "minival": None}}
    train_highres(highres_config(folder, **changes), tmp_path / "run")
    facts = RunFolder(tmp_path / "run").facts
    assert facts["data"] == result["fingerprint"]


def test_everything_wrong_with_folders_is_listed_by_file_name(folder: Path) -> None:
    broken, empty = folder / "train" / "class0" / "000.jpg", folder / "val" / "class1" / "001.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    empty.write_bytes(b"")
    (folder / "train" / "class9").mkdir()
    here, there = folder / "train" / "class2" / "005.jpg", folder / "val" / "class2" / "copy.png"
    with Image.open(here) as image:  # the same pixels in another file
        image.save(there)
    twin = folder / "train" / "class1" / "twin.jpg"
    twin.write_bytes((folder / "train" / "class1" / "003.jpg").read_bytes())
    result = checked("pretrain", "--data", str(folder), "--decode", "pillow", code=3)
    assert [text.split(":")[0] for text in texts(result, "unreadable")] == [str(broken), str(empty)]
    (same,) = texts(result, "same image")
    assert same == f"{here} (train) = {there} (val)"
    unfit = texts(result, "pair")
    assert unfit[0].startswith(f"{folder / 'train' / 'class9'}: a class without images")
    assert "different classes: only in training: class9" in unfit[1]
    (names,) = result["repeated"]
    assert {name.split(" ")[0] for name in names} == {str(twin), str(twin.with_name("003.jpg"))}
    assert any("1 image with the same decoded pixels as another" in warning for warning in result["warnings"])


def test_images_without_labels_are_checked_for_a_distillation(folder: Path) -> None:
    """The validation images are among them: scores on those would be worth nothing."""
    (folder / "train/class0/torn.jpg").write_bytes(b"no image")
    photo = next((folder / "val/class1").iterdir())
    (folder / "train/class1/again.jpg").write_bytes(photo.read_bytes())
    result = checked("distill", "--data", str(folder), "-b", "3", code=3)
    assert [Path(text.split(":")[0]).name for text in texts(result, "unreadable")] == ["torn.jpg"]
    (twins,) = texts(result, "same image")
    assert {Path(name.split(" (")[0]).name for name in twins.split(" = ")} == {"again.jpg", photo.name}
    assert list(result["splits"]) == list(result["fingerprint"]) == ["train", "held_out", "val"]
    assert "labels" not in result["splits"]["train"]
    assert result["splits"]["val"]["labels"]["classes"] == 3


def test_twins_of_which_one_falls_into_minival_are_warned_of_only(folder: Path) -> None:
    for path in list((folder / "train").rglob("*.jpg")):
        path.with_name(f"twin-{path.name}").write_bytes(path.read_bytes())
    result = checked("highres", "--data", str(folder), "-b", "6")
    assert len(result["repeated"]) == 30
    assert any(len({name.split(" (")[1] for name in names}) == 2 for names in result["repeated"])
    assert any("train: 30 images with the same" in warning for warning in result["warnings"])


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def shards(path: Path, labels: Sequence[str | None]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, label in enumerate(labels):
            buffer = io.BytesIO()
            Image.new("RGB", (20, 10), (number, 0, 0)).save(buffer, "PNG")
            add(archive, f"{number:04d}.png", buffer.getvalue())
            if label is not None:
                add(archive, f"{number:04d}.cls", label.encode())
    return path


def test_labels_of_shards_outside_the_names_are_listed(tmp_path: Path) -> None:
    path = shards(tmp_path / "a.tar", [str(number % 4) for number in range(40)] + ["7", None, "x"])
    (tmp_path / "classnames.txt").write_text("ant\nbee\ncow\ndog\n")
    result = checked("highres", "--data", f"wds:{path}", "--val-fraction", "0.25", code=3)
    assert texts(result, "label") == [f"{path.parent / 'a.tar/0040.png'}: label 7, and there are 4 classes, 0 to 3"]
    unfit = texts(result, "pair")
    assert "0041.png has no 0041.cls" in unfit[0]
    assert "0042.png: its .cls is not a number" in unfit[1]
    assert "4 names, and the shards have the classes 0 to 7" in unfit[2]
    assert any("1 shard, which every process reads at random" in note for note in result["notes"])


@pytest.mark.parametrize(("names", "problems"), [("reversed", 1), ("official", 0)])
def test_known_classes_in_another_order_are_a_problem(names: str, problems: int, tmp_path: Path) -> None:
    path = shards(tmp_path / "a.tar", [str(number % 1000) for number in range(2000)])
    order = imagenet_folders() if names == "official" else imagenet_folders()[::-1]
    (tmp_path / "classnames.txt").write_text("\n".join(order))
    completed = run_dpn(
        "data", "check", "pretrain", "--data", f"wds:{path}", "--val-fraction", "0.5", "--json", "-q", "-j", "0"
    )
    result = json.loads(completed.stdout)
    actual = texts(result, "classes")
    assert len(actual) == problems
    if problems:
        assert f"class 0 is '{order[0]}', there '{order[-1]}'" in actual[0]


def test_numbers_in_the_order_of_text_are_warned_of(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, classes=12, each=2)
    for place in sorted(root.iterdir()):
        place.rename(root / place.name.removeprefix("class"))
    result = checked("highres", "--data", str(root), "--val-fraction", "0.5", "-b", "4")
    assert any("class 2 is '10'" in warning for warning in result["warnings"])


def test_packs_that_are_copies_are_warned_of(folder: Path, tmp_path: Path) -> None:
    assert run_dpn("data", "pack", "--data", str(folder), "-o", str(tmp_path / "pack"), "--size", "32").exit_code == 0
    result = checked("highres", "--data", str(tmp_path / "pack"))
    assert any("shorter side of at most 32 pixels" in warning for warning in result["warnings"])
    assert result["splits"]["val"]["sides"]["largest"] == [48, 32]


def test_batches_that_ranks_do_not_share_and_little_shared_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = checked("highres", "--data", str(folder), "-b", "6", "--ranks", "4", code=3)
    assert "--batch-size 6" in texts(result, "batch")[0]
    monkeypatch.setattr(loader_sizing, "shared_memory", lambda: 1000)
    result = checked("highres", "--data", str(folder), "-b", "6", "--ranks", "2")
    assert not any("shm" in warning for warning in result["warnings"])  # -j 0 hands nothing over
    completed = run_dpn("data", "check", "highres", "--data", str(folder), "-b", "6", "--ranks", "2", "-j", "1", "-q")
    assert "has 1e-06 GB free" in completed.stdout
    assert "decoded by 1 process a rank" in completed.stdout


def vtab(root: Path, copied: bool = False) -> Path:
    """The folder of one task of VTAB-1k, with small images of noise."""
    g, task = np.random.default_rng(0), next(task for task in TASKS if task.name == "eurosat")
    counts = {"train800": 800, "val200": 200, "test": 30}
    images = {name: g.integers(0, 256, (count, 4, 4, 3), np.uint8) for name, count in counts.items()}
    labels = {name: np.arange(count) % task.classes for name, count in counts.items()}
    run_folder = write_vtab_task(root / task.folder, images, labels)
    if copied:
        for split in counts:
            listed = (run_folder / f"{split}.txt").read_text()
            (run_folder / f"{split}.txt").write_text(listed.replace(".png", ".jpg"))
        for path in run_folder.rglob("*.png"):
            with Image.open(path) as image:
                image.save(path.with_suffix(".jpg"))
    return run_folder


def test_everything_wrong_with_a_task_of_vtab_is_listed(tmp_path: Path) -> None:
    run_folder = vtab(tmp_path)
    result = checked("vtab", "--data", str(tmp_path), "--tasks", "eurosat")
    assert result["warnings"] == [
        "eurosat: 30 test images, VTAB has 5400: the score is not comparable with published ones"
    ]
    assert result["fingerprint"]["eurosat"].keys() == {"train800", "val200", "test"}
    lines = (run_folder / "train800.txt").read_text().splitlines()
    lines[3], lines[5], lines[7] = "images/train800/none.png 1", "images/train800/000005.png 10", "what"
    (run_folder / "train800.txt").write_text("\n".join(lines))
    (run_folder / "images" / "test" / "000004.png").write_bytes((run_folder / "images/val200/000002.png").read_bytes())
    (run_folder / "images" / "val200" / "000009.png").write_bytes(b"no image")
    result = checked("vtab", "--data", str(tmp_path), "--tasks", "eurosat", code=3)
    listed = run_folder / "train800.txt"
    assert texts(result, "pair") == [
        f"{run_folder / 'images/train800/none.png'} (train800.txt, line 4): no such image",
        f"{listed}, line 8: 'what' is not '<image path> <label>'",
        "eurosat: train800 has 798 images, VTAB-1k has 800; get this task's folder again",
    ]
    assert [text.split(",")[0] for text in texts(result, "label")] == [
        f"{run_folder / 'images/train800/000005.png'} (train800.txt"
    ]
    assert texts(result, "same image") == [
        f"{run_folder / 'images/val200/000002.png'} (val200.txt, line 3) (eurosat val200) = "
        f"{run_folder / 'images/test/000004.png'} (test.txt, line 5) (eurosat test)"
    ]
    assert texts(result, "unreadable")[0].startswith(
        f"{run_folder / 'images/val200/000009.png'} (val200.txt, line 10):"
    )


def test_a_task_of_vtab_that_was_re_encoded_is_warned_of(tmp_path: Path) -> None:
    vtab(tmp_path, copied=True)
    result = checked("vtab", "--data", str(tmp_path), "--tasks", "eurosat")
    assert result["splits"]["eurosat train800"]["stored"] == {"JPEG 75": 800}
    assert any("eurosat: all training images are JPEGs of quality 75" in warning for warning in result["warnings"])


def test_everything_wrong_with_pairs_is_listed(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "photos", classes=3, each=10)
    files = sorted(root.rglob("*.jpg"))
    rows = [f"{path.relative_to(tmp_path)},a {path.parent.name} {number}" for number, path in enumerate(files)]
    table = tmp_path / "pairs.csv"
    table.write_text("file,caption\n" + "\n".join(rows))
    words = ("lit", "--data", str(table), "-b", "4", "--val-fraction", "0.2")
    result = checked(*words)
    assert result["splits"]["train"]["captions"] == {"sentences": 24, "fewest": 1, "most": 1, "different": 24}
    assert result["fingerprint"]["captions"].keys() == {"train", "val"}
    files[4].write_bytes(b"")
    rows[0], rows[1] = "gone.jpg,a house", f"{files[1].relative_to(tmp_path)},"
    rows += ["far.jpg,x", *(row.split(",")[0] + ",the same" for row in rows[5:9])]
    rows[7] = rows[7].split(",")[0] + ",the same"
    table.write_text("file,caption\n" + "\n".join(rows))
    result = checked(*words, code=3)
    unfit = texts(result, "pair")
    assert len(unfit) == 3
    assert "gone.jpg: no such image" in unfit[0]
    assert f"{files[1].relative_to(tmp_path)}: a pair without text" in unfit[1]
    assert "far.jpg: no such image" in unfit[2]
    assert texts(result, "unreadable")[0].startswith(str(files[4]))
    assert any("'the same' with" in warning for warning in result["warnings"])


def masks(root: Path, count: int = 4) -> Path:
    g = np.random.default_rng(0)
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels = g.integers(0, 256, (12, 16, 3), np.uint8)
            Image.fromarray(pixels).save(root / "images" / split / f"{number}.png")
            mask = np.full((12, 16), number % 3, np.uint8)
            mask[0, 0] = 255
            Image.fromarray(mask).save(root / "annotations" / split / f"{number}.png")
    (root / "classes.txt").write_text("a\nb\nc\nd\n")
    return root


def test_everything_wrong_with_masks_is_listed(tmp_path: Path) -> None:
    root = masks(tmp_path)
    words = ("folder", "--data", str(root), "-b", "2")
    result = checked(*words)
    labels = result["splits"]["train"]["labels"]
    assert labels["pixels"] == [2 * 191, 191, 191, 0]
    assert labels["masks"] == [2, 1, 1, 0]
    assert labels["ignored"] == pytest.approx(1 / 192)
    assert result["warnings"][0] == "train: classes without a pixel: d"
    trained = root / "annotations" / "training"
    Image.fromarray(np.full((12, 16), 77, np.uint8)).save(trained / "1.png")
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(trained / "2.png")
    Image.new("RGB", (16, 12)).save(trained / "3.png")
    (root / "images" / "validation" / "0.png").write_bytes((root / "images" / "training" / "0.png").read_bytes())
    Image.new("RGB", (16, 12)).save(root / "images" / "validation" / "lonely.png")
    Image.new("L", (16, 12)).save(root / "annotations" / "validation" / "single.png")
    result = checked(*words, code=3)
    invalid = texts(result, "mask")
    assert [text.split(":")[0] for text in invalid] == [str(trained / f"{number}.png") for number in (1, 2, 3)]
    assert "the mask holds 77" in invalid[0]
    assert "5x5 pixels, its image 16x12" in invalid[1]
    assert "in colours" in invalid[2]
    unfit = texts(result, "pair")
    assert [Path(text.split(":")[0]).name for text in unfit] == ["lonely.png", "single.png"]
    assert len(texts(result, "same image")) == 1


def test_labels_that_look_shifted_are_warned_of(tmp_path: Path) -> None:
    root = masks(tmp_path, count=100)
    for path in (root / "annotations").rglob("*.png"):
        Image.fromarray(np.full((12, 16), 1, np.uint8)).save(path)
    result = checked("ade20k", "--data", str(root))
    assert any("shifted by one" in warning for warning in result["warnings"])
    assert "train: 100 images, ADE20K has 20210: the score is not comparable with published ones" in result["warnings"]
    Image.fromarray(np.zeros((12, 16), np.uint8)).save(root / "annotations" / "training" / "0.png")
    warnings = [text for text in checked("ade20k", "--data", str(root))["warnings"] if "shifted" in text]
    assert len(warnings) == 1  # of the validation masks


@pytest.mark.parametrize("name", CHECKS)
def test_the_built_in_data_are_clean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {"train": (0, 99), "val": (900, 950)}
    monkeypatch.setattr(image_source, "DEMO_SPLITS", dict.fromkeys(synthetic.DEMO_SPLITS, ("demo_light", fewer)))
    monkeypatch.setattr(lit_data, "DEMO_SPLITS", fewer)
    monkeypatch.setattr(segment_pairs, "DEMO_SPLITS", fewer)
    only = ["--tasks", "demo_light"] if name == "vtab" else []
    checked(name, "--data", "demo", *only)


def test_data_that_cannot_be_opened_are_one_problem(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\n")
    for name in CHECKS:
        named = ["--class-names", str(tmp_path / "names.txt")] if name == "folder" else []
        result = checked(name, "--data", str(tmp_path / "none"), *named, code=3)
        assert "none" in result["problems"][0]["text"], name
        assert result["fingerprint"] == {}


def test_several_processes_read_the_rows_of_one(folder: Path) -> None:
    split = ClassFolders(folder / "train")
    split.path(4).write_bytes(b"")
    single, shared = (
        validate.inspect_split("x", split.locate, partial(inspect_image, split), 30, workers=workers)
        for workers in (0, 2)
    )
    assert (single.digests == shared.digests).all()
    assert (single.sides == shared.sides).all()
    assert (single.unreadable, single.formats) == (shared.unreadable, shared.formats)
    assert list(single.unreadable) == [4]
    assert len(set(single.digests[single.readable].tolist())) == 29


def test_a_signal_stops_a_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise StoppedError(15)

    monkeypatch.setattr(signals, "check_here", stop)
    result = run_dpn("data", "check", "highres", "--data", str(folder), "-j", "0")
    assert result.exit_code == 75
    assert "no result was written" in result.stderr


def test_the_index_agrees_with_a_dictionary() -> None:
    g = np.random.default_rng(0)
    parts = []
    for name, count in (("a", 50), ("b", 0), ("c", 70)):
        part = SplitInspection(name, str, g.integers(0, 60, count).astype(np.uint64), np.zeros((count, 2), np.int32))
        part.unreadable = dict.fromkeys(range(0, count, 9), "x")
        parts.append(part)
    places = defaultdict(list)
    for part in parts:
        for row, digest in enumerate(part.digests.tolist()):
            if row not in part.unreadable:
                places[digest].append((part, row))
    expected = [group for group in places.values() if len(group) > 1]
    assert list(find_duplicates(parts)) == expected
    assert list(find_duplicates([])) == []


@pytest.mark.parametrize("quality", [1, 30, 75, 95, 100])
def test_the_quality_of_a_jpeg_is_read_from_its_tables(quality: int) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (9, 80, 200)).save(buffer, "JPEG", quality=quality)
    assert describe_format(Image.open(buffer)) == f"JPEG {quality}"
    own = io.BytesIO()
    Image.new("RGB", (16, 16)).save(own, "JPEG", qtables=[list(range(1, 65)), list(range(1, 65))])
    assert describe_format(Image.open(own)) == "JPEG"
    assert describe_format(Image.new("RGB", (2, 2))) == "not encoded"


def test_faults_are_raised_unless_they_are_gathered() -> None:
    with pytest.raises(DataError, match="alone"):
        report_error(DataError("alone"))
    with collect_errors() as outer:
        report_error(DataError("one"))
        with collect_errors() as inner:
            report_error(DataError("two"))
    assert [str(error) for error in outer] == ["one"]
    assert [str(error) for error in inner] == ["two"]
    with pytest.raises(DataError, match="again"):
        report_error(DataError("again"))
