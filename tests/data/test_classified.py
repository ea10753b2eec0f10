"""Labelled images with named classes: folders, hub data sets, shards; splits by a fixed rule; clear refusals."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from timm.data import ImageNetInfo

from dpn_cli.data.image_source import ImageSource, find_splits, open_split
from dpn_cli.data.imagenet import describe_imagenet
from dpn_cli.data.sources.base import ImageSubset, fingerprint
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.sources.shards import LabelledShardImages, expand_pattern
from dpn_cli.data.splits import ClassData, hash_order, hold_out, minival_size, open_class_data
from dpn_cli.errors import DataError
from support.images import write_class_folders, write_class_shard


def test_class_folders_are_read_in_alphabetical_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    split = ClassFolders(write_class_folders(tmp_path, classes=3, each=2))
    assert split.classes == ("class0", "class1", "class2")
    assert list(split.labels) == [0, 0, 1, 1, 2, 2]
    assert split.pixels(0).shape == (40, 50, 3)
    assert split.locate(5) == str(tmp_path / "class2" / "001.jpg")


def test_the_last_hundredth_is_watched_and_small_data_sets_get_more() -> None:
    assert minival_size(1_281_167, None) == 12_812  # train[99%:]
    assert minival_size(1_281_167, 0.01) == 12_812
    assert (minival_size(200, None), minival_size(3000, None), minival_size(9, None)) == (20, 50, 1)
    assert minival_size(200, 0.0) == 0
    # Fifty images choose nothing: to choose by, there are at least 500, or a tenth where that is less.
    assert [minival_size(images, None, True) for images in (200, 3000, 20_000, 1_281_167)] == [20, 300, 500, 12_812]
    assert (minival_size(3000, 0.02, True), minival_size(3000, 0.0, True)) == (60, 0)


def test_the_splits_are_a_rule_and_not_a_draw(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path / "a", classes=2, each=20)
    data = open_class_data(ImageSource(str(root), val_fraction=0.25), None)
    assert (len(data.val.labels), len(data.minival.labels), len(data.train.labels)) == (10, 3, 27)
    assert list(data.val.labels).count(0) == 5  # of every class
    places = [{part.locate(i) for i in range(len(part.labels))} for part in (data.train, data.minival, data.val)]
    assert len(set.union(*places)) == 40
    assert sum(map(len, places)) == 40
    # Another folder beside the classes changes nothing, and neither does another machine's path.
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    second = open_class_data(ImageSource(str(moved), val_fraction=0.25), None)
    assert {Path(w).name for w in places[2]} == {Path(second.val.locate(i)).name for i in range(10)}


# Six names by their SHA-256, as sha256sum gives it: 0ab4, 4b61, 5844, 6172, 6b7d, 827d.
ORDER = [f"class{name}.jpg" for name in ("1/000", "1/002", "0/001", "0/002", "1/001", "0/000")]


def test_the_hash_order_depends_on_names_only(tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path / "here", classes=2, each=3))
    assert [split.key(row) for row in hash_order(split)] == ORDER
    backwards = ImageSubset(split, range(5, -1, -1))
    assert [backwards.key(row) for row in hash_order(backwards)] == ORDER
    (tmp_path / "here").rename(tmp_path / "there")
    moved = ClassFolders(tmp_path / "there")
    for row in range(6):
        moved.path(row).write_bytes(b"another content")
    assert [moved.key(row) for row in hash_order(moved)] == ORDER


def test_labels_and_their_order_are_in_a_fingerprint(tmp_path: Path) -> None:
    write_class_folders(tmp_path, classes=2, each=2)
    split = ClassFolders(tmp_path)
    split.sizes = [700] * 4
    full = fingerprint(split)
    for labels in ([1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 1, 2]):
        split.labels = labels
        assert fingerprint(split) != full
    split.labels = [0, 0, 1, 1]
    assert fingerprint(split) == full
    split.sizes = [700, 700, 700, 701]
    assert fingerprint(split) != full


def test_members_of_one_name_in_two_folders_of_a_shard_are_two(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "two.tar", "w") as archive:
        for number, place in enumerate(("a/1", "b/1", "b/c/1")):
            buffer = io.BytesIO()
            Image.new("RGB", (20, 10), (number * 20, 0, 0)).save(buffer, "PNG")
            for name, content in ((f"{place}.png", buffer.getvalue()), (f"{place}.cls", str(number).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    split, _ = open_split(ImageSource(f"wds:{tmp_path / 'two.tar'}"), "train")
    assert [split.key(row) for row in range(3)] == ["two.tar/a/1.png", "two.tar/b/1.png", "two.tar/b/c/1.png"]
    assert list(split.labels) == [0, 1, 2]
    assert [int(split.pixels(row)[0, 0, 0]) for row in range(3)] == [0, 20, 40]


def test_a_class_of_one_image_stays_in_training(tmp_path: Path) -> None:
    write_class_folders(tmp_path, classes=2, each=4)
    for path in sorted((tmp_path / "class1").iterdir())[1:]:
        path.unlink()
    remaining, apart = hold_out(ClassFolders(tmp_path), 0.5)
    assert list(remaining.labels) == [0, 0, 1]
    assert list(apart.labels) == [0, 0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("rename", "only in training: class1; only in validation: other"),
        ("empty", "class0: a class without images"),
        ("none", "no class folders"),
        ("no val", "no validation images; put them next to"),
    ],
)
def test_folders_that_do_not_fit_are_refused(spoil: str, message: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_class_folders(tmp_path / split, classes=2, each=2)
    if spoil == "rename":
        (tmp_path / "val" / "class1").rename(tmp_path / "val" / "other")
    elif spoil == "empty":
        for path in (tmp_path / "train" / "class0").iterdir():
            path.unlink()
    elif spoil == "none":
        (tmp_path / "empty").mkdir()
    else:
        (tmp_path / "val").rename(tmp_path.parent / f"{tmp_path.name}-gone")
    with pytest.raises(DataError, match=message) as caught:
        open_class_data(ImageSource(str(tmp_path / "empty" if spoil == "none" else tmp_path)), None)
    assert "\n" not in str(caught.value)


def hub(folder: Path, names: list[str] | None, image: str = "image", label: str = "label") -> str:
    import datasets

    rows: dict[str, list[object]] = {image: [], label: []}
    for number in range(8):
        buffer = io.BytesIO()
        Image.new("RGB", (20, 10), (number * 20, 0, 0)).save(buffer, "PNG")
        rows[image].append({"bytes": buffer.getvalue(), "path": None})
        rows[label].append(number % 2)
    kind = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    table = datasets.Dataset.from_dict(rows, features=datasets.Features({image: datasets.Image(), label: kind}))
    folder.mkdir()
    table.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    table.select(range(2)).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    table.select(range(4)).to_parquet(str(folder / "validation-00000-of-00001.parquet"))
    return f"hf:{folder}"


def test_a_hub_data_set_brings_its_classes_and_validation_split(tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", ["cat", "dog"], "image", "kind")
    data = open_class_data(ImageSource(folder), 0.0)
    assert data.classes == ("cat", "dog")
    assert (len(data.train.labels), len(data.val.labels)) == (8, 4)
    assert data.val.pixels(1).shape == (10, 20, 3)


def test_a_hub_data_set_without_a_class_column_asks_for_it(tmp_path: Path) -> None:
    folder = hub(tmp_path / "set", None, label="kind")
    with pytest.raises(DataError, match=r"which column holds the label\? The columns are image, kind"):
        open_class_data(ImageSource(folder), None)
    assert open_class_data(ImageSource(folder, label_column="kind"), None).classes == ("0", "1")


def test_shards_are_read_at_random(tmp_path: Path) -> None:
    for number in range(3):
        write_class_shard(tmp_path / f"part-{number:02d}.tar", 4 * number, 4)
    pattern = f"wds:{tmp_path}/part-{{00..02}}.tar"
    data = open_class_data(ImageSource(pattern, val_fraction=0.3), 0.0)
    assert data.classes == ("0", "1", "2")
    assert len(data.train.labels) + len(data.val.labels) == 12
    split = LabelledShardImages(str(tmp_path / "part-*.tar"))
    assert [int(split.pixels(i)[0, 0, 0]) for i in (11, 0, 7)] == [220, 0, 140]
    assert [split.labels[i] for i in (11, 0, 7)] == [2, 0, 1]
    (tmp_path / "classnames.txt").write_text("red\ngreen\nblue\n")
    assert open_split(ImageSource(pattern), "train")[1] == ("red", "green", "blue")


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    write_class_shard(tmp_path / "unlabelled.tar", 0, 2, label=False)
    (tmp_path / "text.tar").write_text("no archive")
    for name, message in {
        "unlabelled.tar": "0000.png has no 0000.cls",
        "text.tar": "not an uncompressed tar file",
        "missing-{0..2}.tar": "missing-0.tar: no such file",
    }.items():
        with pytest.raises(DataError, match=message):
            open_split(ImageSource(f"wds:{tmp_path / name}"), "train")
    assert [path.name for path in expand_pattern(str(tmp_path / "{text,unlabelled}.tar"))] == [
        "text.tar",
        "unlabelled.tar",
    ]


def test_imagenets_folders_are_recognised_and_counted() -> None:
    class Counted:
        def __init__(self, images: int) -> None:
            self.labels = range(images)

    official = tuple(ImageNetInfo("imagenet-1k").label_names())

    def say(train: int, classes: tuple[str, ...]) -> str | None:
        parts: list[Any] = [Counted(train), Counted(12_812), Counted(50_000)]
        return describe_imagenet(ClassData(parts[0], parts[1], parts[2], classes))

    assert say(1_268_355, official) == "ImageNet-1k: official class order, 1281167 + 50000 images"
    assert "are official; numbers are not comparable" in str(say(1_000_000, official))
    assert "100 of 1000" in str(say(1_268_355, official[:100]))
    assert say(10, ("cat", "dog")) is None


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_split_has_any_of_its_names(name: str, tmp_path: Path) -> None:
    for split in ("train", name, "test"):
        write_class_folders(tmp_path / split, classes=2, each=3)
    source = ImageSource(str(tmp_path))
    assert find_splits(source) == ["train", "val", "test"]
    images, _ = open_split(source, "val")
    assert all(f"/{name}/" in images.locate(row) for row in range(len(images.labels)))


def test_a_test_split_validates_unless_a_fraction_is_held_out(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_class_folders(tmp_path / split, classes=2, each=20)
    source = ImageSource(str(tmp_path))
    assert find_splits(source) == ["train", "test"]
    assert "/test/" in open_class_data(source, 0.0).val.locate(0)
    held_out = open_class_data(replace(source, val_fraction=0.5), 0.0).val
    assert "/train/" in held_out.locate(0)
    assert len(held_out.labels) == 20
