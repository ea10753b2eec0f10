"""`dpn eval fewshot`: accuracies of the few-shot probe by number of shots and draw."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dpn_cli.data.classified import ImageSource, Part, has_split, hash_order, hold_out, open_split
from dpn_cli.data.labelled import Labelled, fingerprint
from dpn_cli.data.pixels import Transform, resize
from dpn_cli.data.reading import Reading, decoder_of
from dpn_cli.data.trained_on import Known, look_up
from dpn_cli.errors import DataError
from dpn_cli.recipe.schema import Pictures
from dpn_cli.run import stopping
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join, refuse_ranks
from dpn_cli.run.kinds import resolve
from dpn_cli.statistics import PERCENT, summarize
from dpn_cli.weights.backbone import Backbone, load_backbone
from dpn_cli.weights.sources import open_checkpoint
from tasks.classify.classifier import facts_of, takes_whole_pictures
from tasks.classify.distill.recipe import DistillRecipe
from tasks.classify.options import Probing
from tasks.classify.probe import check_shots, encode, pick, probe
from tasks.classify.recipe import SupervisedRecipe

# Images per class of the probe at the end of a training: arXiv 2302.01327 §5.1.
SHOTS = 25
NO_TEST = "{}: no images to test on; {}"


def fewshot(options: Probing, console: Console) -> dict[str, Any]:
    """Probe a checkpoint's representation and return accuracies in percent by shots and seed.

    Features are what the head reads (after pre-logits and tanh where there are). Pictures are prepared as the paper's
    probe does it, and taken whole by a classifier that was trained on whole ones. Raises `DataError` when a class has
    fewer images than the largest number of shots.
    """
    runtime, size = options.runtime, options.image_size
    source = _source_of(options)
    with stopping.listen(stopping.NO_RESULT), join(runtime.device) as world:
        refuse_ranks(world, "eval fewshot")
        place = resolve(options.checkpoint, "dpn eval fewshot")
        opened = None if place == "none" else open_checkpoint(place)
        facts = facts_of(opened) if opened else {}
        model = load_backbone(stem=None, checkpoint=opened, image_size=size)
        console.info(model.report.summary())
        model.to(world.device).eval()
        train, test, names = _open_splits(source, options.pool)
        check_shots("--shots", train.labels, names, max(options.shots))
        known = look_up(test, facts.get("trained_on"), world)
        if warning := known and known.warning():
            console.warn(warning)
        whole = partial(resize, size=model.config.image_size) if opened and takes_whole_pictures(opened) else None
        if whole:
            console.info("pictures are resized whole, as this classifier was trained on them")
        return {
            "task": "fewshot",
            "network": options.checkpoint,
            "data": source.place,
            "trained_on": known.to_dict() if known else None,
            "decoder": source.reading.versions(),
            "arch": model.config.arch,
            "stem": model.config.stem,
            "image_size": list(model.config.image_size),
            **_accuracies(model, (train, test, names), options, world.device, console, whole),
        }


def probing_of(recipe: SupervisedRecipe | DistillRecipe) -> Probing | None:
    """Return the probe at the end of a training: three draws of the images per class; None without data for it."""
    data = recipe.data
    if recipe.fewshot_data is None:
        return None
    return Probing(
        checkpoint="none",
        source=recipe.fewshot_data,
        pictures=Pictures(decode=decoder_of(data.decode), max_pixels=data.max_pixels),
        skip_bad_images=data.skip_bad_images,
        shots=(recipe.fewshot or SHOTS,),
        batch_size=recipe.eval_batch_size,
        runtime=recipe.runtime,
    )


def check_transfer(options: Probing) -> None:
    """Raise `DataError` where the images of the probe at the end of a training are missing or too few."""
    source = _source_of(options)
    if not has_split(source, "val"):
        raise DataError(NO_TEST.format(f"--fewshot-data {source.place}", "put them beside (train/CLASS, val/CLASS)"))
    train, _, names = _open_splits(source, options.pool)
    check_shots(f"--fewshot-data {options.source}: shots", train.labels, names, max(options.shots))


def transfer(
    model: Backbone, options: Probing, device: torch.device, console: Console, transform: Transform | None
) -> dict[str, Any]:
    """Probe a network that is in memory on the data of `options`; returns accuracies as `fewshot` does."""
    splits = _open_splits(_source_of(options), options.pool)
    return {"data": options.source, **_accuracies(model, splits, options, device, console, transform)}


def _accuracies(
    model: Backbone,
    splits: tuple[Labelled, Labelled, tuple[str, ...]],
    options: Probing,
    device: torch.device,
    console: Console,
    whole: Transform | None,
) -> dict[str, Any]:
    """Encode the images to draw from and those to test on; returns accuracies in percent by shots and seed."""
    *parts, names = splits
    features = []
    for split in parts:
        skip, rows = options.skip_bad_images, options.batch_size
        part = encode(model, split, options.runtime, device, rows, skip_bad=skip, transform=whole)
        features.append(part)
        count = len(part[1])
        console.info(f"{count} images encoded")
        if count < len(split.labels):
            console.warn(f"{len(split.labels) - count} unreadable images are left out")
    (x_train, y_train), (x_test, y_test) = features
    accuracy = {
        shot: [
            100 * probe(*pick(x_train, y_train, len(names), shot, seed), x_test, y_test, len(names))
            for seed in options.seeds
        ]
        for shot in options.shots
    }
    return {
        "fingerprints": {name: fingerprint(split) for name, split in zip(("train", "test"), parts, strict=True)},
        "classes": len(names),
        "images": {"train": len(y_train), "test": len(y_test)},
        "pictures": "whole" if whole else "centre",
        "accuracy": {
            str(shot): {"seeds": list(options.seeds), **summarize(values, PERCENT).to_dict()}
            for shot, values in accuracy.items()
        },
    }


def _source_of(options: Probing) -> ImageSource:
    reading = Reading(options.pictures.decode, options.pictures.max_pixels)
    columns = options.image_column, options.label_column
    return ImageSource(options.source, options.val_source, options.val_fraction, *columns, reading)


def _open_splits(source: ImageSource, pool: int) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Open the images to draw from, at most `pool`, and those to test on; returns both and the classes."""
    train, names = open_split(source, "train")
    if has_split(source, "val"):
        test = open_split(source, "val")[0]
    elif source.val_fraction:
        train, test = hold_out(train, source.val_fraction)
    else:
        raise DataError(NO_TEST.format(f"--data {source.place}", "add --val-data or --val-fraction 0.5"))
    if len(train.labels) > pool:
        train = Part(train, sorted(hash_order(train)[:pool]))
    return train, test, names


def describe_accuracies(result: dict[str, Any]) -> list[str]:
    """Return a line for each number of shots."""
    lines = []
    for shots, entry in result["accuracy"].items():
        low, high = entry["ci95"] or (float("nan"),) * 2
        lines.append(
            f"{shots:>3}-shot {entry['mean']:6.2f} % ± {entry['stderr'] or 0:.2f} (95 % {low:.1f} ... {high:.1f}, "
            f"n = {entry['n']} draws)"
        )
    return lines


def describe_probe(result: dict[str, Any]) -> str:
    """Return the result as text."""
    images = result["images"]
    lines = [f"{images['train']} images to draw from, {images['test']} to test on, {result['classes']} classes"]
    lines += describe_accuracies(result)
    if result["trained_on"] and (warning := Known(**result["trained_on"]).warning()):
        lines.append(f"WARNING: {warning}")
    return "\n".join(lines)
