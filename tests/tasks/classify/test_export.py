"""`dpn export`: every kind of file in the runtime that reads it, at batch sizes that it was not traced with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dpn_cli.arch import Pool, Stem
from dpn_cli.run.artifact_kinds import DIGEST
from dpn_cli.run.files import file_digest
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.cli import run_dpn
from tasks.classify import export as exporting
from tasks.classify.classifier import Classifier, imagenet_classes, load_classifier, save_classifier

CLASSES = ("cat", "dog", "emu")


CONFIG = {"about": {"expected": "ImageNet-1k top-1: B/32 79.0 plain, 80.0 DPN"}, "batch_size": 16}


def classifier_file(path: Path, stem: Stem, pool: Pool, classes: tuple[str, ...] = CLASSES) -> Path:
    """A classifier of 16 x 16 pixels, every weight random; the shorter side is resized to 20 before the cut."""
    model = load_backbone("mu/8", stem=stem, pool=pool, image_size=16, num_classes=len(classes))
    facts = {"config": CONFIG, "minival_top1": 87.5}
    save_classifier(Classifier(perturb(model), classes, "softmax", 20, facts), path)
    return path


def runtime_of(kind: str, path: str) -> Callable[[Tensor], Tensor]:
    """Return the network in the hands of the library that the file is for."""
    if kind == "pt2":
        with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns of a buffer of its own
            return torch.export.load(path).module()
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])
    model = load_classifier(path).model.eval()
    return lambda pixels: model((pixels - 0.5) / 0.5)


def prepared(image: np.ndarray[Any, Any]) -> Tensor:
    """What the card says, for an image of 40 x 60: halved by area, fractions cut off, the centre, values in [0, 1]."""
    halved = np.floor(image.astype(np.float64).reshape(20, 2, 30, 2, 3).mean(axis=(1, 3)))
    return torch.from_numpy(halved[2:18, 7:23] / 255).float().permute(2, 0, 1)


# Every pool and both stems in either runtime; all twelve pairs would take a minute.
@pytest.mark.parametrize(
    ("kind", "pool", "stem"),
    [
        ("safetensors", "tok", "dpn"),
        ("pt2", "tok", "none"),
        ("pt2", "gap", "dpn"),
        ("pt2", "map", "dpn"),
        ("onnx", "tok", "dpn"),
        ("onnx", "gap", "none"),
        ("onnx", "map", "none"),
    ],
)
@torch.no_grad()
def test_exports_give_the_outputs_of_the_classifier_for_any_batch_size(
    kind: str, pool: Pool, stem: Stem, tmp_path: Path
) -> None:
    original = classifier_file(tmp_path / "weights.safetensors", stem, pool)
    result = run_dpn("export", str(original), "--to", kind, "-o", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["difference"] < 1e-4
    assert report["batches"] == [4, 1, 7]
    outside = runtime_of(kind, report["path"])
    model = load_classifier(str(original)).model.eval()
    for batch in (1, 5):  # traced with neither
        pixels = torch.rand(batch, 3, 16, 16)
        torch.testing.assert_close(outside(pixels), model((pixels - 0.5) / 0.5), atol=1e-4, rtol=1e-4)
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "photo.png")
    (predicted,) = json.loads(run_dpn("predict", str(original), str(tmp_path / "photo.png"), "--json").stdout)
    actual = {prediction["class"]: prediction["probability"] for prediction in predicted["classes"]}
    expected = outside(prepared(image)[None]).softmax(-1)[0].tolist()
    assert actual == pytest.approx(dict(zip(CLASSES, expected, strict=True)), abs=1e-4)


def test_the_card_describes_the_network(tmp_path: Path) -> None:
    original = classifier_file(tmp_path / "weights.safetensors", "dpn", "tok")
    report = json.loads(run_dpn("export", str(original), "-o", str(tmp_path / "out"), "--json").stdout)
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in ("3 classes", "cat, dog, emu", "16 x 16 pixels", "resized to 20 by area", report["digest"],
                 "87.50 %", '"batch_size": 16'):  # fmt: skip
        assert fact in card
    assert "ImageNet" not in card


def test_the_card_of_an_imagenet_classifier_names_the_published_numbers(tmp_path: Path) -> None:
    original = classifier_file(tmp_path / "weights.safetensors", "dpn", "gap", imagenet_classes(1000))
    run_dpn("export", str(original), "-o", str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "ImageNet-1k top-1: B/32 79.0 plain, 80.0 DPN" in card
    assert "tench" in card


@pytest.mark.parametrize("spoilt", ["fails", "nan"])
def test_a_network_that_fails_on_a_batch_is_not_written(
    spoilt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = classifier_file(tmp_path / "weights.safetensors", "none", "gap")

    def read(path: Path) -> Callable[[Tensor], Tensor]:
        model = exporting._Deployed(load_classifier(str(path))).eval()

        def outputs(pixels: Tensor) -> Tensor:
            if len(pixels) == 1 and spoilt == "fails":
                raise IndexError("expected\nfour")
            logits: Tensor = model(pixels)
            return logits * (torch.nan if len(pixels) == 1 else 1)

        return outputs

    monkeypatch.setattr(
        exporting, "_safetensors", lambda classifier, *_: (lambda path: save_classifier(classifier, path), read)
    )
    result = run_dpn("export", str(original), "-o", str(tmp_path / "out"))
    reason = {"fails": "fails on a batch of 1 images (expected four)", "nan": "outputs differ by nan"}[spoilt]
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_card_has_the_validation_score_of_the_run_and_the_images_that_chose_it(tmp_path: Path) -> None:
    weights = classifier_file(tmp_path / "run/weights.safetensors", "dpn", "gap", CLASSES)
    exporting.export(str(weights), tmp_path / "alone", "safetensors")
    card = (tmp_path / "alone/README.md").read_text()
    assert "(minival): 87.50 %; not a score of this network." in card
    result = {"top1": 43.99, "minival_top1": 60.0, "images": {"train": 3000, "minival": 50, "val": 341}}
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    export_twice = exporting.export(str(weights), tmp_path / "alone", "safetensors")["card"]
    assert "43.99" not in Path(export_twice).read_text()  # nothing says that these weights are the run's
    (tmp_path / "run/run.json").write_text(json.dumps({DIGEST: file_digest(weights)}))
    exporting.export(str(weights), tmp_path / "of_run", "safetensors")
    card = (tmp_path / "of_run/README.md").read_text()
    assert "- Top-1: 43.99 % of 341 validation images (95 % interval 38.8 to 49.3)." in card
    assert "chose the checkpoint (minival): 60.00 % of 50 images (95 % interval 46.2 to 72.4)." in card
