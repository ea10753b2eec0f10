"""`--decode` and `--max-pixels` reach every image that is read, in every command; runs keep their decoder."""

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
import simplejpeg
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from dpn_cli.data import image_source, splits
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.crops import Decode
from dpn_cli.data.decode import Decoder, ReadOptions
from dpn_cli.data.image_source import find_images
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.sources.pack_writer import PackOptions, pack
from dpn_cli.data.sources.packs import PackedImages
from dpn_cli.errors import DpnError, ImageError
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.weights.safetensors_io import read_weights, save_weights
from support.cli import run_dpn
from support.commands import COMMANDS, run_command, save_untrained_run
from support.goldens import Arrays
from support.images import write_class_folders
from tasks.classify.classifier import load_classifier
from tasks.classify.eval_splits import ConcatImages
from tasks.lit import data as captioned
from tasks.segment.artifact import load_segmenter
from tasks.segment.config import MaskData
from tasks.segment.pairs import PairsSubset, open_pairs
from tasks.vtab import data as vtab_data
from tasks.vtab.config import VtabData
from tasks.vtab.tasks import choose_tasks

ALONE = World(0, 1, torch.device("cpu"))
BOTH: tuple[Decoder, Decoder] = ("exact", "pillow")


@pytest.fixture
def jpegs(golden: Callable[[str], Arrays]) -> dict[str, Any]:
    """The recorded JPEG, and what TensorFlow (exact) and Pillow decode it to."""
    arrays = golden("preprocess_jpeg")
    return {
        "bytes": arrays["jpeg0/bytes"].tobytes(),
        "exact": arrays["jpeg0/decode"],
        "pillow": arrays["jpeg0/decode_precise"],
    }


def class_folders(root: Path, encoded: bytes) -> Path:
    for place in ("one/a.jpg", "one/b.jpg", "two/a.jpg", "two/b.jpg"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(encoded)
    return root


def shards(path: Path, encoded: bytes) -> str:
    with tarfile.open(path, "w") as archive:
        for name, content in {"a.jpg": encoded, "a.cls": b"0", "a.txt": b"it", "b.jpg": encoded, "b.cls": b"1"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return f"wds:{path}"


def hub(folder: Path, encoded: bytes) -> str:
    import datasets

    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["one", "two"]),
        "text": datasets.Value("string"),
    }
    rows = {"image": [{"bytes": encoded, "path": None}] * 2, "label": [0, 1], "text": ["a", "b"]}
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(str(folder / "train-0.parquet"))
    return f"hf:{folder}"


def from_folder(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    source = image_source.ImageSource(str(class_folders(root / "photos", encoded)), reading=reading)
    return image_source.open_split(source, "train")[0]


def from_part(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return splits.hold_out(from_folder(root, encoded, reading), 0.5)[1]


def from_parts(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return ConcatImages([from_part(root, encoded, reading)])


def from_shards(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return image_source.open_split(image_source.ImageSource(shards(root / "a.tar", encoded), reading=reading), "train")[
        0
    ]


def from_hub(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return image_source.open_split(image_source.ImageSource(hub(root / "hub", encoded), reading=reading), "train")[0]


def from_pack(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    split = from_folder(root, encoded, ReadOptions())
    packing: Any = {"workers": 1, "skip_bad": False, "progress": print}
    pack({"train": (split, range(4))}, ("one", "two"), root / "pack", PackOptions(size=None), **packing)
    return image_source.open_split(image_source.ImageSource(str(root / "pack"), reading=reading), "train")[0]


def from_images(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return find_images(str(class_folders(root / "photos", encoded)), 2, 0, reading)


def from_captions(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    for path in sorted(class_folders(root, encoded).rglob("*.jpg")):
        path.with_suffix(".txt").write_text("a sentence")
    return captioned.open_pairs(captioned.CaptionSource(str(root), val_fraction=0.5, reading=reading))[1]


def from_captioned_shards(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    source = captioned.CaptionSource(shards(root / "a.tar", encoded), skip_bad=True, reading=reading)
    return captioned.open_split(source, "train")


def from_captioned_hub(root: Path, encoded: bytes, reading: ReadOptions) -> LabelledImages:
    return captioned.open_split(captioned.CaptionSource(hub(root / "hub", encoded), reading=reading), "train")


SOURCES = [
    from_folder, from_part, from_parts, from_shards, from_hub, from_pack, from_images, from_captions,
    from_captioned_shards, from_captioned_hub,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_follows_the_decode_options(
    source: Callable[[Path, bytes, ReadOptions], LabelledImages], jpegs: dict[str, Any], tmp_path: Path
) -> None:
    for decoder in BOTH:
        (tmp_path / decoder).mkdir()
        split = source(tmp_path / decoder, jpegs["bytes"], ReadOptions(decoder))
        assert np.array_equal(split.pixels(0), jpegs[decoder])
    (tmp_path / "limit").mkdir()
    height, width, _ = jpegs["exact"].shape
    split = source(tmp_path / "limit", jpegs["bytes"], ReadOptions(max_pixels=height * width - 1))
    assert split.pixels(0).shape == (-(-height // 2), -(-width // 2), 3)


def test_vtabs_lists_follow_the_decode_options(
    jpegs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vtab_data, "TRAIN", 1)
    monkeypatch.setattr(vtab_data, "VAL", 1)
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "a.jpg").write_bytes(jpegs["bytes"])
    for split in ("train800", "val200", "test"):
        (tmp_path / "svhn" / f"{split}.txt").write_text("a.jpg 0\n")
    (task,) = choose_tasks(("svhn",), False)
    for decoder in BOTH:
        dataset = vtab_data.open_task(VtabData(source=str(tmp_path), decode=decoder), task)
        for part in (dataset.train800, dataset.val200, dataset.test):
            assert np.array_equal(part.pixels(0), jpegs[decoder])
    with pytest.raises(ImageError, match="more than the 3 that are read"):
        vtab_data.open_task(VtabData(source=str(tmp_path), max_pixels=3), task).test.pixels(0)


def test_images_with_masks_follow_the_decode_options_and_are_never_shrunk(
    jpegs: dict[str, Any], tmp_path: Path
) -> None:
    height, width, _ = jpegs["exact"].shape
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        (tmp_path / "images" / split / "a.jpg").write_bytes(jpegs["bytes"])
        Image.new("L", (width, height)).save(tmp_path / "annotations" / split / "a.png")
    for decoder in BOTH:
        for split in ("train", "val"):
            pairs = open_pairs(MaskData(source=str(tmp_path), decode=decoder), split)
            for some in (pairs, PairsSubset(pairs, [0])):
                assert np.array_equal(some.load(0)[0], jpegs[decoder])
    pairs = open_pairs(MaskData(source=str(tmp_path), max_pixels=height * width - 1), "val")
    with pytest.raises(ImageError, match=r"a\.jpg: .*more than"):
        pairs.load(0)
    with pytest.raises(ImageError, match=r"a\.png: .*more than"):
        pairs.open_mask(0)


@pytest.mark.parametrize("crop", ["inception", "whole"])
@pytest.mark.parametrize("decode", BOTH)
def test_training_batches_hold_the_decoders_pixels(
    decode: Decode, crop: Any, jpegs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    height, width, _ = jpegs["exact"].shape
    monkeypatch.setattr("dpn_cli.data.crops.inception_box", lambda size, *_: (0, 0, *size))
    split = from_folder(tmp_path, jpegs["bytes"], ReadOptions())
    options = Augmentation((height // 2, width // 2), decode, crop=crop, flip=False)
    image = next(crop_batches(split, options, 2, 0, ALONE, workers=0)(0))["image"][0]
    assert torch.equal(image, resize(jpegs[decode], (height // 2, width // 2)))


class UsedError(RuntimeError):
    """Raised in place of decoding."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both decoders of JPEGs stop the program and say which one was asked."""

    def stop(name: str) -> Callable[..., Any]:
        def used(*arguments: Any, **_: Any) -> Any:
            raise UsedError(name)

        return used

    monkeypatch.setattr(simplejpeg, "decode_jpeg", stop("exact"))
    monkeypatch.setattr(JpegImageFile, "load", stop("pillow"))


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_decodes_as_asked(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default is one field of one schema for all of them.
    default = [((), "exact")] if name in ("highres", "predict") else []
    for asked, decoder in (*default, (("--decode", "pillow"), "pillow")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        result = run_command(name, command_inputs, tmp_path, monkeypatch, *asked)
        assert isinstance(result.exception, UsedError), result.output
        assert result.exception.args == (decoder,)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_limit_of_pixels_that_can_be_moved(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_command(name, command_inputs, tmp_path, monkeypatch, "--max-pixels", "3")
    assert result.exit_code == 3, result.output
    assert "more than the 3 that are read; allow more with --max-pixels" in " ".join(result.stderr.split())


OF_RUNS = {
    "eval": "classifier", "predict": "classifier", "lit eval": "towers", "lit eval, retrieval": "towers",
    "lit predict": "towers", "lit search": "towers", "segment eval": "segmenter", "segment predict": "segmenter",
}  # fmt: skip


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", OF_RUNS)
def test_commands_on_a_run_decode_like_the_run(
    name: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(command_inputs, tmp_path / "all")
    save_untrained_run(tmp_path / "all", OF_RUNS[name], "pillow")
    other = [(("--decode", "exact"), "exact")] if name == "predict" else []
    for asked, decoder in (((), "pillow"), *other):
        result = run_command(name, tmp_path / "all", tmp_path, monkeypatch, *asked)
        assert isinstance(result.exception, UsedError), result.output
        assert result.exception.args == (decoder,)


@pytest.mark.parametrize("kind", ["classifier", "towers", "segmenter"])
def test_files_that_name_no_decoder_are_of_the_time_of_pillow(kind: str, command_inputs: Path, tmp_path: Path) -> None:
    path = save_untrained_run(tmp_path, kind, "exact")
    key = {"classifier": "classifier", "towers": "lit", "segmenter": "segmenter"}[kind]
    tensors, metadata = read_weights(path)
    description = json.loads(metadata[key])
    (description["data"] if kind == "segmenter" else description).pop("decode" if kind == "segmenter" else "decoder")
    save_weights(path, tensors, {**metadata, key: json.dumps(description)})
    if kind == "classifier":
        assert load_classifier(str(path)).decoder == "pillow"
    elif kind == "segmenter":
        assert load_segmenter(str(path)).data.decode == "pillow"
    else:
        from tasks.lit.towers import load_lit

        assert load_lit(str(path)).decoder == "pillow"


@pytest.mark.parametrize("decoder", BOTH)
def test_a_pack_is_made_and_continued_with_one_decoder(
    decoder: str, command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(command_inputs)
    command = ["data", "pack", "--data", "photos", "-o", str(tmp_path / "p"), "--size", "20", "--encode", "ppm", "-q"]
    assert run_dpn(*command, "--decode", decoder).exit_code == 0
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text())
    assert manifest["decode"] == decoder
    split = PackedImages(tmp_path / "p", "train")
    reading = ReadOptions("pillow" if decoder == "pillow" else "exact")
    files = image_source.open_split(image_source.ImageSource("photos", reading=reading), "train")[0]
    row = next(row for row in range(len(files.labels)) if files.key(row) == split.key(0))
    smaller = Image.fromarray(files.pixels(row)).resize((25, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(split.pixels(0), np.asarray(smaller))
    other_result = run_dpn(*command, "--decode", "pillow" if decoder == "exact" else "exact")
    assert (other_result.exit_code, "another decode" in other_result.stderr) == (2, True)
    (tmp_path / "p" / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "decode"}))
    older = run_dpn(*command, "--decode", decoder)
    assert older.exit_code == (0 if decoder == "pillow" else 2), older.output


def test_a_pack_shrinks_large_jpegs_and_leaves_large_images_out(command_inputs: Path, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "photos", classes=2, each=2, size=(80, 60))
    Image.new("RGB", (80, 60)).save(tmp_path / "photos" / "class0" / "large.png")
    command = ["data", "pack", "--data", str(tmp_path / "photos"), "-o", str(tmp_path / "p"), "--max-pixels", "4799"]
    result = run_dpn(*command, "-q", "--size", "30")
    assert result.exit_code == 3
    assert "large.png: 80 x 60 pixels, more than the 4799 that are read" in " ".join(result.stderr.split())
    shutil.rmtree(tmp_path / "p")
    completed = run_dpn(*command, "-q", "--size", "30", "--skip-bad-images", "--json")
    assert json.loads(completed.stdout)["train"]["left_out"] == 1
    split = PackedImages(tmp_path / "p", "train")
    assert {split.open(row).size for row in range(4)} == {(40, 30)}  # read at half their size, which is small enough


def result_of(command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    small = ("--steps", "4", "-b", "4", "--set", "schedule.warmup=1", "--json")
    result = run_command("highres", command_inputs, tmp_path, monkeypatch, *small, *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_run_of_the_time_of_pillow_continues_with_pillow(
    command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = result_of(command_inputs, tmp_path, monkeypatch)
    assert first["decoder"] == {name: ReadOptions().versions()[name] for name in ("jpeg", "other")}
    assert first["decoder"]["jpeg"].startswith("simplejpeg ")
    out = tmp_path / "out"
    (out / "result.json").unlink()  # trained, and stopped before it was scored
    assert result_of(command_inputs, tmp_path, monkeypatch, "--resume")["decoder"] == first["decoder"]
    (out / "result.json").unlink()
    facts = json.loads((out / "run.json").read_text())
    facts["versions"].pop("simplejpeg")
    (out / "run.json").write_text(json.dumps(facts))
    lines = [line for line in (out / "config.yaml").read_text().splitlines() if "max_pixels" not in line]
    (out / "config.yaml").write_text("\n".join(lines))
    for more in ((), ("--decode", "pillow")):
        second = result_of(command_inputs, tmp_path, monkeypatch, "--resume", *more)
        assert second["decoder"]["jpeg"].startswith("pillow ")
        (out / "result.json").unlink()


def test_a_resumed_run_refuses_another_decoder_and_takes_another_limit(
    command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = result_of(command_inputs, tmp_path, monkeypatch, "--decode", "pillow")
    assert first["decoder"]["jpeg"].startswith("pillow ")
    (tmp_path / "out" / "result.json").unlink()
    small = ("--steps", "4", "-b", "4", "--set", "schedule.warmup=1", "--resume")
    other_result = run_command("highres", command_inputs, tmp_path, monkeypatch, *small)
    assert other_result.exit_code == 2
    assert "data.decode: pillow there, exact now" in " ".join(other_result.stderr.split())
    assert result_of(command_inputs, tmp_path, monkeypatch, "--decode", "pillow", "--max-pixels", "5000", "--resume")


def test_every_task_trains_with_the_decoder_that_its_run_started_with(
    command_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def note(run: Run[Any], *_: Any) -> Any:
        begun.append(run.config.data.decode)
        raise DpnError("enough")

    monkeypatch.setattr("dpn_cli.run.run.with_saved_decoder", lambda config, facts: config.model_copy(
        update={"data": config.data.model_copy(update={"decode": "pillow"})}
    ))  # fmt: skip
    for place_of_training in ("vtab.command.sweep", "lit.command.train", "segment.command.train"):
        monkeypatch.setattr(f"tasks.{place_of_training}", note)
    for name in ("vtab", "lit train", "segment folder"):
        assert run_command(name, command_inputs, tmp_path, monkeypatch, "--overwrite").exit_code == 2
    assert begun == ["pillow"] * 3
