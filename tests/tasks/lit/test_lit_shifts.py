"""`dpn lit eval --shifts`: the accuracy under a shift is that on images that were shifted before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.data.shifted_images import reduce_to
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.backbones import perturb
from support.cli import run_dpn
from support.images import write_class_folders
from support.lit import make_towers
from tasks.lit.towers import save_towers

SIDE = 18  # of the towers' 16 pixels, as 256 is of 224


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shifts")
    for seed, name in enumerate(("own", "other")):
        towers = make_towers(seed)
        for _ in range(1 + seed):  # the image towers differ, too
            perturb(towers.image)
        perturb(towers.text)
        towers.facts = {"arch": "mu/8", "pairs": {"images": 1, "captions": 1}, "steps": 1, "config": {}}
        (root / name).mkdir()
        save_towers(towers, root / name / "weights.safetensors")
    write_class_folders(root / "photos/val", classes=3, each=12)
    return root


def evaluate(folder: Path, run: str, data: str, *options: str) -> dict[str, Any]:
    command = ["lit", "eval", str(folder / run), "--data", str(folder / data), "--force", "-j", "0", "-q", "--json"]
    result = run_dpn(*command, "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    scores: dict[str, Any] = json.loads(result.stdout)
    return scores


def test_the_accuracy_under_a_shift_is_that_on_shifted_images(folder: Path) -> None:
    levels = ["--shifts", "gain,flat_contrast,pixelate", "--severity", "3,5", "--baseline", str(folder / "other")]
    shifts = evaluate(folder, "own", "photos", *levels, "-o", str(folder / "report"))["shifts"]
    assert (shifts["metric"], shifts["side"], shifts["severities"]) == ("top1", SIDE, [3, 5])
    scores = shifts["networks"].values()
    assert len({top1 for network in scores for row in network["scores"].values() for top1 in row}) > 1
    for run, network in zip(("own", "other"), scores, strict=True):
        for shift, severity in (("gain", 5), ("flat_contrast", 3), ("pixelate", 5)):
            shifted = f"{shift}{severity}"
            for path in sorted((folder / "photos").rglob("*.jpg")):
                pixels = reduce_to(read_pixels(path, "x", ReadOptions()), SIDE)
                target = folder / shifted / path.relative_to(folder / "photos").with_suffix(".png")
                target.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(shift_pixels(pixels, shift, severity, None)).save(target)  # type: ignore[arg-type]
            expected = evaluate(folder, run, shifted)["top1"]
            assert network["scores"][shift][severity == 5] == expected
    page = run_dpn("report", str(folder / "report"), "-o", str(folder / "page"))
    assert page.exit_code == 0, page.output
    assert "top-1 under shifts: flat contrast" in (folder / "page/report.html").read_text()
    assert len(list((folder / "report/shifts").iterdir())) == 4


def test_shifts_are_of_labelled_images_alone(folder: Path) -> None:
    result = run_dpn("lit", "eval", str(folder / "own"), "--data", "x.csv", "--shifts", "light")
    assert result.exit_code == 2
    assert "--shifts: of zero-shot accuracy alone; pass labelled images as --data" in result.stderr.replace("\n", " ")


def test_a_training_is_scored_as_an_evaluation_scores_it(folder: Path, tmp_path: Path) -> None:
    pairs, photos = tmp_path / "pairs", folder / "photos/val"
    pairs.mkdir()
    for photo in sorted(photos.glob("*/*"))[::3]:
        (pairs / f"{photo.parent.name}{photo.name}").write_bytes(photo.read_bytes())
        (pairs / f"{photo.parent.name}{photo.stem}.txt").write_text(f"a photo of {photo.parent.name}")
    shifts = ["--shifts", "gain,pixelate", "--severity", "4"]
    small = ["--steps", "2", "-b", "4", "--text-size", "mu", "-j", "0", "--device", "cpu", "-q", "--json"]
    export_backbone(load_backbone("mu/8", image_size=16, seed=1), tmp_path / "tower.safetensors")
    command = ["lit", "train", "--checkpoint", str(tmp_path / "tower.safetensors"), "--data", str(pairs), *small]
    command += ["--val-fraction", "0.3", "-o", str(tmp_path / "run"), *shifts]
    result = run_dpn(*command, "--zeroshot-data", str(folder / "photos"))
    assert result.exit_code == 0, result.output
    trained = json.loads(result.stdout)
    evaluated = evaluate(tmp_path, "run", str(folder / "photos"), *shifts)
    assert list(trained["shifts"]["networks"].values()) == list(evaluated["shifts"]["networks"].values())
    assert trained["zeroshot"]["top1"] == evaluated["top1"]
    refused = run_dpn(*command, "--overwrite")
    assert refused.exit_code == 2
    assert "of zero-shot accuracy; name labelled images with --zeroshot-data" in refused.stderr.replace("\n", " ")
