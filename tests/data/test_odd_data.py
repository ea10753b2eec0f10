"""Data that are not what they should be: one clear line and exit code 3, whatever the command, and no waiting."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources.base import MAX_CLASSES
from dpn_cli.data.sources.shards import LabelledShardImages, expand_pattern
from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.commands import COMMANDS, run_command, save_untrained_run
from support.highres import highres_config, train_highres
from support.images import png_with_claimed_size, write_class_folders
from support.time_limits import time_limit
from tasks.classify.classifier import Classifier, save_classifier
from tasks.classify.preflight import SAMPLE

CAFE = os.fsdecode(b"caf\xe9")  # Latin-1, as old archives have it


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with time_limit(60):
        yield


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_waits_for_a_fifo_among_images(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(shutil.copytree(command_inputs, tmp_path / "all"))
    for path in [*odd.rglob("*.jpg")]:
        path.unlink()
        os.mkfifo(path)
    save_untrained_run(odd, "segmenter", "exact")  # which remembers where its data are
    result = run_command(name, odd, tmp_path, monkeypatch)
    assert result.exit_code == 3, result.output
    output = " ".join(result.stderr.split())
    assert "not a readable image (not a regular file)" in output
    names_all = {"predict", "retrofit", "lit predict", "lit search"}  # what is left out is named there
    assert ("--skip-bad-images" in output) == (name not in names_all and not name.startswith("segment"))


def spoil(photos: Path, kind: str) -> None:
    bad = photos / "class1" / "zzz.png"
    if kind == "link":
        bad.symlink_to("nowhere.png")
    elif kind == "loop":
        bad.symlink_to(bad.name)
    elif kind == "bomb":
        bad.write_bytes(png_with_claimed_size(2**31, 2**31))
    elif kind == "junk":
        bad.write_bytes(b"junk")
    else:
        (photos / "class1" / f"{CAFE}.png").write_bytes(b"junk")


KINDS = {
    "link": "zzz.png: not a readable image (No such file or directory)",
    "loop": "zzz.png: not a readable image (Too many levels of symbolic links)",
    "bomb": "zzz.png: 2147483648 x 2147483648 pixels",
    "junk": "zzz.png: not a readable image (of no known format)",
    "name": ".png: not a readable image (of no known format)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_image_that_is_none_is_named_before_training_or_left_out(
    kind: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(shutil.copytree(command_inputs, tmp_path / "all"))
    spoil(odd / "photos", kind)
    small = ("--steps", "2", "-b", "4", "--set", "schedule.warmup=0", "--json")
    result = run_command("highres", odd, tmp_path, monkeypatch, *small)
    assert result.exit_code == 3, result.output
    assert KINDS[kind] in " ".join(result.stderr.split())
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    told = json.loads((tmp_path / "out" / "run.json").read_text("utf-8"))
    assert KINDS[kind] in told["error"]
    completed = run_command("highres", odd, tmp_path, monkeypatch, *small, "--skip-bad-images", "--overwrite")
    assert completed.exit_code == 0, completed.output
    scored = run_command("eval", odd, tmp_path, monkeypatch, "--skip-bad-images", "--json")
    assert json.loads(scored.stdout)["skipped"] == 1
    result = run_command("eval", odd, tmp_path, monkeypatch)
    assert (result.exit_code, KINDS[kind] in " ".join(result.stderr.split())) == (3, True)


def test_a_broken_link_among_more_images_than_are_decoded_before_training_is_named(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", classes=2, each=1)
    for label in range(2):
        for number in range(1, 3 * SAMPLE):
            os.link(photos / f"class{label}" / "000.jpg", photos / f"class{label}" / f"{number:03d}.jpg")
    (photos / "class1" / "100.png").symlink_to("nowhere.png")
    config = highres_config(photos, schedule={"steps": 4}, data={"minival": 0.0})
    with pytest.raises(DataError, match=r"100\.png: not a readable image \(No such file or directory\)"):
        train_highres(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_names_that_are_no_utf8_go_through_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_class_folders(Path("photos"), classes=2, each=10)
    Path("photos/class0").rename(f"photos/{CAFE}")
    Path("photos/class1/000.jpg").rename(f"photos/class1/{CAFE}.jpg")
    small = ("--steps", "2", "-b", "4", "--set", "schedule.warmup=0", "-o", "run", "--device", "cpu", "-j", "0", "-q")
    scratch = ("--arch", "mu/8", "--checkpoint", "none", "--image-size", "32", "--val-fraction", "0.3")
    result = run_dpn("finetune", "highres", *scratch, "--data", "photos", *small)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("run/run.json").read_text("utf-8"))["classes"] == [CAFE, "class1"]
    assert run_dpn("finetune", "highres", *scratch, "--data", "photos", *small, "--resume").exit_code == 0
    scored = run_dpn("eval", "run", "--data", "photos", "--split", "all", "-o", "report", "-j", "0", "-q", "--json")
    assert json.loads(scored.stdout)["images"] == 20
    assert Path("report/per_class.csv").read_text("utf-8").splitlines()[1].startswith("caf\\udce9,")
    predicted = run_dpn("predict", "run", "photos", "--json", "--device", "cpu")
    assert {"photos/class1/" + CAFE + ".jpg"} < {entry["image"] for entry in json.loads(predicted.stdout)}
    printed = run_dpn("predict", "run", "photos", "--device", "cpu")
    assert (printed.exit_code, "caf\\xe9" in printed.stdout) == (0, True)
    assert run_dpn("export", "run", "-o", "export").exit_code == 0
    packed = run_dpn("data", "pack", "--data", "photos", "-o", "pack", "--size", "20", "-q")
    assert packed.exit_code == 0, packed.output
    split, classes = open_split(ImageSource("pack"), "train")
    assert classes == (CAFE, "class1")
    assert any(split.key(row) == f"class1/{CAFE}.jpg" for row in range(20))
    assert LabelledShardImages("pack/train/*.tar").classes == classes
    probe = run_dpn(
        "eval", "fewshot", "run/weights.safetensors", "--data", "photos", "--val-fraction", "0.3", "--shots", "1"
    )
    assert probe.exit_code == 0, probe.output


def test_captions_of_images_whose_names_are_no_utf8(command_inputs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    odd = Path(shutil.copytree(command_inputs, tmp_path / "all"))
    (odd / "photos" / "class0" / "000.jpg").rename(odd / "photos" / "class0" / f"{CAFE}.jpg")
    (odd / "photos" / "class1").rename(odd / "photos" / CAFE)
    for path in sorted((odd / "photos").rglob("*.jpg")):
        path.with_suffix(".txt").write_text("an image")
    scored = run_command("lit eval", odd, tmp_path, monkeypatch, "--force", "--class-names", str(odd / "pairs.csv"))
    assert (scored.exit_code, "names for the 2 classes" in scored.stderr) == (3, True)
    scored = run_command("lit eval", odd, tmp_path, monkeypatch, "--force", "--json", "--prompts", "plain")
    assert json.loads(scored.stdout)["images"] == 20
    actual = run_command("lit search", odd, tmp_path, monkeypatch, "--json")
    assert str(odd / "photos" / "class0" / f"{CAFE}.jpg").endswith(
        next(entry["image"] for entry in json.loads(actual.stdout) if CAFE in entry["image"])
    )
    words = list(COMMANDS["lit cache"])
    words[words.index("pairs.csv")] = "photos"
    filled = run_dpn(*words)
    assert filled.exit_code == 0, filled.output


def test_masks_of_images_whose_names_are_no_utf8(command_inputs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    odd = Path(shutil.copytree(command_inputs, tmp_path / "all"))
    for kind, ending in (("images", "jpg"), ("annotations", "png")):
        (odd / "scenes" / kind / "validation" / f"0000.{ending}").rename(
            odd / "scenes" / kind / "validation" / f"{CAFE}.{ending}"
        )
    save_untrained_run(odd, "segmenter", "exact")
    assert run_command("segment eval", odd, tmp_path, monkeypatch).exit_code == 0
    sample = run_dpn("segment", "predict", str(odd / "segmenter"), str(odd / "scenes" / "images" / "validation"), "-o",
                str(tmp_path / "drawn"))  # fmt: skip
    assert sample.exit_code == 0, sample.output
    assert (tmp_path / "drawn" / f"{CAFE}.labels.png").is_file()


@pytest.mark.parametrize("name", ["highres", "pretrain", "eval", "eval fewshot", "lit eval"])
def test_one_class_is_refused_before_anything_is_trained(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(shutil.copytree(command_inputs, tmp_path / "all"))
    shutil.rmtree(odd / "photos" / "class1")
    result = run_command(name, odd, tmp_path, monkeypatch)
    assert result.exit_code == 3, result.output
    assert "--data photos: one class (class0), and a classifier needs two at least" in " ".join(result.stderr.split())
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def shard(path: Path, labels: list[str]) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10)).save(buffer, "PNG")
    with tarfile.open(path, "w") as archive:
        for number, label in enumerate(labels):
            for ending, content in (("png", buffer.getvalue()), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("label", ["32768", "5000000", "99999999999", "9" * 400])
def test_class_numbers_that_no_network_has_are_refused(label: str, tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", ["0", label, "1"])
    with pytest.raises(DataError, match=rf"a\.tar/0001\.png has the class number {label}; they go from 0 to 32767"):
        open_split(ImageSource(f"wds:{path}"), "train")
    assert MAX_CLASSES == 32768
    assert len(open_split(ImageSource(f"wds:{shard(path, ['0', '32767'])}"), "train")[1]) == MAX_CLASSES


def test_more_classes_than_a_network_has_are_refused_by_name_too(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", ["0", "1"])
    (tmp_path / "classnames.txt").write_text("name\n" * (MAX_CLASSES + 1))
    with pytest.raises(DataError, match="32769 classes; a network has at most 32768"):
        open_split(ImageSource(f"wds:{tmp_path / 'a.tar'}"), "train")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "--data wds:: which files"),
        ("/", "--data wds:/: which files"),
        (".", r"--data wds:\.: which files"),
        ("a{0..99999999999}.tar", r"a0\.tar: no such file"),
        ("a**b.tar", r"a\*\*b\.tar: no"),
        ("pipe.tar", "pipe.tar is not a file"),
    ],
)
def test_patterns_of_no_shards_end_in_one_line(
    pattern: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.tar")
    with pytest.raises(DataError, match=message) as caught:
        expand_pattern(pattern)
    assert "\n" not in str(caught.value)


def test_the_member_of_a_shard_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", ["0", "1"])
    path.write_bytes(path.read_bytes().replace(b"\x89PNG", b"junk"))
    split, _ = open_split(ImageSource(f"wds:{path}"), "train")
    with pytest.raises(DataError, match=r"a\.tar/0001\.png: not a readable image \(of no known format\)") as caught:
        split.pixels(1)
    assert "BytesIO" not in str(caught.value)


def test_a_shorter_side_below_the_crop_is_refused_with_the_config(
    command_inputs: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("highres", "pretrain"):
        for side, code in ((1, 2), (31, 2)):
            result = run_command(name, command_inputs, tmp_path, monkeypatch, "--set", f"data.eval_resize={side}")
            assert result.exit_code == code, result.output
            assert "data.eval_resize: the image size (32) or more" in " ".join(result.stderr.split())
    small = ("--steps", "2", "-b", "4", "--set", "schedule.warmup=0", "--set", "data.eval_resize=32")
    assert run_command("highres", command_inputs, tmp_path, monkeypatch, *small).exit_code == 0


def test_a_classifier_is_saved_with_names_of_any_bytes(tmp_path: Path) -> None:
    model = load_backbone("mu/8", image_size=32, num_classes=2)
    save_classifier(Classifier(model, (CAFE, "b"), "softmax", 36, {}), tmp_path / "w.safetensors")
    predicted = run_dpn(
        "predict", str(tmp_path / "w.safetensors"), str(write_class_folders(tmp_path / "p", 1, 1)), "--json"
    )
    assert CAFE in {score["name"] for score in json.loads(predicted.stdout)[0]["classes"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unset_variable_never_stands_for_the_default(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in (("--data", ""), ("--data=",)):
        result = run_command(name, command_inputs, tmp_path, monkeypatch, *more)
        assert result.exit_code == 2, result.output
        assert "nothing after --data (is a shell variable unset?)" in result.stderr
    assert run_command(name, command_inputs, tmp_path, monkeypatch, "").exit_code == 2
    assert not list((tmp_path / "out").iterdir())


def test_an_empty_value_of_a_config_is_refused_and_null_is_none(tmp_path: Path) -> None:
    print_config = ("finetune", "highres", "--print-config")
    for setting in ("data.source=", 'data.source=""', "backbone.checkpoint=''"):
        result = run_dpn(*print_config, "--set", setting)
        assert (result.exit_code, "write null for none" in result.stderr) == (2, True), result.output
    assert run_dpn(*print_config, "--set", "data.source=null").exit_code == 0
    (tmp_path / "a.yaml").write_text("data:\n  source: ''\n")
    result = run_dpn(*print_config, "-c", str(tmp_path / "a.yaml"))
    assert (result.exit_code, "a.yaml: data.source: an empty value" in " ".join(result.stderr.split())) == (2, True)
