"""`dpn data prepare ade20k|coco`: archives become the folders that the tasks read, and hostile ones become nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpn_cli.data import archives
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from support.cli import run_dpn
from tasks.lit import prepare as lit_prepare
from tasks.segment import prepare as segment_prepare

Json = dict[str, Any]
QUIET = Console(quiet=True)
PUBLISHED = segment_prepare.ADE20K.files, lit_prepare.COCO.files
SIZES = {"training": 3, "validation": 2}


def image(value: int, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 12), (value % 256, 90, 30)).save(file, kind)
    return file.getvalue()


def mask(first: int) -> bytes:
    """16x12 pixels of 75 classes from `first` on, and of 0."""
    values = np.zeros(192, np.uint8)
    values[:75] = np.arange(first, first + 75)
    file = io.BytesIO()
    Image.fromarray(values.reshape(12, 16)).save(file, "PNG")
    return file.getvalue()


def write_zip(path: Path, members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def scenes(top: str = "ADEChallengeData2016/") -> dict[str, bytes]:
    """Three images to train on and two to validate on, whose masks have the classes 1 to 150 together."""
    members = {f"{top}objectInfo150.txt": b"names", f"{top}README.md": b"left out", "__MACOSX/._x": b"left out"}
    for split, short, count in (("training", "train", 3), ("validation", "val", 2)):
        for number in range(count):
            name = f"{split}/ADE_{short}_{number:08d}"
            members[f"{top}images/{name}.jpg"] = image(50 * count + 9 * number)
            members[f"{top}annotations/{name}.png"] = mask(1 + 75 * number % 150)
    return members


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{kind}/{split}": count for kind in ("images", "annotations") for split, count in SIZES.items()}
    monkeypatch.setattr(segment_prepare, "ADE20K", replace(segment_prepare.ADE20K, files=files))
    monkeypatch.setattr(lit_prepare, "COCO", replace(lit_prepare.COCO, files={"train2017": 3, "val2017": 2}))


def test_the_published_sizes_are_known() -> None:
    ade, coco = PUBLISHED
    both = {"training": 20_210, "validation": 2_000}
    assert ade == {f"{kind}/{split}": count for split, count in both.items() for kind in ("images", "annotations")}
    assert coco == {"train2017": 118_287, "val2017": 5_000}


def prepared(*words: object, code: int = 0) -> tuple[Json, str]:
    result = run_dpn("data", "prepare", *map(str, words), "--json", "-q")
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return json.loads(result.stdout) if result.stdout else {}, " ".join(result.stderr.split())


def test_ade20k_becomes_the_folder_that_the_task_reads(tmp_path: Path) -> None:
    archive, out = write_zip(tmp_path / "ADEChallengeData2016.zip", scenes()), tmp_path / "ade"
    result, message = prepared("ade20k", archive, "--out", out)
    assert (result["training"], result["validation"], result["classes"], message) == (3, 2, 150, "")
    assert result["files"] == {"written": 11, "kept": 0, "left_out": 2}
    assert (out / "images" / "training" / "ADE_train_00000001.jpg").read_bytes() == image(159)
    checked = run_dpn("data", "check", "ade20k", "--data", str(out), "--json", "-q", "-j", "0")
    assert (checked.exit_code, json.loads(checked.stdout)["problems"]) == (0, [])
    output = run_dpn("data", "prepare", "ade20k", str(archive), "--out", str(out), "-q").stdout
    assert "0 files written, 11 kept, 2 left out" in output
    assert f"dpn segment ade20k --data {out}" in output


def test_complete_files_are_reused_and_partial_ones_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, out = write_zip(tmp_path / "a.zip", scenes("")), tmp_path / "ade"
    checks: list[int] = []

    def stop_at_the_fifth() -> None:
        checks.append(1)
        if len(checks) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        check_here()

    check_here: Callable[[], None] = signals.check_here
    monkeypatch.setattr(signals, "check_here", stop_at_the_fifth)
    _, message = prepared("ade20k", archive, "--out", out, code=75)
    assert "finished parts are kept" in message
    monkeypatch.undo()
    full = sorted(path for path in out.rglob("*") if path.is_file())
    assert len(full) == 4
    full[0].write_bytes(full[0].read_bytes()[:-1])  # as the disk's failure would leave it
    full[1].with_name(f".{full[1].name}.4194305.tmp").write_bytes(b"what a killed process left")
    initial = full[1].stat().st_mtime_ns
    result = archives.unpack([archive], segment_prepare.ADE20K, out, QUIET)
    assert result == {"written": 8, "kept": 3, "left_out": 2}
    assert full[1].stat().st_mtime_ns == initial
    assert {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()} == {
        name: content for name, content in scenes("").items() if content != b"left out"
    }


def test_coco_becomes_the_folder_that_lit_reads(tmp_path: Path) -> None:
    out, every = tmp_path / "coco", list[Path]()
    notes = {"annotations/instances_val2017.json": b"{}"}
    for split, count in (("train", 3), ("val", 2)):
        names = [f"{number:012d}.jpg" for number in range(count)]
        every.append(write_zip(tmp_path / f"{split}2017.zip", {f"{split}2017/{name}": image(7) for name in names}))
        images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
        texts = [{"image_id": number, "caption": f"a {word}"} for number in range(count) for word in ("cat", "dog")]
        notes[f"annotations/captions_{split}2017.json"] = json.dumps({"images": images, "annotations": texts}).encode()
    first, message = prepared("coco", every[1], write_zip(tmp_path / "notes.zip", notes), "--out", out, code=3)
    assert first["short"] == [f"{out / 'train2017'} has 0 files, and COCO 3"]
    assert f"error: {out / 'train2017'} has 0 files, and COCO 3; unpack the rest into the same folder, or" in message
    result, message = prepared("coco", every[0], "-o", out)
    assert (result["train"], result["val"]) == ({"images": 3, "captions": 6}, {"images": 2, "captions": 4})
    place = str(lit_prepare.captions(out, "train"))
    words = ["--data", place, "--val-data", place.replace("train", "val"), "--json", "-q", "-j", "0"]
    checked = run_dpn("data", "check", "lit", *words)
    assert [problem["kind"] for problem in json.loads(checked.stdout)["problems"]] == ["same image"]
    (out / "train2017" / "000000000001.jpg").unlink()
    result, message = prepared("coco", every[1], "-o", out, "--partial")
    assert result["short"] == [
        f"{out / 'train2017'} has 2 files, and COCO 3",
        f"{place} names 1 images that are missing or have no text",
    ]
    assert message.startswith(f"warning: {out / 'train2017'} has 2 files, and COCO 3")


def test_a_part_of_ade20k_is_an_error_unless_it_is_meant(tmp_path: Path) -> None:
    members = {name: content for name, content in scenes().items() if "00000001" not in name}
    archive, out = write_zip(tmp_path / "a.zip", members), tmp_path / "ade"
    _, message = prepared("ade20k", archive, "--out", out, code=3)
    assert f"{out / 'images/training'} has 2 files, and ADE20K 3; " in message
    assert "have 75 of the 150 classes" in message
    assert message.count("error:") == 1
    result, message = prepared("ade20k", archive, "--out", out, "--partial")
    assert (message.count("warning:"), result["classes"]) == (5, 75)


def entry(name: str, content: bytes = b"x", mode: int = 0o100644) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info, content


IMAGE = "images/training/a.jpg"


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([entry("../escape.jpg")], "a name that leads out"),
        ([entry("images/training/../../../escape.jpg")], "a name that leads out"),
        ([entry("/tmp/escape.jpg")], "a name that leads out"),
        ([entry("C:/escape.jpg")], "a name that leads out"),
        ([entry("images\\training\\a.jpg")], "a name that leads out"),
        ([entry("images/training/a\n.jpg")], "a name that leads out"),
        ([entry(IMAGE, b"/etc/passwd", 0o120777)], "a link or a device"),
        ([entry(IMAGE, bytes(2 * 2**20))], "that unpack to 2097152"),
        ([entry(IMAGE), entry(f"ADEChallengeData2016/{IMAGE}")], f"the second one for {IMAGE}"),
        ([entry("images/elsewhere/a.jpg")], "holds nothing of ADE20K; its archives are ADEChallengeData2016.zip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_archives_write_nothing(
    members: list[tuple[zipfile.ZipInfo, bytes]], reason: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in members:
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    initial = set(tmp_path.rglob("*"))
    _, message = prepared("ade20k", tmp_path / "a.zip", "--out", tmp_path / "in" / "ade", code=3)
    assert reason in message
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == initial
    assert not list((tmp_path / "in").rglob("*.jpg"))


def test_archives_are_limited_in_files_bytes_and_the_space_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_zip(tmp_path / "a.zip", scenes())
    for name in ("MOST_FILES", "MOST_BYTES"):
        with monkeypatch.context() as patched:
            patched.setattr(archives, name, 10)
            assert (
                "so this is not it, and it is not unpacked"
                in prepared("ade20k", archive, "-o", tmp_path / "x", code=3)[1]
            )
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    assert "GB are free; make room" in prepared("ade20k", archive, "-o", tmp_path / "x", code=1)[1]
    assert not (tmp_path / "x").exists()


def test_damaged_and_missing_archives_are_one_line(tmp_path: Path) -> None:
    out = tmp_path / "ade"
    assert "no such file or directory" in prepared("ade20k", tmp_path / "no.zip", "-o", out, code=3)[1].lower()
    assert "not a regular file" in prepared("ade20k", tmp_path, "-o", out, code=3)[1]
    (tmp_path / "text.zip").write_text("<html>not found</html>")
    assert "not a whole zip archive" in prepared("ade20k", tmp_path / "text.zip", "-o", out, code=3)[1]
    archive = write_zip(tmp_path / "a.zip", scenes(), zipfile.ZIP_STORED)
    content = bytearray(archive.read_bytes())
    content[content.index(image(168)) + 60] ^= 255
    archive.write_bytes(content)
    message = prepared("ade20k", archive, "-o", out, code=3)[1]
    assert "member ADEChallengeData2016/images/training/ADE_train_00000002.jpg: damaged (Bad CRC-32" in message
    assert not (out / "images" / "training" / "ADE_train_00000002.jpg").exists()
    assert not [path for path in out.rglob(".*") if path.is_file()]
    locked = bytearray(write_zip(tmp_path / "b.zip", {IMAGE: b"x"}).read_bytes())
    locked[locked.index(b"PK\x01\x02") + 8] |= 1  # the flag of an encrypted member
    (tmp_path / "b.zip").write_bytes(locked)
    assert f"member '{IMAGE}': encrypted" in prepared("ade20k", tmp_path / "b.zip", "-o", out, code=3)[1]
    (tmp_path / "file").write_text("")
    assert "a file; name a folder" in prepared("ade20k", tmp_path / "a.zip", "-o", tmp_path / "file", code=2)[1]
