"""`dpn data prepare vtab`: parts of splits, labels, and the folders, with a stand-in for TFDS's builders."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.data.sources.folder import FileList
from dpn_cli.errors import DataError, SaveError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from support.cli import run_dpn
from support.programs import ROOT, program_environment, run_program
from tasks.vtab import data
from tasks.vtab.config import VtabData
from tasks.vtab.prepare import builders, command, sources, write
from tasks.vtab.prepare.builders import Split
from tasks.vtab.prepare.sources import SOURCES, Example, Source, TfdsPart
from tasks.vtab.tasks import TASKS

QUIET = Console(quiet=True)
# VTAB's own code as a table: val200, test. train800 is train[:800] everywhere.
OFFICIAL = {
    "caltech101": ("train[2754:2954]", "test[0:6084]"),
    "cifar100": ("train[45000:45200]", "test[0:10000]"),
    "dtd": ("validation[0:200]", "test[0:1880]"),
    "flowers102": ("validation[0:200]", "test[0:6149]"),
    "pets": ("train[2944:3144]", "test[0:3669]"),
    "sun397": ("validation[0:200]", "test[0:21750]"),
    "svhn": ("train[65931:66131]", "test[0:26032]"),
    "camelyon": ("validation[0:200]", "test[0:32768]"),
    "eurosat": ("train[16200:16400]", "train[21600:27000]"),
    "resisc45": ("train[18900:19100]", "train[25200:31500]"),
    "retinopathy": ("validation[0:200]", "test[0:42670]"),
    "clevr_count": ("train[63000:63200]", "validation[0:15000]"),
    "clevr_dist": ("train[63000:63200]", "validation[0:15000]"),
    "dmlab": ("validation[0:200]", "test[0:22735]"),
    "dsprites_loc": ("train[589824:590024]", "train[663552:737280]"),
    "dsprites_ori": ("train[589824:590024]", "train[663552:737280]"),
    "kitti": ("validation[0:200]", "test[0:711]"),
    "smallnorb_azi": ("test[0:200]", "test[12150:24300]"),
    "smallnorb_ele": ("test[0:200]", "test[12150:24300]"),
}


def test_all_19_tasks_are_made_of_the_official_parts_of_16_data_sets() -> None:
    made = {}
    for source in SOURCES:
        parts = source.parts(source.sizes)
        for task in source.tasks:
            assert str(parts["train800"]) == "train[0:800]"
            made[task.name] = (str(parts["val200"]), str(parts["test"]))
            assert parts["test"].stop - parts["test"].start == task.test
    assert made == OFFICIAL
    assert len(SOURCES) == 16
    assert list(OFFICIAL) == [task.name for task in TASKS]


def objects(depths: list[float], kinds: list[int] | None = None) -> Example:
    """A scene of objects at depths, as CLEVR's and KITTI's builders give it."""
    places = np.array([[1.0, 2.0, depth] for depth in depths], np.float32).reshape(-1, 3)
    types = np.array(kinds or [0] * len(depths), np.int64)
    return {"objects": {"size": types, "pixel_coords": places, "location": places, "type": types}}


@pytest.mark.parametrize(
    ("depth", "bin_"),
    [(0.5, 0), (8, 0), (8.01, 1), (8.5, 1), (8.6, 2), (9, 2), (9.25, 3), (9.5, 3), (9.75, 4), (10, 4), (10.5, 5)],
)
def test_clevr_bins_the_depth_of_the_nearest_object(depth: float, bin_: int) -> None:
    assert sources.clevr_distance(objects([40.0, depth, 20.0])) == bin_


@pytest.mark.parametrize("count", range(3, 11))
def test_clevr_counts_3_to_10_objects(count: int) -> None:
    assert sources.clevr_count(objects([9.0] * count)) == count - 3


@pytest.mark.parametrize(
    ("distance", "bin_"), [(-1, 0), (0.5, 0), (8, 0), (8.01, 1), (20, 1), (20.01, 2), (80, 2), (999, 2)]
)
def test_kitti_bins_the_nearest_vehicle(distance: float, bin_: int) -> None:
    for kind in range(3):
        assert sources.kitti_distance(objects([90.0, distance, 2.0], [0, kind, 3])) == bin_


def test_kitti_without_a_car_van_or_truck_is_the_last_class() -> None:
    assert sources.kitti_distance(objects([2.0, 3.0], [3, 7])) == 3
    assert sources.kitti_distance(objects([])) == 3


def test_dsprites_bins_32_positions_in_twos_and_40_orientations_in_threes_and_twos() -> None:
    locations = [sources.dsprites_location({"label_x_position": np.int64(value)}) for value in range(32)]
    assert locations == [value for value in range(16) for _ in range(2)]
    orientations = [sources.dsprites_orientation({"label_orientation": np.int64(value)}) for value in range(40)]
    assert [orientations.count(value) for value in range(16)] == [3, 2] * 8
    assert orientations == [int(np.floor(value / 2.5)) for value in range(40)]


def test_smallnorb_and_others_take_the_label_of_their_name() -> None:
    example = {"label_azimuth": np.int64(17), "label_elevation": np.int64(8), "label": np.int64(4), "label_category": 2}
    actual = [label(example) for label in (sources.smallnorb_azimuth, sources.smallnorb_elevation, sources.class_label)]
    assert actual == [17, 8, 4]
    by_task = {name: label for source in SOURCES for name, label in source.labels.items()}
    own = {task.name for task in TASKS if task.group != "structured"} | {"dmlab"}
    assert {name for name, label in by_task.items() if label is sources.class_label} == own
    assert by_task["smallnorb_azi"] is sources.smallnorb_azimuth
    assert by_task["clevr_dist"] is sources.clevr_distance
    assert by_task["dsprites_loc"] is sources.dsprites_location


def png(values: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


class Stored:
    """A stand-in for a builder: image `i` of a split says which one it is."""

    def __init__(self, source: Source, sizes: dict[str, int] | None = None, more: int = 0) -> None:
        self.source, self.more = source, more
        self.name = f"{source.builder}:{max(source.majors)}.0.0"
        self.splits = {name: Split(size, 1000 * size) for name, size in {**source.sizes, **(sizes or {})}.items()}

    def examples(self, part: TfdsPart) -> Iterator[Example]:
        for row in range(part.start, part.stop - self.more):
            yield example(self.source, part.split, row)


def example(source: Source, split: str, row: int) -> Example:
    bits = np.unpackbits(np.array([row >> 8, row & 255, len(split)], np.uint8)).reshape(4, 6)
    values = bits if source.white == 1 else np.repeat(9 * bits[..., None], 3, 2)
    kinds = np.array([row % 5] * (3 + row % 8))
    places = np.full((len(kinds), 3), 7.75 + row % 6 / 2)
    return {
        "image": png(values),
        "label": np.int64(row % 2),
        "label_x_position": np.int64(row % 32),
        "label_orientation": np.int64(row % 40),
        "label_azimuth": np.int64(row % 18),
        "label_elevation": np.int64(row % 9),
        "objects": {"size": kinds, "pixel_coords": places, "location": places, "type": kinds},
    }


def small(builder: str) -> Source:
    """A source whose splits are small, of which a few images are tested on."""
    source = next(source for source in SOURCES if source.builder.partition("/")[0] == builder)
    (val, _), (test, _) = source.val, source.test
    train, held = (part.stop - part.start for part in list(source.parts(source.sizes).values())[:2])
    sizes = {name: train + held + 11 if name == "train" else held + 11 for name in source.sizes}
    return replace(
        source,
        sizes=sizes,
        val=(val, train + 1 if val == "train" else 0),
        test=(test, train + held + 1 if test == "train" else held + 1 if test == val else 0),
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 and 10 images in place of 800 and 200."""
    for module in (sources, data):
        monkeypatch.setattr(module, "TRAIN", 40)
        monkeypatch.setattr(module, "VAL", 10)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data sets, all of them prepared, without TensorFlow Datasets."""
    chosen = tuple(small(source.builder.partition("/")[0]) for source in SOURCES)
    monkeypatch.setattr(command, "SOURCES", chosen)
    monkeypatch.setattr(command, "library", lambda: None)
    monkeypatch.setattr(command, "open_builder", lambda source, *where: Stored(source))


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_bytes().hex() for path in folder.rglob("*") if path.is_file()}


def test_a_task_holds_the_parts_of_its_splits_as_stored(few: None, tmp_path: Path) -> None:
    source = small("svhn_cropped")
    (manifest,) = write.prepare(source, source.tasks, Stored(source), tmp_path, QUIET, {"dpn": "1"}).values()
    folder = tmp_path / "svhn"
    for split, part in source.parts(source.sizes).items():
        listed = FileList(folder, split)
        rows = range(part.start, part.stop)
        assert listed.labels == [row % 2 for row in rows]
        contents = [path.read_bytes() for path in listed.paths]
        assert contents == [example(source, part.split, row)["image"] for row in rows]
        assert [path.relative_to(folder).as_posix() for path in listed.paths][:2] == [
            f"images/{split}/000000.png",
            f"images/{split}/000001.png",
        ]
    union = FileList(folder, "train800val200")
    assert union.paths == FileList(folder, "train800").paths + FileList(folder, "val200").paths
    assert manifest["images"] == {"train800": 40, "val200": 10, "test": 21, "train800val200": 50}
    assert manifest["parts"] == {"train800": "train[0:40]", "val200": "train[41:51]", "test": "test[0:21]"}
    assert (manifest["builder"], manifest["label"]) == ("svhn_cropped:3.0.0", "The data set's own class.")
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    # GNU's own program as the judge of the digests.
    checked = run_program(["sha256sum", "--check", "--quiet", "--strict", write.SUMS], cwd=folder)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    named = {line.split("  ")[1] for line in (folder / write.SUMS).read_text().splitlines()}
    assert named == set(digests(folder)) - {write.SUMS, "manifest.json"}


def test_a_check_of_prepared_tasks_finds_nothing(few: None, offline: None, tmp_path: Path) -> None:
    out = tmp_path / "vtab-1k"
    words = "dsprites_loc,dsprites_ori,kitti"
    completed = run_dpn("data", "prepare", "vtab", "--out", str(out), "--tasks", words, "--json", "-q")
    assert completed.exit_code == 0, completed.output
    assert set(json.loads(completed.stdout)["tasks"].values()) == {"written"}
    checked = run_dpn("data", "check", "vtab", "--data", str(out), "--tasks", words, "--json", "-q", "-j", "0")
    result = json.loads(checked.stdout)
    assert (checked.exit_code, result["problems"]) == (0, [])
    assert all("test images, VTAB has" in text for text in result["warnings"])
    prints = json.loads((out / "kitti" / "manifest.json").read_text())["fingerprints"]
    assert result["fingerprint"]["kitti"] == prints
    # dSprites are black and white, and both of its tasks share their files.
    places = [out / task / "images" / "test" / "000003.png" for task in ("dsprites_loc", "dsprites_ori")]
    with Image.open(places[0]) as image:
        assert (image.mode, sorted(set(np.asarray(image).flat))) == ("L", [0, 255])
    assert places[0].samefile(places[1])


def test_jpeg_files_stay_as_they_are_and_are_no_copies(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (90, 20, 30)).save(file, "JPEG", quality=75)
    assert write.pack_image(file.getvalue(), 255, "here") == (file.getvalue(), "jpg")
    with pytest.raises(DataError, match=r"here: neither JPEG, PNG, GIF nor BMP"):
        write.pack_image(b"RIFF", 255, "here")

    def shades(self: Stored, part: TfdsPart) -> Iterator[Example]:
        for row in range(part.start, part.stop):
            file = io.BytesIO()
            Image.new("RGB", (8, 8), (row // 64 * 12, row % 64 * 4, len(part.split) * 9)).save(file, "JPEG", quality=75)
            yield {"image": file.getvalue(), "label": row % 2}

    monkeypatch.setattr(Stored, "examples", shades)
    source = small("dtd")
    write.prepare(source, source.tasks, Stored(source), tmp_path, QUIET, {})
    words = ["data", "check", "vtab", "--data", str(tmp_path), "--tasks", "dtd", "--json", "-q", "-j", "0"]

    def warned() -> tuple[bool, bool]:
        """Whether the check and the training call the files copies."""
        task = source.tasks[0]
        data.check_images({task: data.open_task(VtabData(source=str(tmp_path)), task)}, False, QUIET)
        checked = json.loads(run_dpn(*words).stdout)["warnings"]
        return any("quality 75" in text for text in checked), "JPEG files in dtd" in capsys.readouterr().err

    assert warned() == (False, False)
    (tmp_path / "dtd" / "manifest.json").unlink()
    assert warned() == (True, True)


KILLED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import test_prepare_vtab as tests
vars(tests.sources).update(TRAIN=40, VAL=10)
source, seen = tests.small("smallnorb"), []
def examples(self, part, all=tests.Stored.examples):
    for example in all(self, part):
        seen.append(part)
        if len(seen) == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        yield example
tests.Stored.examples = examples
tests.write.prepare(source, source.tasks, tests.Stored(source), Path(sys.argv[1]), tests.QUIET, {})
"""


def test_partial_folders_of_a_kill_are_rewritten_and_complete_ones_are_reused(
    few: None, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed = run_program(
        [sys.executable, "-c", KILLED, str(out), "45"],
        cwd=ROOT / "tests",
        env=program_environment(),
    )
    assert killed.returncode == -9, killed.stderr
    assert sorted(path.name for path in out.iterdir()) == [".smallnorb_azi.partial", ".smallnorb_ele.partial"]
    full = tmp_path / "whole"
    assert run_dpn("data", "prepare", "vtab", "-o", str(full), "--tasks", "smallnorb_azi,svhn", "-q").exit_code == 0
    assert run_dpn("data", "prepare", "vtab", "-o", str(out), "--tasks", "smallnorb_azi", "-q").exit_code == 0
    assert digests(out / "smallnorb_azi") == digests(full / "smallnorb_azi")

    def untouched(source: Source, *where: object) -> Stored:
        assert source.builder == "smallnorb"
        return Stored(source)

    monkeypatch.setattr(command, "open_builder", untouched)
    original = {path: path.stat().st_mtime_ns for path in (full / "smallnorb_azi").rglob("*")}
    words = ["-o", str(full), "--tasks", "smallnorb_ele,smallnorb_azi,svhn", "--json", "-q"]
    result = run_dpn("data", "prepare", "vtab", *words)
    assert json.loads(result.stdout)["tasks"] == {"svhn": "kept", "smallnorb_azi": "kept", "smallnorb_ele": "written"}
    assert original == {path: path.stat().st_mtime_ns for path in (full / "smallnorb_azi").rglob("*")}
    assert not list(out.glob(".*ele*"))  # what was left of it is gone


def test_a_signal_stops_between_two_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small("dtd")
    monkeypatch.setattr(signals, "_received", [15])
    with pytest.raises(StoppedError):
        write.prepare(source, source.tasks, Stored(source), tmp_path, QUIET, {})
    assert list(tmp_path.iterdir()) == []


def test_damaged_tasks_are_rewritten_when_asked(few: None, offline: None, tmp_path: Path) -> None:
    words = ["data", "prepare", "vtab", "-o", str(tmp_path), "--tasks", "dtd", "--json", "-q"]
    assert run_dpn(*words).exit_code == 0
    original = digests(tmp_path / "dtd")
    (tmp_path / "dtd" / "images" / "test" / "000002.png").write_bytes(b"x")
    assert json.loads(run_dpn(*words).stdout)["tasks"] == {"dtd": "kept"}
    second_result = run_dpn(*words, "--verify")
    assert json.loads(second_result.stdout)["tasks"] == {"dtd": "written"}
    assert "1 file missing or changed, images/test/000002.png first" in " ".join(second_result.stderr.split())
    assert digests(tmp_path / "dtd") == original
    assert json.loads(run_dpn(*words, "--verify").stdout)["tasks"] == {"dtd": "kept"}
    sums = tmp_path / "dtd" / write.SUMS
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[1:]))
    assert json.loads(run_dpn(*words, "--verify").stdout)["tasks"] == {"dtd": "written"}


def test_skipped_tasks_are_named_at_the_end_and_the_others_are_written(
    few: None, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hand(source: Source, *where: Any) -> Stored:
        if source.needs:
            raise DataError(builders.missing_by_hand(source, *where[:2]))
        return Stored(source)

    monkeypatch.setattr(command, "open_builder", by_hand)
    words = ["data", "prepare", "vtab", "-o", str(tmp_path / "out"), "--tfds-dir", str(tmp_path / "tfds"), "-q"]
    result = run_dpn(*words, "--tasks", "retinopathy,resisc45,dtd,smallnorb_ele")
    assert result.exit_code == 3
    output = " ".join(result.stderr.split())
    manual = tmp_path / "tfds" / "downloads" / "manual"
    assert f"resisc45 is not downloaded by itself: put {sources.RESISC45} {manual}" in output
    assert f"unpacked to folders of those names, in {manual}" in output
    assert output.endswith("error: 2 tasks left: resisc45, retinopathy; the reasons are above, the others are written")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dtd", "smallnorb_ele"]
    assert "2 tasks in" in result.stdout


def test_too_few_images_labels_outside_the_classes_and_other_sizes_are_reported(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small("dtd")
    with pytest.raises(DataError, match=r"dtd:3.0.0: train\[0:40\] has 37 examples, and train800 of dtd 40"):
        write.prepare(source, source.tasks, Stored(source, more=3), tmp_path, QUIET, {})
    lacking = Stored(source)
    del lacking.splits["test"]
    with pytest.raises(DataError, match="dtd:3.0.0: no split test"):
        write.prepare(source, source.tasks, lacking, tmp_path, QUIET, {})
    bad = replace(source, labels={"dtd": lambda example: 47})
    with pytest.raises(DataError, match=r"dtd: train800 image images/train800/000000.png would have the label 47, and"):
        write.prepare(bad, bad.tasks, Stored(source), tmp_path, QUIET, {})
    assert list(tmp_path.iterdir()) == []
    (manifest,) = write.prepare(source, source.tasks, Stored(source, {"test": 22}), tmp_path, QUIET, {}).values()
    assert manifest["images"]["test"] == 22
    assert "dtd:3.0.0: its split test has 22 examples, VTAB's has 21" in " ".join(capsys.readouterr().err.split())
    assert len(manifest["warnings"]) == 1
    huge = Stored(source)
    huge.splits["train"] = Split(61, 10**18)
    with pytest.raises(SaveError, match=r"dtd will take about \d+\.\d GB, and \d+\.\d GB are free"):
        write.prepare(source, source.tasks, huge, tmp_path, QUIET, {})


def test_foreign_folders_and_a_missing_library_end_the_command_immediately(tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    words = ["data", "prepare", "vtab", "-o", str(tmp_path), "-q", "--tasks"]
    result = run_dpn(*words, "svhn,dtd")
    assert result.exit_code == 2
    assert f"{tmp_path / 'svhn'}: there already, and not written by this command" in " ".join(result.stderr.split())
    result = run_dpn(*words, "svnh")
    assert (result.exit_code, "did you mean 'svhn'" in result.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    assert "a file; name a folder" in run_dpn("data", "prepare", "vtab", "-o", str(tmp_path / "file"), "-q").stderr


def test_without_tensorflow_datasets_one_line_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    result = run_dpn("data", "prepare", "vtab", "-o", str(tmp_path / "out"), "-q")
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (2, 1)
    assert "tensorflow is not installed; pip install 'dpn-cli[prepare]'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_newest_fitting_version_that_is_prepared_is_read(tmp_path: Path) -> None:
    source = next(source for source in SOURCES if source.builder == "sun397/tfds")
    manual = tmp_path / "manual"
    assert builders.find_prepared(source, tmp_path) is None
    for version, full in (("4.0.0", True), ("4.10.0", True), ("4.2.0", True), ("4.11.0", False), ("5.0.0", True)):
        folder = tmp_path / "sun397" / "tfds" / version
        folder.mkdir(parents=True)
        if full:
            (folder / builders.WRITTEN).write_text("{}")
    (tmp_path / "sun397" / "tfds" / "4.0.0.incomplete").mkdir()
    assert builders.find_prepared(source, tmp_path) == tmp_path / "sun397" / "tfds" / "4.10.0"
    retinopathy = next(source for source in SOURCES if "retinopathy" in source.builder)
    assert "trainLabels.csv" in builders.missing_by_hand(retinopathy, tmp_path, manual)
    for name in retinopathy.needs:
        (manual / name).mkdir(parents=True)
    assert builders.missing_by_hand(retinopathy, tmp_path, manual) == ""


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_the_space_is_that_of_the_images_and_half_a_block_each(
    spare: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder: Any = SimpleNamespace(splits={"train": Split(1000, 500_000), "test": Split(50, 0)})
    parts = {"train800": TfdsPart("train", 0, 800), "test": TfdsPart("test", 0, 50)}
    needed = 800 * (500 + 2048) + 50 * 2048
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed + spare))  # type: ignore[attr-defined]
    if fits:
        write._check_space(parts, builder, TASKS[:1], tmp_path / "new" / "folder")
        return
    with pytest.raises(SaveError, match=f"{TASKS[0].name} will take about 0.0 GB, and 0.0 GB are free"):
        write._check_space(parts, builder, TASKS[:1], tmp_path / "new" / "folder")
