"""Images that phones store turned: upright by their EXIF orientation, in training and after it, or as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from dpn_cli.data.crops import Decode, train_crop
from dpn_cli.data.decode import Decoder, ReadOptions, decode, open_image, orientation, read_pixels
from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.errors import ImageError
from dpn_cli.weights.backbone import Backbone
from support.cli import run_dpn
from support.images import write_class_folders, write_turned
from tasks.classify.probe import encode

UPRIGHT = ReadOptions(exif=True)


@pytest.fixture
def image() -> Image.Image:
    """Return an image of which no two orientations are alike."""
    rows, columns = np.mgrid[:24, :40]
    return Image.fromarray(np.stack([rows * 10, columns * 6, rows + columns], -1).astype(np.uint8))


@pytest.mark.parametrize("suffix", ["jpg", "webp"])
@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_orientations_are_those_of_pillow(value: int, suffix: str, image: Image.Image, tmp_path: Path) -> None:
    path = write_turned(tmp_path / f"x.{suffix}", image, value)
    decoders: tuple[Decoder, ...] = ("exact", "pillow")
    for decoder in decoders:
        as_stored = read_pixels(path, "x", ReadOptions(decoder))
        assert as_stored.shape == (24, 40, 3)  # by default as TensorFlow reads it
        pillow_image = Image.fromarray(as_stored)
        pillow_image.getexif()[ExifTags.Base.Orientation] = value
        expected = np.asarray(ImageOps.exif_transpose(pillow_image))
        assert np.array_equal(read_pixels(path, "x", ReadOptions(decoder, exif=True)), expected)
    with open_image(path, "x", UPRIGHT) as opened:
        assert opened.size == expected.shape[1::-1]


def test_damaged_exif_data_are_ignored(image: Image.Image, tmp_path: Path) -> None:
    path = write_turned(tmp_path / "x.jpg", image, 6)
    content = path.read_bytes()
    start = content.index(b"Exif\0\0") + 6
    path.write_bytes(content[:start] + b"\xff" * 8 + content[start + 8 :])
    assert read_pixels(path, "x", UPRIGHT).shape == (24, 40, 3)
    with Image.open(path) as damaged:
        assert orientation(damaged) == 1


def test_a_pack_keeps_the_orientation(image: Image.Image, tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        write_turned(tmp_path / "data" / name / "x.jpg", image, 6)
    for size in ("12", "keep"):
        packed = run_dpn(
            "data", "pack", "--data", str(tmp_path / "data"), "--out", str(tmp_path / size), "--size", size
        )
        assert packed.exit_code == 0, packed.output
    for size, shape in (("12", (20, 12, 3)), ("keep", (40, 24, 3))):
        split, _ = open_split(ImageSource(str(tmp_path / size), reading=UPRIGHT), "train")
        assert split.pixels(0).shape == shape


def test_a_training_turns_images_and_so_does_all_that_uses_it(image: Image.Image, tmp_path: Path) -> None:
    data = write_class_folders(tmp_path / "photos", classes=2, each=8)
    for path in sorted(data.rglob("*.jpg"))[:3]:
        with Image.open(path) as photo:
            write_turned(path, photo.convert("RGB").transpose(Image.Transpose.ROTATE_90), 6)
    base = ["pretrain", "--data", str(data), "--val-fraction", "0.5", "--arch", "mu/8", "--image-size", "16"]
    base += ["--steps", "1", "-b", "4", "-j", "0", "--no-report", "--jitter", "0.2"]
    base += ["--no-flip", "--set", "data.crop=whole"]
    predictions = []
    for name, flags in (("upright", []), ("stored", ["--no-exif"])):
        trained = run_dpn(*base, *flags, "-o", str(tmp_path / name))
        assert trained.exit_code == 0, trained.output
        counted = "3 of 16 inspected images are stored turned, by their EXIF orientation, and "
        turned = "" if flags else "turned as its EXIF orientation says, "
        prepared = f"training images: whole, jitter 0.2; evaluated images: {turned}resized whole to 16 x 16"
        assert prepared in trained.stderr.replace("\n", " ")
        assert counted + ("stay so" if flags else "are turned") in trained.stderr.replace("\n", " ")
        for reading in ([], ["--exif"], ["--no-exif"]):
            predicted = run_dpn("predict", str(tmp_path / name), str(data), "--json", *reading)
            predictions.append([result["classes"][0]["probability"] for result in json.loads(predicted.stdout)])
    assert predictions[0] == predictions[1] != predictions[2]
    assert predictions[3] == predictions[5] != predictions[4]


def test_a_probe_turns_images_as_the_training_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_class_folders(tmp_path / "photos", classes=2, each=8)
    trained = ["pretrain", "--data", str(data), "--val-fraction", "0.5", "--arch", "mu/8", "--image-size", "16"]
    for name, flag in (("upright", "--exif"), ("stored", "--no-exif")):
        ended = run_dpn(*trained, flag, "--steps", "1", "-b", "4", "-j", "0", "--no-report", "-o", str(tmp_path / name))
        assert ended.exit_code == 0, ended.output
    readings = []

    def noting(model: Backbone, split: LabelledImages, *others: Any, **options: Any) -> Any:
        readings.append(split.reading.exif)
        return encode(model, split, *others, **options)

    monkeypatch.setattr("tasks.classify.fewshot.encode", noting)
    for name, shots, flags, turned in (
        ("upright", "2", [], True),
        ("upright", "2", ["--no-exif"], False),
        ("stored", "2", [], False),
        ("stored", "2", ["--exif"], True),
        ("upright", "1,2", ["-o", str(tmp_path / "draws")], True),
    ):
        probed = run_dpn(
            *("eval", "fewshot", str(tmp_path / name), "--data", str(data), "--val-fraction", "0.5", "--shots", shots),
            *("-j", "0", *flags),
        )
        assert probed.exit_code == 0, probed.output
        assert readings == [turned, turned], (name, flags)
        readings.clear()


def test_what_is_opened_turned_is_decoded_once(image: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_turned(tmp_path / "a" / "x.jpg", image, 8)
    split = ClassFolders(tmp_path)
    split.reading = UPRIGHT
    opened = split.open(0)
    assert np.array_equal(decode(opened, "x"), read_pixels(tmp_path / "a" / "x.jpg", "x", UPRIGHT))
    assert split.content(0) == (tmp_path / "a" / "x.jpg").read_bytes()  # by which overlaps are found


@pytest.mark.parametrize("decoding", ["exact", "fast", "pillow"])
def test_crops_are_of_the_upright_image(decoding: Decode, tmp_path: Path) -> None:
    """A sky above a meadow that is stored on its side: every inception crop is uniform from left to right."""
    scene = np.zeros((160, 240, 3), np.uint8)
    scene[:80, :, 2] = 250
    write_turned(tmp_path / "x.jpg", Image.fromarray(scene).transpose(Image.Transpose.ROTATE_90), 6)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        crop = train_crop(open_image(tmp_path / "x.jpg", "x", UPRIGHT), "x", (8, 8), generator, decoding).float()
        assert (crop - crop[..., :1]).abs().max() < 20


def test_photographs_of_other_formats_are_read_or_refused_in_one_line(image: Image.Image, tmp_path: Path) -> None:
    for suffix in ("heic", "avif"):
        (tmp_path / f"x.{suffix}").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"x\.heic: not a readable image; HEIC needs pillow-heif: pip install"):
        read_pixels(tmp_path / "x.heic", str(tmp_path / "x.heic"), UPRIGHT)
    with pytest.raises(ImageError, match=r"x\.avif: not a readable image; AVIF needs Pillow 11.3"):
        read_pixels(tmp_path / "x.avif", str(tmp_path / "x.avif"), UPRIGHT)
    if ".avif" in Image.registered_extensions():  # since Pillow 11.3
        (tmp_path / "a").mkdir()
        image.save(tmp_path / "a/x.avif", quality=100)
        pixels = ClassFolders(tmp_path).pixels(0)
        assert np.abs(pixels.astype(int) - np.asarray(image)).mean() < 3
