"""Own images with the defaults of `dpn segment folder`: as good as a bare timm loop, or a warning says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_jaccard_index

from support.cli import run_dpn
from tasks.segment.pairs import ScenePairs
from tasks.segment.preflight import check_crops
from tasks.segment.transforms import SegmentAugmentation

CROP, PATCH, CLASSES, CELLS, SIDE = 32, 8, 11, 4, 12
STEPS, BATCH, LR, SEEDS = 200, 16, 1e-2, 3


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sheets of paper, 48x48, with scikit-learn's handwritten digits pasted on every other of 16 places."""
    root, data, rng = tmp_path_factory.mktemp("sheets") / "data", load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(data.target))
    for split, rows, count in (("training", order[:1400], 240), ("validation", order[1400:], 60)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            paper = rng.normal(225, 6, (CELLS * SIDE, CELLS * SIDE))
            mask = np.zeros(paper.shape, np.uint8)
            for place in np.flatnonzero(rng.random(CELLS**2) < 0.5):
                row = rng.choice(rows)
                ink = Image.fromarray((data.images[row] * 255 / 16).astype(np.uint8)).resize((SIDE, SIDE))
                top, left = SIDE * (place // CELLS), SIDE * (place % CELLS)
                paper[top : top + SIDE, left : left + SIDE] -= 0.8 * np.asarray(ink, float)
                mask[top : top + SIDE, left : left + SIDE] = 1 + data.target[row]
            pixels = paper.clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / "images" / split / f"{number:03d}.png")
            Image.fromarray(mask).save(root / "annotations" / split / f"{number:03d}.png")
    (root / "classes.txt").write_text("\n".join(["paper", *map(str, range(10))]))
    return root


class Patches(nn.Module):
    """Dual PatchNorm as the paper writes it: a norm before and one after the projection of flat patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_patches = (CROP // PATCH) ** 2
        self.layers = nn.Sequential(nn.LayerNorm(3 * PATCH**2), nn.Linear(3 * PATCH**2, width), nn.LayerNorm(width))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(F.unfold(image, PATCH, stride=PATCH).transpose(1, 2))  # type: ignore[no-any-return]


def read(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, h, w) in -1…1 and masks (n, h, w)."""
    images, masks = (
        torch.from_numpy(np.stack([np.asarray(Image.open(path)) for path in sorted((root / kind / split).iterdir())]))
        for kind in ("images", "annotations")
    )
    return images[:, None].expand(-1, 3, -1, -1) / 127.5 - 1, masks.long()


def bare(root: Path, stem: str, seed: int) -> float:
    """The validation mIoU of a loop that anyone writes: whole sheets as crops, every second one mirrored."""
    torch.manual_seed(seed)
    vit = VisionTransformer(img_size=CROP, patch_size=PATCH, embed_dim=32, depth=1, num_heads=2, num_classes=CLASSES)
    if stem == "dpn":
        vit.patch_embed = Patches(32)

    def logits(image: Tensor, size: int) -> Tensor:
        small = vit.head(vit.forward_features(image)[:, 1:]).transpose(1, 2).unflatten(2, (CROP // PATCH, -1))
        return F.interpolate(small, (size, size), mode="bilinear")

    images, masks = read(root, "training")
    images = F.interpolate(images, (CROP, CROP), mode="bilinear")
    masks = F.interpolate(masks[:, None].float(), (CROP, CROP), mode="nearest")[:, 0].long()
    optimizer = torch.optim.AdamW(vit.parameters(), LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, 0.9)
    for _ in range(STEPS):
        rows = torch.randperm(len(images))[:BATCH]
        mirrored = (torch.rand(BATCH) < 0.5)[:, None, None]
        image = torch.where(mirrored[:, None], images[rows].flip(-1), images[rows])
        mask = torch.where(mirrored, masks[rows].flip(-1), masks[rows])
        F.cross_entropy(logits(image, CROP), mask).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    images, masks = read(root, "validation")
    with torch.inference_mode():
        actual = logits(F.interpolate(images, (CROP, CROP), mode="bilinear"), CELLS * SIDE).argmax(1)
    return 100 * multiclass_jaccard_index(actual, masks, CLASSES).item()


def folder(root: Path, output: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run `dpn segment folder` from scratch; returns its result and what it said."""
    base = ["--arch", f"mu/{PATCH}", "--checkpoint", "none", "--data", str(root), "-j", "0", "--device", "cpu"]
    result = run_dpn("segment", "folder", *base, "-o", str(output), "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["none", "dpn"])
def test_the_defaults_are_as_good_as_a_bare_loop(stem: str, sheets: Path, tmp_path: Path) -> None:
    length = ["--image-size", str(CROP), "--steps", str(STEPS), "-b", str(BATCH), "--lr", str(LR)]
    scores = []
    for seed in range(SEEDS):
        output = tmp_path / f"run{seed}"
        result, message = folder(sheets, output, "--stem", stem, "--seed", str(seed), *length)
        scores.append(result["miou"])
        assert "warning" not in message
        assert f"weights: {output / 'weights.safetensors'}" in message.replace("\n", "")
    expected = fmean(bare(sheets, stem, seed) for seed in range(SEEDS))
    assert expected > 60
    assert fmean(scores) > expected - 3


def test_a_training_that_learns_nothing_is_reported(sheets: Path, tmp_path: Path) -> None:
    """A network whose crops see little of a sheet, and that one step at next to no learning rate does not train."""
    size = ["--image-size", "16", "--set", "data.scale=[96,96]", "--set", "head_init=zero", "--freeze", "backbone"]
    result, message = folder(sheets, tmp_path / "run", *size, "--steps", "1", "--lr", "1e-9", "-q")
    assert result["miou"] <= result["majority_miou"]
    initial, final = message.replace("\n", " ").split("warning: ")[1:]
    assert "crops of 16x16 cover 2.8 % of the images, which are cropped at 96x96" in initial
    assert f"NOTHING LEARNT: validation mIoU {result['miou']:.2f} % is not above calling every pixel the most" in final


def test_crops_are_compared_with_images_as_they_are_resized() -> None:
    pairs = ScenePairs(0, 3)  # of 64 pixels
    options = SegmentAugmentation((16, 16), (200, 64), (0.5, 1.5))
    assert check_crops(pairs, options) is None
    warning = check_crops(pairs, replace(options, ratio=(1.5, 2.0)))
    assert warning is not None
    assert "crops of 16x16 cover 2.0 % of the images, which are cropped at 112x112 (median)" in warning
