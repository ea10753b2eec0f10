"""`dpn segment predict`: label maps of images, drawn for people too."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dpn_cli.data.decode import Pixels, options_of_run
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.errors import DataError, DpnError
from dpn_cli.report.content import Cell, Legend, Part, Table
from dpn_cli.report.predictions import Predictions
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import join, refuse_ranks
from dpn_cli.run.files import real_path, replace_file
from dpn_cli.run.precision import autocast
from tasks.segment.artifact import Segmenter, load_segmenter
from tasks.segment.labels import LabelRule, Labels
from tasks.segment.options import SegmentPredictOptions
from tasks.segment.palette import Class
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.segment.transforms import resize_image

# How much of the colour is laid over the image; rows of the legend in pixels.
STRENGTH, ROW = 0.55, 22
# Overlays of a page, their longer side in pixels, and the classes below each: as many bytes as a page of thumbnails.
MOST_SHOWN, SHOWN_SIDE, MOST_NAMED = 100, 288, 6
# Overlays side by side, which are larger than thumbnails.
PER_ROW = 3
# Endings of the files of an image.
ENDINGS = (".labels.png", ".overlay.png", ".legend.png")
# Ending of the message about stopped work.
FINISHED_NOTE = "the images that were finished are kept"


def predict(options: SegmentPredictOptions, console: Console) -> Predictions:
    """Write for every image NAME its label map, an overlay and a legend into the output folder.

    ``NAME.labels.png`` has the data set's raw class numbers at the image's own size, ``NAME.overlay.png`` the
    classes' colours over the image, ``NAME.legend.png`` the classes in it; see `_unique_file_names`. Returns per
    image the
    files, and the classes with their share of the pixels, largest first. Without ``--decode`` JPEGs are decoded as they
    were for the training. Unreadable images are named and left out; raises `DataError` where that leaves none, and
    for a missing image.
    """
    runtime = options.runtime
    with signals.listen(FINISHED_NOTE), join(runtime.device) as world:
        refuse_ranks(world, "segment predict")
        segmenter = load_segmenter(options.run)
        paths = _images(options, console)
        names, predictions = _unique_file_names(paths), Predictions(paths, options.written, console, MOST_SHOWN)
        _check_outputs(paths, [options.output_dir / name for name in names])
        segmenter.network.to(world.device)
        # Photographs have any size: where a run is scored at two, that of its training suits them.
        plan = segmenter.plan(segmenter.evaluation.second_size)
        plan = replace(plan, batch_size=options.batch_size or plan.batch_size)
        reading = options_of_run(options.reading, segmenter.data.decode, segmenter.data.exif, shrink=False)
        batches = predictions.read(
            reading, partial(_image_sizes, plan=plan), batch_size=1, workers=runtime.workers, label="segment predict",
            small=False,
        )  # fmt: skip
        with closing(batches):
            for (image,) in batches:
                pixels, sized = image.prepared
                images = [image.to(world.device) for image in sized]
                with torch.inference_mode(), autocast(runtime, world.device, segmenter.network):
                    labels: Labels = label_map(segmenter.network, images, pixels.shape[:2], plan).cpu().numpy()
                files, overlay, classes = _write_prediction(
                    pixels, labels, segmenter, options.output_dir / names[image.index]
                )
                small = thumbnail(np.asarray(overlay), SHOWN_SIDE) if image.index in predictions.shown else None
                predictions.add({"image": str(image.path), **files, "classes": classes}, small)
        predictions.write("dpn segment predict", options.run, _summary(predictions.results, segmenter), _lines, PER_ROW)
    return predictions


def _image_sizes(pixels: Pixels, plan: WindowPlan) -> tuple[Pixels, list[Tensor]]:
    """Return the pixels, and the image at each size of the plan."""
    size = pixels.shape[0], pixels.shape[1]
    return pixels, [resize_image(pixels, plan.size(size, ratio)) for ratio in plan.ratios]


def _write_prediction(
    pixels: Pixels, labels: Labels, segmenter: Segmenter, prefix: Path
) -> tuple[dict[str, str], Image.Image, list[dict[str, Any]]]:
    """Draw an image's label map into files that begin with `prefix`; returns them, the overlay and the classes."""
    counts = np.array(Image.fromarray(labels).histogram())
    order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
    shares = [(segmenter.classes[index], counts[index] / labels.size) for index in order]
    drawings = {
        "labels": draw_labels(labels, segmenter.rule, segmenter.classes),
        "overlay": draw_overlay(pixels, labels, segmenter.classes),
        "legend": draw_legend(shares),
    }
    files = {kind: prefix.with_name(f"{prefix.name}.{kind}.png") for kind in drawings}
    for kind, image in drawings.items():
        _save(image, files[kind])
    classes = [
        {"value": index + segmenter.rule.offset, "name": label_class.name, "share": float(share)}
        for index, (label_class, share) in zip(order, shares, strict=True)
    ]
    return {kind: str(file) for kind, file in files.items()}, drawings["overlay"], classes


def _summary(results: Sequence[dict[str, Any]], segmenter: Segmenter) -> list[Part]:
    """Return the colours of the classes in some images, and how often and how large they are."""
    shares: dict[int, list[float]] = {}
    for entry in (entry for result in results for entry in result["classes"]):
        shares.setdefault(entry["value"] - segmenter.rule.offset, []).append(entry["share"])
    order = sorted(shares, key=lambda index: -sum(shares[index]))
    rows: list[Sequence[Cell]] = [
        (segmenter.classes[index].name, len(shares[index]), 100 * sum(shares[index]) / len(results)) for index in order
    ]
    colours = [(segmenter.classes[i].name, "#{:02x}{:02x}{:02x}".format(*segmenter.classes[i].color)) for i in order]
    columns = ("class", "images with it", "mean % of the pixels")
    table = Table("What was predicted", columns, rows, digits=1, folded=len(rows) > 12)
    return [Legend("Colours, which are laid over the images", colours), table]


def _lines(result: dict[str, Any]) -> Sequence[str]:
    class_shares = ", ".join(f"{entry['name']} {entry['share']:.1%}" for entry in result["classes"][:MOST_NAMED])
    remaining = len(result["classes"]) - MOST_NAMED
    return [class_shares + (f" and {remaining} more" if remaining > 0 else ""), result["image"]]


def _images(options: SegmentPredictOptions, console: Console) -> list[Path]:
    """Return the images to read: of a folder that has the output folder in it, none that an earlier call wrote.

    Raises `DataError` when no image is left.
    """
    output, paths, skipped = real_path(options.output_dir), list[Path](), 0
    for location in options.images:
        matches = find_image_files([location])
        if location.is_dir() and output.is_relative_to(real_path(location)):
            images = [path for path in matches if not path.name.endswith(ENDINGS)]
            skipped += len(matches) - len(images)
            matches = images
        paths += matches
    if skipped:
        console.warn(
            f"left out {count_noun(skipped, 'image')} called *{', *'.join(ENDINGS)}: the folder of -o is inside that "
            "of the images, and these are what this command writes there"
        )
    if not paths:
        raise DataError("no image is left; name folders with other images, or another -o")
    return paths


def _check_outputs(paths: Sequence[Path], prefixes: Sequence[Path]) -> None:
    """Raise `DpnError` where an image would be written over by the files that begin with one of `prefixes`."""
    output_paths = {real_path(prefix.with_name(prefix.name + ending)) for prefix in prefixes for ending in ENDINGS}
    if over := next((path for path in paths if real_path(path) in output_paths), None):
        raise DpnError(f"{over}: would be written over by the files of another image; pass another -o")


def _unique_file_names(paths: Sequence[Path]) -> list[str]:
    """Return the names under which the images' files are written: without endings where these are unique.

    Where two are the same, the folders that differ are prepended; images of one folder that differ in
    the ending alone keep it. Raises `DpnError` when two would be written to the same files all the same.
    """
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        prefixes = [real_path(path.parent) / path.stem for path in paths]
        root = os.path.commonpath([prefix.parent for prefix in prefixes])
        names = [str(prefix.relative_to(root)) for prefix in prefixes]
    times = Counter(names)
    names = [name + path.suffix if times[name] > 1 else name for name, path in zip(names, paths, strict=True)]
    duplicate = next((name for name, count in Counter(names).items() if count > 1), None)
    if duplicate is not None:
        clashing = [str(path) for path, name in zip(paths, names, strict=True) if name == duplicate]
        raise DpnError(
            f"{clashing[0]} and {clashing[1]}: both would be written as {duplicate}.labels.png; predict them apart (-o)"
        )
    return names


def _save(image: Image.Image, path: Path) -> None:
    replace_file(path, lambda temporary: image.save(temporary, format="PNG"))


def draw_labels(labels: Labels, rule: LabelRule, classes: Sequence[Class]) -> Image.Image:
    """Return the raw class numbers (h, w) as an image: with the classes' colours as its palette where 8 bits do."""
    raw = rule.raw(labels)
    image = Image.fromarray(raw)
    if raw.dtype == np.uint8:
        image.putpalette([0] * 3 * rule.offset + [value for label_class in classes for value in label_class.color])
    return image


def draw_overlay(pixels: Pixels, labels: Labels, classes: Sequence[Class]) -> Image.Image:
    """Return the image with the classes' colours laid over it."""
    overlay = Image.fromarray(labels)
    overlay.putpalette([value for label_class in classes for value in label_class.color])
    return Image.blend(Image.fromarray(pixels), overlay.convert("RGB"), STRENGTH)


def draw_legend(shares: Sequence[tuple[Class, float]]) -> Image.Image:
    """Return an image of classes, their colours as in an overlay on grey, with their share of the pixels."""
    font = ImageFont.load_default(14)
    lines = [f"{label_class.name}  {share:.1%}" for label_class, share in shares]
    width = int(max(font.getlength(line) for line in lines)) + ROW + 20
    image = Image.new("RGB", (width, ROW * len(lines) + 8), "white")
    draw = ImageDraw.Draw(image)
    for index, (line, (label_class, _)) in enumerate(zip(lines, shares, strict=True)):
        top = 4 + ROW * index
        draw.rectangle((6, top + 3, ROW, top + ROW - 3), fill=label_class.color, outline="black")
        draw.text((ROW + 10, top + 2), line, fill="black", font=font)
    return image
