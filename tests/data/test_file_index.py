"""Lists of the images in folders: their order, what they take, and when a kept one is made again."""

from __future__ import annotations

import hashlib
import os
import pickle
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpn_cli.data import file_index
from dpn_cli.data.compact import PackedStrings, pack_integers
from dpn_cli.data.decode import SUFFIXES
from dpn_cli.data.file_index import find_files
from dpn_cli.data.sources.base import hash_lines
from dpn_cli.data.sources.folder import ClassFolders, FolderImages
from dpn_cli.data.splits import hold_out
from dpn_cli.errors import DataError
from dpn_cli.run.console import Console, print_message
from support.images import write_class_folders

ODD = ["b.jpg", "a.JPG", "a/z.jpg", "a-b/c.png", "a.b/c.png", "a/b/c.tif", "ä.jpg", ".jpg", "..jpg", "x.jpg.", "A.jpg"]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of any length are kept, whenever their folders were made."""
    monkeypatch.setattr(file_index, "KEPT", 1)
    monkeypatch.setattr(file_index, "SAME_DATE", -(2**62))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the system was asked for what is in a folder, and for a file's or a folder's status."""
    counted = Counter[str]()

    def count(name: str) -> None:
        asked = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += isinstance(arguments[0], str)  # pathlib asks with a Path
            return asked(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    count("scandir")
    count("stat")
    return counted


def test_images_are_found_in_the_order_of_pathlib(tmp_path: Path) -> None:
    for name in [*ODD, "none.txt", os.fsdecode(b"\xff.jpg")]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x" * len(name))
    for name in ("linked", "linked.jpg"):
        (tmp_path / name).symlink_to(tmp_path / "a")
    named = [path for path in tmp_path.rglob("*") if path.suffix.lower() in SUFFIXES]
    expected = sorted(path for path in named if not path.is_dir())
    assert find_files(tmp_path) == [(path, path.stat().st_size) for path in expected]
    split = FolderImages(tmp_path)
    assert [split.path(row) for row in range(len(split.labels))] == expected
    assert list(split.listing.names) == [str(path.relative_to(tmp_path)) for path in expected]
    assert split.key(0) == split.listing.names[0]


def test_names_are_a_list_in_one_piece_of_memory() -> None:
    given = ["n01/a.jpg", "", "ä/b.jpg", os.fsdecode(b"\xff.jpg")]
    for names in (
        PackedStrings(given),
        pickle.loads(pickle.dumps(PackedStrings(given))),
        PackedStrings.read(PackedStrings(given).arrays("x"), "x"),
    ):
        assert list(names) == given
        assert names[-1] == given[-1]
        assert names[1:3] == given[1:3]
        with pytest.raises(IndexError):
            names[4]
    many = PackedStrings(f"n{number:08d}/{number}.jpg" for number in range(1000))
    assert len(pickle.dumps(many)) < 1000 * (len("n00000000/000.jpg") + 8) + 200


def test_a_image_takes_its_name_and_a_few_bytes(tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path, classes=4, each=25, size=(4, 4)))
    taken = len(pickle.dumps((split.listing.names, split.sizes, split.labels)))
    assert taken < 100 * (len("class0/000.jpg") + 8 + 8 + 4) + 400
    remaining, _ = hold_out(split, 0.2)
    assert [type(part) for part in (remaining.labels, remaining.sizes)] == [array, array]


def test_each_image_is_checked_once(tmp_path: Path, calls: Counter[str]) -> None:
    root = write_class_folders(tmp_path, classes=3, each=5)
    calls.clear()
    ClassFolders(root)
    assert calls == {"scandir": 3, "stat": 3 + 15}


@pytest.mark.usefixtures("kept")
def test_a_cached_list_is_read_without_listing_a_folder(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_class_folders(tmp_path, classes=3, each=5)
    first = ClassFolders(root)
    calls.clear()
    monkeypatch.setattr(file_index, "SAMPLE", 5)
    second = ClassFolders(root)
    assert calls == {"stat": 3 + 5}  # the folders, and a sample of the images
    assert [second.key(row) for row in range(15)] == [first.key(row) for row in range(15)]
    assert (second.sizes, second.labels, second.classes) == (first.sizes, first.labels, first.classes)
    assert list(FolderImages(root).labels) == [0] * 15  # another list of the same folder


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("change", ["add", "remove", "rename", "class", "write", "damage", "inner"])
def test_a_cached_list_is_rebuilt_after_a_change(change: str, tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "photos", classes=2, each=3)
    (root / "class1" / "inner").mkdir()
    ClassFolders(root)
    (file,) = (tmp_path.parent / os.environ["DPN_HOME"]).glob("cache/listings/*.npz")
    one = root / "class0" / "001.jpg"
    if change == "add":
        (root / "class1" / "new.jpg").write_bytes(b"new")
    elif change == "remove":
        one.unlink()
    elif change == "rename":
        one.rename(one.with_name("z.jpg"))
    elif change == "class":
        (root / "class2").mkdir()
        (root / "class2" / "new.jpg").write_bytes(b"new")
    elif change == "write":
        one.write_bytes(b"shorter")
    elif change == "inner":
        (root / "class1" / "inner" / "new.jpg").write_bytes(b"new")
    else:
        file.write_bytes(file.read_bytes()[:-40])
    split = ClassFolders(root)
    expected = sorted(path for path in root.rglob("*.jpg"))
    assert [split.path(row) for row in range(len(split.labels))] == expected
    assert list(split.sizes) == [path.stat().st_size for path in expected]


@pytest.mark.usefixtures("kept")
def test_damage_outside_the_sample_is_noticed_on_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "SAMPLE", 1)
    root = write_class_folders(tmp_path, classes=2, each=3)
    ClassFolders(root)
    mended = root / "class1" / "001.jpg"
    mended.write_bytes((root / "class0" / "002.jpg").read_bytes())
    split = ClassFolders(root)
    if split.sizes[4] == mended.stat().st_size:
        pytest.fail("the two images have the same size")
    with pytest.raises(DataError, match="when the data were listed"):
        split.pixels(4)
    second = ClassFolders(root)
    assert second.sizes[4] == mended.stat().st_size
    assert second.pixels(4).shape == (40, 50, 3)


def test_lists_of_few_images_and_of_recent_folders_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_class_folders(tmp_path, classes=2, each=2)
    for most, since in ((5, -(2**62)), (1, 2**62)):
        monkeypatch.setattr(file_index, "KEPT", most)
        monkeypatch.setattr(file_index, "SAME_DATE", since)
        assert ClassFolders(root).listing.file is None
    assert not list(Path(os.environ["DPN_HOME"]).glob("cache/listings/*"))


@pytest.mark.usefixtures("kept")
def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    assert ClassFolders(write_class_folders(tmp_path / "photos", classes=2, each=2)).listing.file is None
    monkeypatch.delenv("DPN_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert len(ClassFolders(tmp_path / "photos").labels) == 4


def test_a_long_listing_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_class_folders(tmp_path, classes=2, each=2)
    monkeypatch.setattr(file_index, "LINE_EVERY", 0.0)
    with Console().capture_logs():
        ClassFolders(root)
    assert f"{root}: 4 images found" in capsys.readouterr().err.replace("\n", "")
    with Console(quiet=True).capture_logs():
        ClassFolders(root)
    print_message("nobody hears it")
    assert not capsys.readouterr().err


def test_holding_out_is_a_loop_over_classes(tmp_path: Path) -> None:
    class Named(FolderImages):
        def __init__(self, labels: list[int]) -> None:
            self.labels, self.sizes = labels, [1] * len(labels)
            self.listing = file_index.FileIndex(
                PackedStrings(f"{row}.jpg" for row in range(len(labels))), pack_integers(self.sizes)
            )
            self.root = tmp_path

    labels = [*np.random.default_rng(0).integers(0, 7, 200).tolist(), 9]
    split = Named(labels)
    order = sorted(range(len(labels)), key=lambda row: hashlib.sha256(f"{row}.jpg".encode()).digest())
    expected = []
    for label in sorted(set(labels)):
        rows = [row for row in order if labels[row] == label]
        expected += rows[len(rows) - min(len(rows) - 1, max(1, round(0.15 * len(rows)))) :]
    remaining, apart = hold_out(split, 0.15)
    assert [int(apart.key(row)[:-4]) for row in range(len(apart.labels))] == sorted(expected)
    assert [int(remaining.key(row)[:-4]) for row in range(len(remaining.labels))] == sorted(
        {*range(len(labels))} - {*expected}
    )


def test_a_digest_of_lines_equals_the_digest_of_the_joined_text() -> None:
    for lines in ([], ["1 20"], ["1 20", "", "ä"]):
        assert hash_lines(lines) == hashlib.sha256("\n".join(lines).encode()).hexdigest()
