"""`segment ade20k`, `folder`, `eval` and `predict` on small images: data, labels, training, resume, what follows."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Outputs
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.images import write_class_folders
from support.processes import run_processes
from support.segment import CLASS_NAMES, segment_config, train_segment, write_scenes
from tasks.segment import command
from tasks.segment.artifact import Segmenter, load_segmenter
from tasks.segment.config import SegmentConfig, finalize, resolve
from tasks.segment.pairs import FolderPairs, HubPairs
from tasks.segment.palette import color_of
from tasks.segment.preflight import check_masks
from tasks.segment.train import SegmentData, evaluate, job_of, load_network, open_data


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("shapes") / "data", {"training": 24, "validation": 10})


@pytest.fixture
def own(shapes: Path, tmp_path: Path) -> Path:
    """A copy of the data to spoil."""
    return Path(shutil.copytree(shapes, tmp_path / "own"))


def fit_alone(config: SegmentConfig, data: SegmentData, segmenter: Segmenter, world: World) -> None:
    job = job_of(config, data, segmenter, world, Outputs())
    engine.fit(engine.prepare(segmenter.network, config.runtime, world), job)


def opened(path: Path | str) -> Image.Image:
    """An image with its file closed."""
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture(scope="module")
def finished(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("run") / "run"
    return path, train_segment(segment_config(shapes, evaluate_every=20, head_init="truncated_normal"), path)


def test_every_mode_with_one_number_per_pixel_is_read(own: Path) -> None:
    place = own / "annotations" / "validation" / "0000.png"
    initial = FolderPairs(own, "validation").load(0)[1]
    palette = Image.fromarray(initial)
    palette.putpalette([value for index in range(256) for value in color_of(index)])
    palette.save(place)
    assert np.array_equal(FolderPairs(own, "validation").load(0)[1], initial)
    Image.fromarray(initial.astype(np.uint16)).save(place)
    assert np.array_equal(FolderPairs(own, "validation").load(0)[1], initial)


def test_images_are_segmented_and_the_result_is_described(finished: tuple[Path, dict[str, Any]]) -> None:
    path, result = finished
    assert result["miou"] >= result["majority_miou"]
    assert (result["images"], result["classes"], result["train_images"], result["steps"]) == (10, 5, 24, 30)
    assert result["pixels"] == 10 * 64 * 64
    assert json.loads((path / "result.json").read_text()) == result
    rows = list(csv.DictReader((path / "per_class.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == CLASS_NAMES
    assert sum(int(row["pixels"]) for row in rows) == result["pixels"]
    log = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert any("miou" in record and record["step"] == 20 for record in log)
    assert not (path / "checkpoints").exists()


@pytest.mark.slow
def test_the_demo_learns_more_than_the_background(tmp_path: Path) -> None:
    config = finalize(
        build(
            SegmentConfig,
            resolve("ade20k", None, {"backbone": {"arch": "mu/8"}, "lr": 1e-2, "schedule": {"steps": 250}}, {}),
            "test",
        )
    )
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"workers": 0})})
    result = train_segment(config, tmp_path / "run")
    assert result["dataset"] == "demo"
    assert result["miou"] > result["majority_miou"] + 5


def test_a_stopped_run_ends_with_the_weights_of_an_unbroken_one(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"schedule": {"steps": 14}, "backbone": {"arch": "nano/8", "drop_path": 0.3}}
    config = segment_config(shapes, augment={"cat_max": 0.75}, **common)
    train_segment(config, tmp_path / "whole")
    calls = iter(range(1000))
    monkeypatch.setattr(signals, "requested_signal", lambda: signal.SIGTERM if next(calls) == 7 else None)
    with pytest.raises(StoppedError):
        train_segment(config, tmp_path / "broken")
    monkeypatch.undo()
    second = config.model_copy(update={"runtime": config.runtime.model_copy(update={"workers": 1})})
    train_segment(second, tmp_path / "broken", resume=True)
    full, broken = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in full.items())
    other = segment_config(shapes, data={"fraction": 0.5}, **common)
    with pytest.raises(DpnError, match="data.fraction: 1.0 there, 0.5 now"):
        train_segment(other, tmp_path / "broken", resume=True)


def test_masks_that_change_between_run_and_resume_are_refused(own: Path, tmp_path: Path) -> None:
    config = segment_config(own, schedule={"steps": 2})
    train_segment(config, tmp_path / "run")
    for name in ("result.json", "weights.safetensors"):
        (tmp_path / "run" / name).unlink()
    Image.fromarray(np.full((64, 64), 2, np.uint8)).save(own / "annotations" / "training" / "0000.png")
    with pytest.raises(DataError, match="the images or masks have changed since this run started"):
        train_segment(config, tmp_path / "run", resume=True)


def test_renamed_classes_are_refused_on_resume(own: Path, tmp_path: Path) -> None:
    """The masks are the same, and the numbers in them have come to mean something else."""
    config = segment_config(own, schedule={"steps": 2})
    train_segment(config, tmp_path / "run")
    for name in ("result.json", "weights.safetensors"):
        (tmp_path / "run" / name).unlink()
    (own / "classes.txt").write_text("\n".join([*CLASS_NAMES[:3], CLASS_NAMES[4], CLASS_NAMES[3]]))
    with pytest.raises(DataError, match="the classes have changed since this run started"):
        train_segment(config, tmp_path / "run", resume=True)


def test_the_commands_after_a_run_work(finished: tuple[Path, dict[str, Any]], shapes: Path, tmp_path: Path) -> None:
    path, result = finished
    scored = run_dpn("segment", "eval", str(path), "-o", str(tmp_path / "report"), "--json", "-q", "-j", "0")
    report = json.loads(scored.stdout)
    assert report["miou"] == pytest.approx(result["miou"])
    assert (tmp_path / "report" / "per_class.csv").is_file()
    full = json.loads(run_dpn("segment", "eval", str(path), "--mode", "whole", "--json", "-q", "-j", "0").stdout)
    assert full["miou"] == pytest.approx(result["miou"], abs=1)  # the scenes have the window's size
    image = shapes / "images" / "validation" / "0000.jpg"
    predicted = json.loads(
        run_dpn("segment", "predict", str(path), str(image), "-o", str(tmp_path / "out"), "--json").stdout
    )
    labels = opened(predicted[0]["labels"])
    shares = {score["value"]: score["share"] for score in predicted[0]["classes"]}
    assert {int(value) for value in np.unique(np.asarray(labels))} == set(shares) <= {1, 2, 3, 4, 5}
    assert sum(shares.values()) == pytest.approx(1)
    assert labels.mode == "P"
    assert opened(predicted[0]["overlay"]).size == (64, 64)
    assert opened(predicted[0]["legend"]).width > 64


def test_a_long_image_is_cut_into_windows_of_bounded_number(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, _ = finished
    segmenter = load_segmenter(str(path))
    native = segmenter.evaluation.model_copy(update={"size": "native"})
    assert segmenter.plan(native).size((10_000, 40), 1.0) == (10_000, 40)
    long = tmp_path / "long.png"
    Image.fromarray(np.zeros((10_000, 40, 3), np.uint8)).save(long)
    result = run_dpn("segment", "predict", str(path), str(long), "-o", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    assert opened(json.loads(result.stdout)[0]["labels"]).size == (40, 10_000)


def _spoil(root: Path, mode: str, split: str = "training") -> None:
    image, mask = root / "images" / split / "0000.jpg", root / "annotations" / split / "0000.png"
    raw = np.asarray(opened(mask)).copy()
    if mode == "size":
        Image.fromarray(raw[:32]).save(mask)
    elif mode == "rgb":
        opened(mask).convert("RGB").save(mask)
    elif mode == "missing":
        mask.unlink()
    elif mode == "alone":
        image.unlink()
    elif mode == "damaged":
        mask.write_bytes(b"not an image")
    elif mode == "ignored":
        for path in (root / "annotations" / split).iterdir():
            Image.fromarray(raw * 0).save(path)
    else:
        raw[0, 0] = int(mode)
        Image.fromarray(raw).save(mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size", "0000.png: the mask has 64x32 pixels, its image 64x64"),
        ("rgb", r"0000.png: an image in colours \(RGB\)"),
        ("missing", "0000.jpg: no annotation of that name in .*annotations/training .1 of 24 have none"),
        ("alone", "0000.png: no image of that name in .*images/training"),
        ("damaged", "0000.png: not a readable image"),
        ("6", "the mask holds 6; allowed are 1…5 for the 5 classes, 0 ignored. It looks like a class too many"),
        ("255", "the mask holds 255; allowed are 1…5"),
        ("ignored", "every pixel is ignored"),
    ],
)
def test_spoilt_data_is_found_before_training(options: str, message: str, own: Path, tmp_path: Path) -> None:
    _spoil(own, options)
    with pytest.raises(DataError, match=message) as caught:
        train_segment(segment_config(own), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("options", "message"), [("6", "holds 6; allowed"), ("size", "has 64x32 pixels")])
@pytest.mark.parametrize("dry_run", [False, True])
def test_spoilt_validation_masks_are_found_before_training(
    options: str, message: str, dry_run: bool, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(own, options, "validation")
    monkeypatch.setattr("dpn_cli.engine.fit.fit", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(DataError, match=f"validation/0000.png: the mask {message}"):
        train_segment(segment_config(own), tmp_path / "run", dry_run=dry_run)


def test_a_mask_that_no_sample_met_stops_the_training_with_its_name(own: Path, tmp_path: Path) -> None:
    _spoil(own, "77")
    config = segment_config(own)
    data = open_data(config)
    assert check_masks(data.val, data.rule) == {0, 1, 2, 3, 4}
    network = load_network(config, 5)
    segmenter = Segmenter(network, data.classes, config.data, config.evaluation, {})
    with pytest.raises(DataError, match=r"0000.png: the mask holds 77"):
        fit_alone(config, data, segmenter, World(0, 1, torch.device("cpu")))


WRONG: list[tuple[list[str], int, str]] = [
    (["--fraction", "0"], 2, "--fraction: a share of the training images above 0 and at most 1"),
    (["--fraction", "-1/4"], 2, "above 0 and at most 1"),
    (["--fraction", "1.5"], 2, "above 0 and at most 1, e.g. 0.25 or 1/16 (got '1.5')"),
    (["--fraction", "quarter"], 2, "above 0 and at most 1"),
    (["--fraction", "1/24"], 2, "leaves 1 of 24 images to train on, fewer than a batch of 8"),
    (["--batch-size", "40"], 2, "has 24 images to train on, fewer than a batch of 40"),
    (["--class-names", "nowhere.txt"], 2, "no such file; it holds one class name per line"),
    (["--ignore-label", "70000"], 2, "--ignore-label: a whole number from 0 to 65535 (got 70000)"),
    (["--image-size", "60"], 2, "the nearest size that fits is 64x64"),
    (["--image-size", "64x32"], 2, "crops and windows are square"),
    (["--set", "optim.layer_decay=0.9"], 2, "leave it at 1"),
    (["--set", "evaluation.mode=slid"], 2, "evaluation.mode: one of slide, whole (got 'slid'); did you mean 'slide'?"),
    (["--data", "nowhere"], 3, "no such folder; it holds images/{training,validation}"),
    (["--freeze", "nose"], 2, "choose from stem"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_wrong_commands_end_with_one_line(
    arguments: list[str], code: int, message: str, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["--arch", "mu/16", "--checkpoint", "none", "--image-size", "64", "-b", "8", "--label-offset", "1"]
    base += ["--ignore-label", "0", "--steps", "2", "-q", "-j", "0", "-o", "run", "--data", str(shapes)]
    result = run_dpn("segment", "folder", *base, *arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["folder", "--arch", "mu/16"], 2, "--data: which data set?"),
        (["eval", "nowhere"], 3, "no such file or folder"),
        (["predict", "nowhere", "x.jpg"], 3, "nowhere: no such file or folder"),
        (["ade20k", "--steps", "5", "--epochs", "1"], 2, "give one of them"),
    ],
)
def test_commands_without_their_inputs_end_with_one_line(arguments: list[str], code: int, message: str) -> None:
    result = run_dpn("segment", *arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1


def test_other_runs_and_other_classes_are_refused(own: Path, tmp_path: Path) -> None:
    (own / "classes.txt").write_text("\n".join([*CLASS_NAMES, "moon"]))
    config = segment_config(own, schedule={"steps": 1})
    train_segment(config, tmp_path / "moon")
    result = run_dpn("segment", "eval", str(tmp_path / "moon"), "--data", "demo", "-q")
    assert "its 5 classes are not those" in result.stderr
    (own / "classes.txt").write_text("sky\nsky\n")
    with pytest.raises(DataError, match="'sky' is listed twice"):
        train_segment(config, tmp_path / "twice")
    (own / "classes.txt").unlink()
    with pytest.raises(DpnError, match="--class-names: name a file with one class name per line"):
        train_segment(config, tmp_path / "none")
    pass
    pass

    photos = write_class_folders(tmp_path / "photos", classes=3, each=12)
    train_highres(highres_config(photos, schedule={"steps": 1}, data={"minival": 0.0}), tmp_path / "classifier")
    result = run_dpn("segment", "predict", str(tmp_path / "classifier"), "x.jpg")
    assert "is a classification run; use 'dpn predict'" in result.stderr


def test_a_hub_data_set_gives_the_same_pairs(shapes: Path, tmp_path: Path) -> None:
    import datasets

    folder = FolderPairs(shapes, "validation")
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": None} for path in folder.images],
        "annotation": [{"bytes": path.read_bytes(), "path": None} for path in folder.masks],
    }
    features = datasets.Features({name: datasets.Image() for name in rows})
    for split in ("train", "validation"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / f"{split}-0.parquet")
    hub = HubPairs(f"hf:{tmp_path / 'hub'}", "val", None, None)
    assert len(hub) == len(folder)
    assert list(hub.sizes) == list(folder.sizes)
    for actual, expected in zip(hub.load(3), folder.load(3), strict=True):
        assert np.array_equal(actual, expected)
    with pytest.raises(DataError, match="name them with --image-column and --mask-column"):
        HubPairs(f"hf:{tmp_path / 'hub'}", "val", None, "nothing")
    config = segment_config(
        f"hf:{tmp_path / 'hub'}", data={"classes": str(shapes / "classes.txt")}, schedule={"steps": 2}
    )
    assert train_segment(config, tmp_path / "run")["images"] == 10


def _rank(rank: int, size: int, folder: str, shapes: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    # Adam would make steps of the rounding errors that are the key biases' gradients.
    optim = {"name": "momentum", "weight_decay": 0.0}
    world = World(rank, size, torch.device("cpu"))
    for shard in (False, True)[:size]:
        config = segment_config(shapes, schedule={"steps": 3}, optim=optim, runtime={"shard": shard})
        data = open_data(config)
        segmenter = Segmenter(load_network(config, 5), data.classes, config.data, config.evaluation, {})
        fit_alone(config, data, segmenter, world)
        segmenter.network.eval()
        scores = evaluate(segmenter, data, config, world)
        weights = {name: value.double().sum().item() for name, value in segmenter.network.state_dict().items()}
        actual = {"weights": weights, "confusion": scores.confusion.tolist()}
        (Path(folder) / f"{rank}-of-{size}{'-in-parts' if shard else ''}.json").write_text(json.dumps(actual))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def test_two_ranks_train_and_score_as_one(shapes: Path, tmp_path: Path) -> None:
    run_processes(_rank, 2, str(tmp_path), str(shapes))
    _rank(0, 1, str(tmp_path), str(shapes))
    names = ("0-of-1", "0-of-2", "1-of-2", "0-of-2-in-parts", "1-of-2-in-parts")
    single, *ranks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    for rank in ranks:
        assert rank["weights"] == pytest.approx(single["weights"], rel=1e-4, abs=1e-4)
        assert rank["confusion"] == ranks[0]["confusion"]
    assert np.abs(np.array(ranks[0]["confusion"]) - single["confusion"]).sum() <= 40  # pixels on an edge
    assert np.sum(ranks[0]["confusion"]) == np.sum(single["confusion"]) == 10 * 64 * 64


def test_a_dry_run_leaves_nothing(shapes: Path, tmp_path: Path) -> None:
    done = command.run(segment_config(shapes), LaunchOptions(tmp_path / "run", dry_run=True), Console(quiet=True))
    assert done is None
    assert not (tmp_path / "run").exists()
