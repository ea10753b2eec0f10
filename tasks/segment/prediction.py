"""`dpn segment predict`: label maps of pictures, drawn for people too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from dpn_cli.data.images import find_pictures
from dpn_cli.data.reading import Pixels, Reading, read_pixels
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError
from dpn_cli.run.distributed import join
from dpn_cli.run.files import replace_file
from tasks.segment.classes import Class
from tasks.segment.labels import LabelRule, Labels
from tasks.segment.options import Prediction
from tasks.segment.segmenter import load_segmenter
from tasks.segment.transforms import resize_image
from tasks.segment.windows import label_map

# How much of the colour is laid over the picture; rows of the legend in pixels.
STRENGTH, ROW = 0.55, 22


def predict(options: Prediction) -> list[dict[str, Any]]:
    """Write for every picture NAME its label map, an overlay and a legend into the output folder.

    ``NAME.labels.png`` has the data set's raw class numbers at the picture's own size, ``NAME.overlay.png`` the
    classes' colours over the picture, ``NAME.legend.png`` the classes in it. Returns per picture the files, and the
    classes with their share of the pixels, largest first. Without ``--decode`` JPEGs are decoded as they were for the
    training. Raises `DataError` for a missing or unreadable picture.
    """
    how, runtime = options.pictures, options.runtime
    with join(runtime.device) as world:
        segmenter = load_segmenter(options.run)
        segmenter.network.to(world.device)
        # Photographs have any size: where a run is scored at two, that of its training suits them.
        plan, results = segmenter.plan(segmenter.evaluation.beside), []
        reading = Reading(how.decode or segmenter.data.decode, how.max_pixels, shrink=False)
        paths = find_pictures(options.images)
        names = _distinct(paths)
        for path, name in zip(paths, names, strict=True):
            pixels = read_pixels(path, str(path), reading)
            size = pixels.shape[0], pixels.shape[1]
            images = [resize_image(pixels, plan.size(size, ratio)).to(world.device) for ratio in plan.ratios]
            with torch.inference_mode(), engine.precision_of(runtime, world.device):
                labels: Labels = label_map(segmenter.network, images, size, plan).cpu().numpy()
            counts = np.array(Image.fromarray(labels).histogram())
            order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
            shares = [(segmenter.classes[index], counts[index] / labels.size) for index in order]
            drawn = {
                "labels": draw_labels(labels, segmenter.rule, segmenter.classes),
                "overlay": draw_overlay(pixels, labels, segmenter.classes),
                "legend": draw_legend(shares),
            }
            files = {kind: options.output_dir / f"{name}.{kind}.png" for kind in drawn}
            for kind, image in drawn.items():
                _save(image, files[kind])
            results.append(
                {
                    "image": str(path),
                    **{kind: str(file) for kind, file in files.items()},
                    "classes": [
                        {"value": index + segmenter.rule.offset, "name": one.name, "share": float(share)}
                        for index, (one, share) in zip(order, shares, strict=True)
                    ],
                }
            )
        return results


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Return the pictures' names without endings. Raises `DpnError` when two would be written to the same files."""
    names = [path.stem for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        both = [str(path) for path in paths if path.stem == twice]
        raise DpnError(f"{both[0]} and {both[1]}: both would be written as {twice}.labels.png; predict them apart (-o)")
    return names


def _save(image: Image.Image, path: Path) -> None:
    replace_file(path, lambda temporary: image.save(temporary, format="PNG"))


def draw_labels(labels: Labels, rule: LabelRule, classes: Sequence[Class]) -> Image.Image:
    """Return the raw class numbers (h, w) as a picture: with the classes' colours as its palette where 8 bits do."""
    raw = rule.raw(labels)
    image = Image.fromarray(raw)
    if raw.dtype == np.uint8:
        image.putpalette([0] * 3 * rule.offset + [value for one in classes for value in one.color])
    return image


def draw_overlay(pixels: Pixels, labels: Labels, classes: Sequence[Class]) -> Image.Image:
    """Return the picture with the classes' colours laid over it."""
    drawn = Image.fromarray(labels)
    drawn.putpalette([value for one in classes for value in one.color])
    return Image.blend(Image.fromarray(pixels), drawn.convert("RGB"), STRENGTH)


def draw_legend(shares: Sequence[tuple[Class, float]]) -> Image.Image:
    """Return a picture of classes, their colours as in an overlay on grey, with their share of the pixels."""
    font = ImageFont.load_default(14)
    lines = [f"{one.name}  {share:.1%}" for one, share in shares]
    width = int(max(font.getlength(line) for line in lines)) + ROW + 20
    image = Image.new("RGB", (width, ROW * len(lines) + 8), "white")
    draw = ImageDraw.Draw(image)
    for index, (line, (one, _)) in enumerate(zip(lines, shares, strict=True)):
        top = 4 + ROW * index
        draw.rectangle((6, top + 3, ROW, top + ROW - 3), fill=one.color, outline="black")
        draw.text((ROW + 10, top + 2), line, fill="black", font=font)
    return image
