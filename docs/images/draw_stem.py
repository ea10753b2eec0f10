"""Draw stem.svg: the plain stem beside Dual PatchNorm, and what the first norm does to an image.

    python docs/images/draw_stem.py [FILE]

Needs matplotlib. The images on the right are a built-in scene and a darker one of low contrast, each before and after
the norm that a new Dual PatchNorm stem applies to its patches.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import torch
from einops import rearrange
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dpn_cli.data.sources.synthetic import render, sample_scene
from dpn_cli.model.stem import stem_norm

PATCH = 16
PLAIN, NORM, INK = "#dbe4f0", "#ffcf70", "#222222"


# The columns of the diagram, and which of them Dual PatchNorm adds.
COLUMNS = ("patch", "LayerNorm", "Linear", "LayerNorm", "+ position", "blocks")
ADDED, LEARNT = {1, 3}, {2, 5}


def stem_row(axes: Axes, y: float, title: str, columns: list[int]) -> None:
    """Draw one stem as a row of boxes from the patch to the transformer's blocks; same columns, same places."""
    axes.text(-0.6, y + 0.55, title, fontsize=11, weight="bold", color=INK)
    for column in columns:
        fill = NORM if column in ADDED else PLAIN if column in LEARNT else "white"
        x = 1.55 * column
        axes.add_patch(FancyBboxPatch((x - 0.57, y - 0.27), 1.14, 0.54, "round,pad=0.02", fc=fill, ec=INK))
        axes.text(x, y, COLUMNS[column], ha="center", va="center", fontsize=9.5, color=INK)
    for left, right in pairwise(columns):
        ends = (1.55 * left + 0.6, y), (1.55 * right - 0.6, y)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, color=INK, shrinkA=0, shrinkB=0))


def normalised(image: torch.Tensor) -> torch.Tensor:
    """Return what the first norm makes of an image (h, w, 3) in 0...1, moved into 0...1 to be shown."""
    patches = rearrange(image, "(h p) (w q) c -> (h w) (p q c)", p=PATCH, q=PATCH)
    with torch.no_grad():
        tokens = stem_norm("dpn", "norm_in", patches.shape[1], 1e-6)(patches)
    whole = rearrange(tokens, "(h w) (p q c) -> (h p) (w q) c", h=image.shape[0] // PATCH, p=PATCH, q=PATCH)
    return (0.5 + whole / 6).clamp(0, 1)


def main() -> None:
    """Draw the figure."""
    mpl.rcParams.update({"svg.hashsalt": "dpn", "font.family": "DejaVu Sans"})
    figure = plt.figure(figsize=(11.5, 3.5), facecolor="white")
    axes = figure.add_axes((0.005, 0.02, 0.665, 0.96), xlim=(-0.7, 8.5), ylim=(0, 4.0), aspect="equal")
    axes.axis("off")
    stem_row(axes, 2.75, "Plain ViT", [0, 2, 4, 5])
    stem_row(axes, 0.95, "Dual PatchNorm", [0, 1, 2, 3, 4, 5])
    pixels = torch.from_numpy(render(sample_scene(0, 5))[0].copy()).float() / 255
    for column, (title, image) in enumerate((("image", pixels), ("darker, less contrast", 0.15 + 0.35 * pixels))):
        for line, shown in enumerate((image, normalised(image))):
            place = figure.add_axes((0.715 + 0.145 * column, 0.48 - 0.46 * line, 0.125, 0.42))
            place.imshow(shown.numpy(), interpolation="nearest")
            place.set_xticks([])
            place.set_yticks([])
            if line == 0:
                place.set_title(title, fontsize=9, color=INK)
            if column == 0:
                place.set_ylabel("after first norm" if line else "pixels", fontsize=9, color=INK)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("stem.svg")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main()
