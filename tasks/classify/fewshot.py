"""`dpn eval fewshot`: accuracies of the few-shot probe by number of shots and draw."""

from __future__ import annotations

from functools import partial
from typing import Any

from dpn_cli.data.classified import ImageSource, Part, has_split, hash_order, hold_out, open_split
from dpn_cli.data.labelled import Labelled, fingerprint
from dpn_cli.data.pixels import resize
from dpn_cli.data.reading import Reading
from dpn_cli.data.trained_on import Known, look_up
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run import stopping
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join
from dpn_cli.run.kinds import resolve
from dpn_cli.statistics import PERCENT, summarize
from dpn_cli.weights.backbone import load_backbone
from dpn_cli.weights.sources import open_checkpoint
from tasks.classify.classifier import facts_of, takes_whole_pictures
from tasks.classify.options import Probing
from tasks.classify.probe import check_shots, encode, pick, probe


def fewshot(options: Probing, console: Console) -> dict[str, Any]:
    """Probe a checkpoint's representation and return accuracies in percent by shots and seed.

    Features are what the head reads (after pre-logits and tanh where there are). Pictures are prepared as the paper's
    probe does it, and taken whole by a classifier that was trained on whole ones. Raises `DataError` when a class has
    fewer images than the largest number of shots.
    """
    runtime, size = options.runtime, options.image_size
    source = _source_of(options)
    with stopping.listen(stopping.NO_RESULT), join(runtime.device) as world:
        if world.size > 1:
            raise DpnError("eval fewshot: run on one rank")
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
        features = []
        for split in (train, test):
            part = encode(
                model,
                split,
                runtime,
                world.device,
                options.batch_size,
                skip_bad=options.skip_bad_images,
                transform=whole,
            )
            features.append(part)
            count = len(features[-1][1])
            console.info(f"{count} images encoded")
            if count < len(split.labels):
                console.warn(f"{len(split.labels) - count} unreadable images are left out")
        (x_train, y_train), (x_test, y_test) = features
        accuracy = {
            shot: {
                seed: 100 * probe(*pick(x_train, y_train, len(names), shot, seed), x_test, y_test, len(names))
                for seed in options.seeds
            }
            for shot in options.shots
        }
        return {
            "task": "fewshot",
            "network": options.checkpoint,
            "data": source.place,
            "fingerprints": {"train": fingerprint(train), "test": fingerprint(test)},
            "trained_on": known.to_dict() if known else None,
            "classes": len(names),
            "images": {"train": len(y_train), "test": len(y_test)},
            "decoder": source.reading.versions(),
            "arch": model.config.arch,
            "stem": model.config.stem,
            "pictures": "whole" if whole else "centre",
            "image_size": list(model.config.image_size),
            "accuracy": {
                str(shot): {"seeds": list(by_seed), **summarize(list(by_seed.values()), PERCENT).to_dict()}
                for shot, by_seed in accuracy.items()
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
        raise DataError(f"--data {source.place}: no images to test on; add --val-data or --val-fraction 0.5")
    if len(train.labels) > pool:
        train = Part(train, sorted(hash_order(train)[:pool]))
    return train, test, names


def describe_probe(result: dict[str, Any]) -> str:
    """Return the result as text."""
    images = result["images"]
    lines = [f"{images['train']} images to draw from, {images['test']} to test on, {result['classes']} classes"]
    for shots, entry in result["accuracy"].items():
        low, high = entry["ci95"] or (float("nan"),) * 2
        lines.append(
            f"{shots:>3}-shot {entry['mean']:6.2f} % ± {entry['stderr'] or 0:.2f} (95 % {low:.1f} ... {high:.1f}, "
            f"n = {entry['n']} draws)"
        )
    if result["trained_on"] and (warning := Known(**result["trained_on"]).warning()):
        lines.append(f"WARNING: {warning}")
    return "\n".join(lines)
