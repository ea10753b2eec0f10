"""Packed data sets: the same images and splits as before, resumable, and damage is noticed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.data.image_source import ImageSource, find_splits, open_split
from dpn_cli.data.sources import pack_writer
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.sources.pack_writer import PackOptions, pack
from dpn_cli.data.sources.packs import PackedImages
from dpn_cli.data.splits import hash_order, open_class_data, open_tuning_data
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.run import signals
from support.cli import run_dpn
from support.images import write_class_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_class_folders(tmp_path / "photos" / "train", each=20)
    write_class_folders(tmp_path / "photos" / "val", each=4)
    return tmp_path / "photos"


def packed(source: Path, out: Path, packing: PackOptions, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    monkeypatch.setattr(pack_writer, "SHARD_IMAGES", 25)
    splits = {name: open_split(ImageSource(str(source)), name)[0] for name in ("train", "val")}
    messages: list[str] = []
    options: Any = {"workers": 1, "skip_bad": False, "progress": messages.append, **arguments}
    ordered = {name: (split, hash_order(split)) for name, split in splits.items()}
    return pack(ordered, open_split(ImageSource(str(source)), "train")[1], out, packing, **options), messages


def test_an_unresized_pack_holds_the_bytes_of_the_files_and_the_same_splits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    manifest, _ = packed(folder, out, PackOptions(size=None), monkeypatch)
    assert [entry["images"] for entry in manifest["splits"]["train"].values()] == [25, 25, 10]
    split, files = PackedImages(out, "train"), ClassFolders(folder / "train")
    at = {files.key(index): index for index in range(60)}
    for index in range(60):
        row = at[split.key(index)]
        assert split.labels[index] == files.labels[row]
        assert split.sizes[index] == files.sizes[row]
        np.testing.assert_array_equal(split.pixels(index), files.pixels(row))
    actual, expected = (open_class_data(ImageSource(str(place)), None) for place in (out, folder))
    assert actual.classes == expected.classes
    for name in ("train", "minival", "val"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert {one.key(i) for i in range(len(one.labels))} == {other.key(i) for i in range(len(other.labels))}, name


def test_images_are_made_smaller_and_never_larger(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(np.zeros((10, 7, 4), dtype=np.uint8)).save(folder / "train" / "class0" / "small.png")
    for packing in (PackOptions(20, "jpeg"), PackOptions(20, "ppm")):
        packed(folder, tmp_path / packing.encode, packing, monkeypatch)
        split = PackedImages(tmp_path / packing.encode, "train")
        sizes = {split.open(index).size for index in range(61)}
        assert sizes == {(25, 20), (7, 10)}
        formats = {"jpeg": {"JPEG", "PNG"}, "ppm": {"PPM"}}[packing.encode]  # an image that fits keeps its bytes
        assert {split.open(index).format for index in range(61)} == formats
    exact, source = PackedImages(tmp_path / "ppm", "train"), ClassFolders(folder / "train")
    row = next(index for index in range(61) if source.key(index) == exact.key(0))
    small = Image.fromarray(source.pixels(row)).resize((25, 20), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(exact.pixels(0), np.asarray(small))


def test_other_libraries_read_the_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(folder, tmp_path / "pack", PackOptions(size=None), monkeypatch)
    with tarfile.open(tmp_path / "pack" / "train" / "000000.tar") as archive:
        names = archive.getnames()
        assert names[:2] == ["0000000000.jpg", "0000000000.cls"]
        image = archive.extractfile(names[0])
        assert image
        assert Image.open(io.BytesIO(image.read())).size == (50, 40)
    shards, classes = open_split(ImageSource(f"wds:{tmp_path}/pack/train/*.tar"), "train")
    assert list(shards.labels) == list(PackedImages(tmp_path / "pack", "train").labels)
    assert classes == ("class0", "class1", "class2")


def test_a_stopped_packing_continues_and_repairs_damage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, packing = tmp_path / "pack", PackOptions(20)
    full, _ = packed(folder, tmp_path / "whole", packing, monkeypatch)

    def stop(text: str) -> None:
        signal.raise_signal(signal.SIGTERM)

    with signals.listen(), pytest.raises(StoppedError):
        packed(folder, out, packing, monkeypatch, progress=stop)
    with pytest.raises(DataError, match="has not finished; pack the data into"):
        open_split(ImageSource(str(out)), "train")
    kept = (out / "train" / "000000.tar").stat().st_mtime_ns
    second, _ = packed(folder, out, packing, monkeypatch)
    assert second == full
    assert (out / "train" / "000000.tar").stat().st_mtime_ns == kept
    damaged = out / "train" / "000001.tar"
    content = bytearray(damaged.read_bytes())
    content[600] ^= 1
    damaged.write_bytes(content)
    split = PackedImages(out, "train")
    with pytest.raises(DataError, match=r"000001.tar \(class./...\.jpg\): damaged since it was packed"):
        split.open(25)
    (out / "val" / "000000.npz").unlink()
    mended, told = packed(folder, out, packing, monkeypatch)
    assert mended == full
    assert len(told) == 2
    PackedImages(out, "train").pixels(25)


def shorten(path: Path) -> None:
    path.write_text(path.read_text()[:300])


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda out: (out / "train" / "000001.tar").unlink(), r"000001.tar: a damaged pack \(missing\); pack the data"),
        (lambda out: (out / "train" / "000001.tar").write_bytes(b"x"), r"\(1 bytes instead of \d+\)"),
        (lambda out: (out / "train" / "000000.npz").write_bytes(b"PK"), "000000.npz: a damaged pack"),
        (lambda out: shorten(out / "manifest.json"), "manifest.json: a damaged manifest .* delete the pack"),
        (
            lambda out: replace(out / "manifest.json", '"complete": true', '"whole": 1'),
            "a damaged manifest .'complete'.",
        ),
    ],
)
def test_missing_and_damaged_shards_are_named(
    harm: Any, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch)
    harm(tmp_path / "pack")
    with pytest.raises(DataError, match=message):
        open_class_data(ImageSource(str(tmp_path / "pack")), None)


def test_packs_of_other_things_and_other_folders_are_left_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch)
    with pytest.raises(DpnError, match="holds a pack with another size; pass another --out"):
        packed(folder, tmp_path / "pack", PackOptions(30), monkeypatch)
    (folder / "train" / "class0" / "000.jpg").unlink()
    with pytest.raises(DpnError, match="another sources"):
        packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch)
    with pytest.raises(DpnError, match="the folder is not empty and is not a pack"):
        packed(folder, folder, PackOptions(20), monkeypatch)


def test_unreadable_images_are_named_or_counted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train" / "class1" / "003.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"003.jpg: not a readable image"):
        packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch)
    shutil.rmtree(tmp_path / "pack")
    manifest, _ = packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch, skip_bad=True)
    assert sum(entry["left_out"] for entry in manifest["splits"]["train"].values()) == 1
    assert len(PackedImages(tmp_path / "pack", "train").labels) == 59


def test_validation_images_of_another_folder_are_packed(folder: Path, tmp_path: Path) -> None:
    command = ["data", "pack", "--data", str(folder / "train"), "--val-data", str(folder / "val")]
    result = run_dpn(*command, "-o", str(tmp_path / "pack"), "--json")
    assert result.exit_code == 0, result.output
    assert {name: split["images"] for name, split in json.loads(result.stdout).items()} == {"train": 60, "val": 12}
    split, _ = open_split(ImageSource(str(tmp_path / "pack")), "val")
    assert {split.key(row) for row in range(12)} == {f"class{c}/{n:03}.jpg" for c in range(3) for n in range(4)}
    refused = run_dpn(*command, "-o", str(folder / "val/pack"))
    assert refused.exit_code == 2
    assert f"inside --val-data {folder / 'val'}" in refused.stderr.replace("\n", "")


def test_the_command_packs_and_prints_a_summary(folder: Path, tmp_path: Path) -> None:
    completed = run_dpn(
        "data", "pack", "--data", str(folder), "--out", str(tmp_path / "p"), "--size", "20", "--json", "-q"
    )
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert (result["train"]["images"], result["val"]["images"], result["train"]["shards"]) == (60, 12, 1)
    for arguments, message in [
        (["--size", "0"], "--size: a number of pixels up to 16384, or keep (got '0')"),
        (["--encode", "webp"], "--encode: one of jpeg, ppm (got 'webp')"),
        (["--data", "nowhere"], "--data nowhere: no such folder"),
    ]:
        completed = run_dpn("data", "pack", "--data", str(folder), "--out", str(tmp_path / "q"), *arguments)
        assert completed.exit_code in (2, 3)
        assert message in completed.stderr


def test_splits_with_other_classes_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / "val" / "class0")
    result = run_dpn("data", "pack", "--data", str(folder), "--out", str(tmp_path / "p"))
    assert result.exit_code == 3
    assert "different classes: only in training: class0" in result.stderr
    assert not (tmp_path / "p").exists()
    result = run_dpn("data", "pack", "--data", str(folder), "--out", str(folder / "pack"))
    assert result.exit_code == 2
    assert "inside --data" in result.stderr


def hub(root: Path, **splits: list[int]) -> Path:
    """A local data set of parquet files: one white image per label."""
    import datasets

    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), "white").save(buffer, "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    root.mkdir()
    for name, labels in splits.items():
        rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * len(labels), "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(root / f"{name}-00000-of-00001.parquet")
    return root


def test_hub_splits_without_labels_are_left_out_and_none_stands_in_for_another(tmp_path: Path) -> None:
    run_folder = hub(tmp_path / "hub", train=[0, 1, 0, 1], validation=[0, 1], test=[-1, -1])
    result = run_dpn(
        "data", "pack", "--data", f"hf:{run_folder}", "--out", str(tmp_path / "p"), "--size", "keep", "--json"
    )
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"train", "val"}
    assert "test has no labels and is left out" in result.stderr.replace("\n", " ")
    with pytest.raises(DataError, match="its test images have the label -1, which means no label"):
        open_split(ImageSource(f"hf:{run_folder}"), "test")
    split = PackedImages(tmp_path / "p", "train")
    assert (split.classes, split.open(0).format) == (("a", "b"), "PNG")
    two = hub(tmp_path / "two", train=[0, 1, 0, 1], test=[0, 1])
    assert find_splits(ImageSource(f"hf:{two}")) == ["train", "test"]
    with pytest.raises(DataError, match="no val images; a sweep chooses on val and reports test"):
        open_tuning_data(ImageSource(f"hf:{two}"))


def test_a_pack_of_one_split_validates_another_data_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_dpn("data", "pack", "--data", str(folder / "val"), "--out", str(tmp_path / "v"), "-q").exit_code == 0
    data = open_class_data(ImageSource(str(folder), val_location=str(tmp_path / "v")), None)
    assert len(data.val.labels) == 12
    with pytest.raises(DataError, match="a pack of train, without val"):
        open_split(ImageSource(str(tmp_path / "v")), "val")
    (folder / "manifest.json").write_text('{"splits": {"train": {}}, "classes": []}')
    assert len(open_split(ImageSource(str(folder)), "train")[0].labels) == 60  # somebody else's manifest


def test_images_that_an_encoding_cannot_hold_are_named_or_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (70_000, 21)).save(folder / "train" / "class1" / "wide.png")
    with pytest.raises(DataError, match=r"wide.png: 66667x20 pixels cannot be stored as jpeg"):
        packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch)
    shutil.rmtree(tmp_path / "pack")
    manifest, _ = packed(folder, tmp_path / "pack", PackOptions(20), monkeypatch, skip_bad=True)
    assert sum(entry["left_out"] for entry in manifest["splits"]["train"].values()) == 1


def test_quality_and_index_digest_are_heeded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for quality in (30, 95):
        packed(folder, tmp_path / str(quality), PackOptions(20, quality=quality), monkeypatch)
        sizes.append(sum(PackedImages(tmp_path / str(quality), "train").sizes))
    assert sizes[0] < 0.9 * sizes[1]  # of files of 700 bytes, most of it headers
    index = tmp_path / "30" / "train" / "000002.npz"
    index.write_bytes((tmp_path / "30" / "train" / "000001.npz").read_bytes())
    _, told = packed(folder, tmp_path / "30", PackOptions(20, quality=30), monkeypatch)
    assert len(told) == 1


def test_file_names_that_are_no_text_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_class_folders(tmp_path / "photos", classes=1, each=2)
    (root / "class0" / "000.jpg").rename(os.fsdecode(os.fsencode(root) + b"/class0/\xff.jpg"))
    result = run_dpn("data", "pack", "--data", str(root), "--out", str(tmp_path / "p"), "--size", "keep", "-q")
    assert result.exit_code == 0, result.output
    split = PackedImages(tmp_path / "p", "train")
    assert os.fsencode(next(key for key in map(split.key, range(2)) if "001" not in key)) == b"class0/\xff.jpg"
