"""`dpn lit`: training, stops, zero-shot scores beside open_clip's, retrieval beside a loop, and what follows a run."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from dpn_cli.arch import STEMS, Size, Stem
from dpn_cli.config.load import build, merge
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.captions import write_caption_table
from support.cli import run_dpn
from support.goldens import GOLDENS
from support.images import write_class_folders, write_png_images
from support.lit import lit_config, train_lit
from support.programs import ROOT, run_program
from tasks.lit.config import LitConfig, resolve, resolve_steps
from tasks.lit.data import SceneClasses
from tasks.lit.features import digest_of
from tasks.lit.page_samples import PAIRS
from tasks.lit.text_tower import TextTower
from tasks.lit.tokenizer import Tokenizer
from tasks.lit.towers import Towers, load_lit, save_towers
from tasks.lit.train import load_tower
from tasks.lit.zeroshot import build_classifier, prompt_set

ROWS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 cuttings of two photographs, each with a sentence that says where it is from."""
    from sklearn.datasets import load_sample_images

    root = tmp_path_factory.mktemp("photos")
    rows = []
    for name, pixels in zip(("a temple", "a flower"), load_sample_images().images, strict=True):
        for number in range(32):
            down, across = divmod(number, 8)
            file = f"{name[2:]}{number:02d}.png"
            Image.fromarray(pixels[down * 100 : down * 100 + 64, across * 75 : across * 75 + 64]).save(root / file)
            rows.append((file, f"{name}, row {ROWS[down]}, column {ROWS[across]}."))
    write_caption_table(root / "pairs.csv", rows)
    return root


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("run") / "run"
    cache = {"cache": {"folder": str(path.parent / "cache")}}
    return path, train_lit(lit_config(photos / "pairs.csv", **cache), path)


def test_the_config_is_the_papers() -> None:
    plain = resolve(None, {"data": {"source": "x"}, "backbone": {"checkpoint": "x"}}, {})
    built = build(LitConfig, plain, "test")
    optim, schedule = built.optim, built.schedule
    assert (schedule.steps, schedule.warmup, schedule.decay, built.batch_size, built.lr) == (
        55_000,
        10_000,
        "cosine",
        16_384,
        1e-3,
    )
    assert (optim.name, optim.betas, optim.weight_decay, optim.decay_unit) == ("adam", (0.9, 0.999), 1e-4, "schedule")
    assert (built.loss, built.temperature, built.text.context, built.cache.use) == ("softmax", 10, 16, True)
    shorter = build(LitConfig, resolve(None, {"data": {"source": "x"}, "schedule": {"steps": 550}}, {}), "test")
    assert shorter.schedule.warmup == 100
    by_epochs = resolve_steps(built.model_copy(update={"epochs": 2.0, "batch_size": 10}), 100).schedule
    assert (by_epochs.steps, by_epochs.warmup) == (20, 3)  # the config's share of warm-up


def test_64_photographs_and_sentences_are_learned_by_heart(finished: tuple[Path, dict[str, Any]]) -> None:
    path, result = finished
    actual = result["retrieval"]
    assert (actual["image_to_text@1"], actual["text_to_image@1"]) == (100, 100)
    assert (actual["images"], actual["captions"], actual["chance@5"]) == (64, 64, 100 * 5 / 64)
    assert result["tokenizer"]["kind"] == "bpe"
    assert result["tokenizer"]["clean"] == "canonicalize"
    assert result["train_loss"] < math.log(64) / 20  # of which a network that knows nothing has all
    assert json.loads((path / "result.json").read_text()) == result
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["temperature"] == result["temperature"] != records[0]["temperature"]
    assert len(json.loads((path / "captions.json").read_text())["pairs"]["images"]) == PAIRS
    assert not (path / "checkpoints").exists()


def test_the_image_tower_stays_as_it_was_and_out_of_the_optimizer(
    finished: tuple[Path, dict[str, Any]], photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, result = finished
    initial = load_backbone("nano/8", pool="gap", image_size=32, seed=0)
    final = load_lit(str(path)).image
    assert digest_of(initial) == digest_of(final) == result["image_tower"]
    assert all(torch.equal(value, final.state_dict()[name]) for name, value in initial.state_dict().items())

    from dpn_cli.engine import fit as engine

    observed: dict[str, Any] = {}

    def fit(model: torch.nn.Module, *arguments: Any, **extra: Any) -> Any:
        observed["names"] = {name.split(".")[0] for name, _ in model.named_parameters()}
        return original(model, *arguments, **extra)

    original = engine.fit
    monkeypatch.setattr(engine, "fit", fit)
    train_lit(lit_config(photos / "pairs.csv", schedule={"steps": 2, "warmup": 0}), tmp_path / "run")
    assert observed["names"] == {"transformer", "log_temperature"}
    tower = load_tower(lit_config(photos / "pairs.csv"), World(0, 1, torch.device("cpu")))
    assert not tower.training
    assert not any(parameter.requires_grad for parameter in tower.parameters())


@pytest.mark.parametrize(
    "extra",
    [
        {"batch_size": 16},
        {"batch_size": 16, "runtime": {"micro_batch_size": 5}, "loss": "siglip", "cache": {"views": 2}},
        {"batch_size": 16, "cache": {"use": False, "views": 1}},
    ],
)
def test_a_stopped_run_ends_with_the_weights_of_an_unbroken_one(
    extra: dict[str, Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lit_config(photos / "pairs.csv", **merge({"schedule": {"steps": 12, "warmup": 2}}, extra))
    train_lit(config, tmp_path / "whole")
    calls = iter(range(1000))
    monkeypatch.setattr(signals, "requested_signal", lambda: signal.SIGTERM if next(calls) == 7 else None)
    with pytest.raises(StoppedError):
        train_lit(config, tmp_path / "broken")
    monkeypatch.undo()
    train_lit(config, tmp_path / "broken", resume=True)
    full, broken = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in full.items())


def test_changes_between_run_and_resume_are_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    config = lit_config(data / "pairs.csv", schedule={"steps": 2, "warmup": 0})
    train_lit(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    table = (data / "pairs.csv").read_text()
    (data / "pairs.csv").write_text(table.replace("a temple", "two temples", 1))
    with pytest.raises(DataError, match="the captions have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)
    (data / "pairs.csv").write_text(table)
    monkeypatch.setattr("tasks.lit.tokenizer.default_bpe", lambda: __file__)  # as another version of open_clip would
    with pytest.raises(DataError, match="the tokenizer or its settings have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)
    with pytest.raises(DataError, match="trained with another version of open_clip BPE than the one that is installed"):
        load_lit(str(tmp_path / "run"))
    monkeypatch.undo()
    shutil.copy(data / "temple00.png", data / "temple01.png")
    with pytest.raises(DataError, match="the images have changed since this run started"):
        train_lit(config, tmp_path / "run", resume=True)


def test_an_unreadable_validation_image_is_reported_before_the_training(photos: Path, tmp_path: Path) -> None:
    names = write_png_images(tmp_path, 3)
    (tmp_path / "1.png").write_bytes(b"no image")
    val = write_caption_table(tmp_path / "val.csv", [(name, "a") for name in names])
    held_out = {"data": {"val_source": str(val)}, "schedule": {"steps": 2, "warmup": 0}}
    with pytest.raises(DataError, match=r"1\.png: not a readable image"):
        train_lit(lit_config(photos / "pairs.csv", **held_out), tmp_path / "run")
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for name in names:
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.png: not a readable image.*; no other one is"):
        train_lit(
            lit_config(photos / "pairs.csv", **merge(held_out, {"data": {"skip_bad_images": True}})),
            tmp_path / "run",
        )


def test_pairs_that_are_left_out_are_counted_and_not_trained_on(tmp_path: Path) -> None:
    names = write_png_images(tmp_path, 12)
    for name in (names[2], names[9]):
        (tmp_path / name).write_bytes(b"no image")
    pairs = [(name, "" if name == names[5] else f"sentence {name}") for name in names]
    folder = write_caption_table(tmp_path / "pairs.csv", [*pairs, (names[1], "another one")])
    asked: dict[str, Any] = {
        "data": {"skip_bad_images": True},
        "cache": {"folder": str(tmp_path / "cache"), "views": 2},
        "schedule": {"steps": 2, "warmup": 0},
        "batch_size": 9,
    }
    result = train_lit(lit_config(folder, **asked), tmp_path / "run")
    assert result["pairs"] == {"images": 9, "captions": 10}
    assert result["left_out"] == {"without_text_or_file": 1, "unreadable": 2}
    counts = {name: result["retrieval"][name] for name in ("images", "captions", "unreadable")}
    assert counts == {"images": 9, "captions": 10, "unreadable": 2}
    kept = [json.loads(path.read_text())["views"] for path in (tmp_path / "cache").glob("*/cache.json")]
    assert sorted(kept) == [0, 2]  # retrieval is scored on the plain images
    with pytest.raises(DpnError, match="--batch-size 10: larger than the 9 images to train on"):
        train_lit(lit_config(folder, **{**asked, "batch_size": 10}), tmp_path / "more")


def test_labelled_test_images_are_scored_or_there_are_none(
    finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path: Path
) -> None:
    for split, count in (("val", 1), ("test", 3)):
        for name in ("temple", "flower"):
            folder = tmp_path / split / f"a {name}"
            folder.mkdir(parents=True)
            for number in range(count):
                shutil.copy(photos / f"{name}{number:02d}.png", folder)
    weights = str(finished[0] / "weights.safetensors")
    score = ["lit", "eval", weights, "--data", str(tmp_path), "--force", "-q", "--json", "--prompts", "plain"]
    for split, count in (("val", 2), ("test", 6)):
        result = json.loads(run_dpn(*score, "--split", split).stdout)
        assert (result["split"], result["images"], result["classes"]) == (split, count, 2)
    shutil.rmtree(tmp_path / "test")
    completed = run_dpn(*score, "--split", "test")
    assert (completed.exit_code, completed.stdout) == (3, "")
    assert "has no labelled test images; choose val or train" in completed.stderr


def test_a_wrong_order_of_names_is_found_in_a_trained_run(tmp_path: Path) -> None:
    data, names = write_class_folders(tmp_path / "data", classes=2, each=32), ("red", "green")
    rows = [
        (file.relative_to(data).as_posix(), f"{names[int(file.parent.name[-1])]} {word}")
        for file, word in itertools.product(sorted(data.rglob("*.jpg")), ("squares", "spots"))
    ]
    config = lit_config(
        write_caption_table(data / "pairs.csv", rows), batch_size=32, schedule={"steps": 20, "warmup": 5}
    )
    train_lit(config, tmp_path / "run")
    for name, words in (("right", "red\ngreen\n"), ("wrong", "green\nred\n")):
        (tmp_path / name).write_text(words)
    (tmp_path / "templates").write_text("{} squares\n{} spots.\n{}")
    base = ["lit", "eval", str(tmp_path / "run"), "--data", str(data), "--prompts", str(tmp_path / "templates"),
            "-q", "--json"]  # fmt: skip
    completed = run_dpn(*base, "--class-names", str(tmp_path / "right"), "-o", str(tmp_path / "report"))
    result = json.loads(completed.stdout)
    assert result["top1"] > 90  # of images whose colours tell the class all are right; chance may reach 62.5
    assert (result["classes"], result["images"], result["prompts"]["templates"]) == (2, 64, 3)
    assert result["class_names"] == str(tmp_path / "right")
    assert result["tokenizer"]["name"] == "open_clip BPE"
    assert json.loads((tmp_path / "report" / "result.json").read_text()) == result
    kept = list((tmp_path / "run").glob("zeroshot-*.safetensors"))
    assert run_dpn(*base, "--class-names", str(tmp_path / "right")).stdout == completed.stdout
    assert len(list((tmp_path / "run").glob("zeroshot-*.safetensors"))) == len(kept) == 1  # built once
    cli_result = run_dpn(*base, "--class-names", str(tmp_path / "wrong"))
    assert cli_result.exit_code == 3
    assert "--force prints the number" in cli_result.stderr
    forced = json.loads(run_dpn(*base, "--class-names", str(tmp_path / "wrong"), "--force").stdout)
    assert forced["top1"] == pytest.approx(100 - result["top1"])


def test_the_commands_after_a_run_work(finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path: Path) -> None:
    place = str(finished[0])
    scored = run_dpn("lit", "eval", place, "--data", str(photos / "pairs.csv"), "-q")
    assert "image to text: R@1 100.00 %" in scored.stdout
    labels = "a flower row first column first, a temple row second column third"
    predicted = run_dpn("lit", "predict", place, str(photos / "temple10.png"), "--labels", labels, "--json")
    (prediction,) = json.loads(predicted.stdout)
    assert prediction["labels"][0]["label"] == "a temple row second column third"
    assert sum(entry["probability"] for entry in prediction["labels"]) == pytest.approx(1)
    assert "temple10.png" in run_dpn("lit", "predict", place, str(photos / "temple10.png"), "--labels", labels).stdout
    shutil.copy(photos / "temple10.png", tmp_path / "a.png")
    (tmp_path / "0.png").write_bytes(b"no image")
    half = run_dpn("lit", "predict", place, str(tmp_path), "--labels", labels, "--json", "--skip-bad-images")
    assert [Path(prediction["image"]).name for prediction in json.loads(half.stdout)] == ["a.png"]
    assert "warning" in half.stderr
    assert "0.png: not a readable image" in " ".join(half.stderr.split())
    actual = run_dpn("lit", "search", place, "--images", str(tmp_path), "--query", "a", "--json", "--skip-bad-images")
    assert [Path(entry["image"]).name for entry in json.loads(actual.stdout)] == ["a.png"]
    assert run_dpn("lit", "predict", place, str(tmp_path), "--labels", labels).exit_code == 3
    for _ in range(2):  # the second time from the cache
        actual = run_dpn("lit", "search", place, "--images", str(photos),
                        "--query", "A temple, row second, column third", "-k", "3", "--json", "-q",
                        "--cache-dir", str(tmp_path / "cache"))  # fmt: skip
        listed = json.loads(actual.stdout)
        assert [len(listed), Path(listed[0]["image"]).name] == [3, "temple10.png"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.slow
def test_an_export_loads_without_the_parts_that_train(
    finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path: Path
) -> None:
    result = run_dpn("lit", "export", str(finished[0]), "-o", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sha256"] == json.loads(result.stdout)["digest"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert config["sha256"] in card
    assert '"batch_size"' in card
    assert "ImageNet" not in card
    script = (
        "import sys, json, numpy, torch\nfrom PIL import Image\nfrom tasks.lit.towers import load_lit\n"
        "towers = load_lit(sys.argv[1])\n"
        "pixels = numpy.asarray(Image.open(sys.argv[2]))\n"
        "images = towers.encode_images(torch.stack([towers.prepare(pixels)]))\n"
        "texts = towers.encode_texts(['a temple row second column third'])\n"
        "trained = {'dpn_cli.engine.fit', 'dpn_cli.engine.optim', 'tasks.lit.train'}\n"
        "training = trained & set(sys.modules)\n"
        "print(json.dumps([(images @ texts.T).item(), sorted(training)]))"
    )
    loaded = run_program([sys.executable, "-c", script, str(tmp_path / "out"), str(photos / "temple10.png")], cwd=ROOT)
    assert loaded.returncode == 0, loaded.stderr
    cosine, training = json.loads(loaded.stdout)
    assert training == []
    own = load_lit(str(finished[0])).to(torch.device("cpu"))
    pixels = np.asarray(Image.open(photos / "temple10.png"))
    expected = own.encode_images(own.prepare(pixels)[None]) @ own.encode_texts(["a temple row second column third"]).T
    assert cosine == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("stem", ["dpn", "pre", "dpn_no_affine", "post", "none"])
def test_the_card_states_the_order_in_which_the_stems_norm_reads_a_patch(stem: Stem, tmp_path: Path) -> None:
    image = load_backbone("mu/4", stem=stem, image_size=8, seed=1)
    generator = torch.Generator().manual_seed(0)
    for value in image.patch_embed.parameters():
        value.data = torch.randn(value.shape, generator=generator)
    text = TextTower(Size(32, 1, 128, 2), 49408, 16, 32, 10.0, None, seed=0)
    facts = {"arch": "mu/4", "pairs": {"images": 1, "captions": 1}, "steps": 1, "config": {}}
    save_towers(Towers(image, text, Tokenizer(16, "lower"), "softmax", facts), tmp_path / "weights.safetensors")
    result = run_dpn("lit", "export", str(tmp_path / "weights.safetensors"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Stem `{stem}`: {STEMS[stem]}" in card
    assert ("(row, column, channel)" in card) == (stem in ("dpn", "pre"))
    if stem != "dpn":
        return
    # What the card says, computed from the file.
    tensors = load_file(tmp_path / "out" / "weights.safetensors")
    pixels = torch.rand(1, 3, 8, 8, generator=generator)
    patch = pixels[0, :, 4:, :4].permute(1, 2, 0).flatten()  # the third of four
    first, second = (
        [tensors[f"image.patch_embed.{norm}.{leaf}"] for leaf in ("weight", "bias")] for norm in ("norm_in", "norm")
    )
    weight, bias = tensors["image.patch_embed.proj.weight"], tensors["image.patch_embed.proj.bias"]
    projected = (
        weight.permute(0, 2, 3, 1).flatten(1) @ F.layer_norm(patch, patch.shape, first[0], first[1], 1e-6) + bias
    )
    expected = F.layer_norm(projected, projected.shape, second[0], second[1], 1e-6)
    torch.testing.assert_close(image.patch_embed(pixels)[0, 2], expected, atol=1e-5, rtol=1e-5)


def test_towers_survive_a_file_with_siglips_bias_and_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(["a dog and a cat", "two red cars"] * 9))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "small"), vocab_size=30, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = Tokenizer(8, "lower", (tmp_path / "small.model").read_bytes(), "small.model")
    text = TextTower(Size(32, 1, 128, 2), tokenizer.vocabulary, 8, 32, 10.0, -3.0, seed=2)
    own = Towers(load_backbone("mu/8", image_size=16), text, tokenizer, "siglip", {"a": 1}).to(torch.device("cpu"))
    save_towers(own, tmp_path / "weights.safetensors")
    reloaded = load_lit(str(tmp_path)).to(torch.device("cpu"))
    assert torch.equal(own.encode_texts(["a Dog", "cars"]), reloaded.encode_texts(["a Dog", "cars"]))
    images = torch.randint(256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for towers in (own, reloaded):
        for features in (towers.encode_images(images), towers.encode_texts(["a Dog", "cars"])):
            torch.testing.assert_close(features.norm(dim=-1), torch.ones(len(features)))
    with torch.no_grad():
        own.text.log_temperature.fill_(1.5)
    save_towers(own, tmp_path / "other" / "weights.safetensors")
    assert load_lit(str(tmp_path / "other")).text.log_temperature.item() == 1.5
    assert (reloaded.tokenizer.to_dict(), reloaded.loss, reloaded.facts) == (tokenizer.to_dict(), "siglip", {"a": 1})
    probabilities = reloaded.probabilities(torch.tensor([[0.3, 0.3]]))
    torch.testing.assert_close(probabilities, torch.full((1, 2), 10 * 0.3 - 3.0).sigmoid())


def test_the_demo_is_described_and_the_cache_command_fills_the_trainings_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.lit.data.DEMO_SPLITS", dict.fromkeys(("train", "val", "test"), (0, 150)))
    monkeypatch.setattr("tasks.lit.final_zeroshot.DEMO_SPLITS", {"val": (0, 150)})
    monkeypatch.chdir(tmp_path)
    network = ["--data", "demo", "--arch", "mu/16", "--checkpoint", "none", "--set", "backbone.pool=gap"]
    filled = run_dpn("lit", "cache", *network, "--json", "-q")
    assert filled.exit_code == 0, filled.output
    assert json.loads(filled.stdout)["images"] == 150
    completed = run_dpn(
        "lit", "train", *network, "--text-size", "mu", "--steps", "3", "-b", "50", "-j", "0", "-o", "run"
    )
    assert completed.exit_code == 0, completed.output
    assert "This is the demo: generated scenes" in completed.stderr
    assert "encoding" not in completed.stderr
    assert "x chance" in completed.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["zeroshot"]["classes"], result["zeroshot"]["chance"]) == (24, pytest.approx(100 / 24))
    towers, scenes = load_lit("run"), SceneClasses(0, 150)
    for query in json.loads((tmp_path / "run" / "prompts.json").read_text())["queries"]:
        (text,) = build_classifier(towers, [query["text"]], prompt_set("demo"))
        image = towers.encode_images(towers.prepare(scenes.pixels(query["nearest"][0]["row"]))[None])[0]
        assert query["nearest"][0]["cosine"] == pytest.approx(float(image @ text), abs=1e-4)
    assert (
        "encoding" not in run_dpn("lit", "eval", "run", "--data", "demo", "--retrieval").stderr
    )  # nor by what follows
    dry = run_dpn("lit", "train", *network, "--dry-run", "-o", "dry", "-b", "50")
    assert dry.exit_code == 0, dry.output
    assert "150 images, 150 held out" in " ".join(dry.stderr.split())
    assert not (tmp_path / "dry").exists()


TOWER = ["--arch", "mu/8", "--checkpoint", "none", "--image-size", "32"]
WRONG: list[tuple[list[str], int, str]] = [
    (["train", "--data", "PAIRS"], 2, "LiT needs a trained image tower and no weights were given. Ways out"),
    (["train", "--data", "PAIRS", *TOWER, "-b", "61"], 2, "--batch-size 61: larger than the 58 images to train on"),
    (["train", "--data", "PAIRS", *TOWER, "--text-size", "b"], 2, "--text-size 'b': choose one of mu"),
    (["train", "--data", "PAIRS", *TOWER, "--no-cache", "--skip-bad-images"], 2, "--skip-bad-images with --no-cache"),
    (["train", "--data", "PAIRS", *TOWER, "--tokenizer", "no.model"], 3, "no.model: no such file"),
    (["train", "--data", "PAIRS", *TOWER, "--steps", "5", "--epochs", "1"], 2, "give one of them"),
    (["train", "--data", "PAIRS", *TOWER, "--loss", "hinge"], 2, "loss: one of softmax, siglip (got 'hinge')"),
    (["train", "--data", "nowhere", *TOWER], 3, "no such file or folder"),
    (["train", "--data", "demo", "--arch", "mu/7"], 2, "nearest size that fits"),
    (["cache", "--data", "BROKEN", *TOWER], 3, "1.png: not a readable image"),
    (["train", "--data", "EMPTY", *TOWER, "-b", "2"], 3, "a pair without text"),
    (["eval", "nowhere", "--data", "demo"], 3, "nowhere: no such file or folder"),
    (["eval", str(GOLDENS / "vit_dpn.io.npz"), "--data", "demo"], 3, "not a file of two LiT towers"),
    (["eval", "RUN", "--data", "demo", "--split", "best"], 2, "--split: one of train, val, test, all"),
    (["eval", "RUN", "--data", "demo", "--prompts", "clip_wrst"], 3, "choose clip_paper"),
    (["train", "--data", "PAIRS", *TOWER, "-b", "1"], 2, "--batch-size 1: the softmax loss of a pair without others"),
    (["predict", "RUN", "IMAGE", "--labels", " , "], 2, "--labels: no label in it"),
    (["predict", "RUN", "IMAGE", "--labels", "..., !"], 2, "--labels: no label in it"),
    (["search", "RUN", "--images", "PHOTOS", "--query", "?"], 2, "--query: an empty sentence"),
    (["predict", "RUN", "nowhere.png", "--labels", "a"], 3, "no such image"),
    (["search", "RUN", "--images", "nowhere", "--query", "a"], 3, "no such image"),
    (["search", "RUN", "--images", "PHOTOS", "--query", " "], 2, "--query: an empty sentence"),
]


@pytest.fixture(scope="module")
def places(
    finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    names = write_png_images(root / "broken", 12)
    (root / "broken" / "1.png").write_bytes(b"no image")
    broken = write_caption_table(root / "broken" / "pairs.csv", [(name, "a") for name in names])
    empty = write_caption_table(root / "broken" / "empty.csv", [(names[0], "a"), (names[2], ""), (names[3], "c")])

    return {
        "PAIRS": str(photos / "pairs.csv"), "PHOTOS": str(photos), "IMAGE": str(photos / "temple10.png"),
        "RUN": str(finished[0]), "BROKEN": str(broken), "EMPTY": str(empty),
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_wrong_commands_end_with_one_line(
    arguments: list[str], code: int, message: str, places: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    quiet = [] if arguments[0] == "predict" else ["-q"]
    result = run_dpn("lit", *(places.get(word, word) for word in arguments), *quiet)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_foreign_backbone_is_no_run(tmp_path: Path) -> None:
    from dpn_cli.weights.backbone import export_backbone

    export_backbone(load_backbone("mu/8", image_size=16), tmp_path / "one.safetensors")
    with pytest.raises(DataError, match="not a file of two LiT towers; 'dpn lit train --checkpoint"):
        load_lit(str(tmp_path / "one.safetensors"))
    with pytest.raises(DpnError, match="not the folder of a LiT run"):
        load_lit(str(tmp_path))
