"""`dpn eval fewshot`: accuracies of the few-shot probe by number of shots and draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dpn_cli.data.decode import ReadOptions, decoder_of
from dpn_cli.data.image_source import ImageSource, has_split, open_split
from dpn_cli.data.leakage import Overlap, count_overlap
from dpn_cli.data.pixels import Transform
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import ImageSubset, LabelledImages, fingerprint
from dpn_cli.data.splits import has_validation, hash_order, hold_out
from dpn_cli.errors import DataError, NonFiniteError
from dpn_cli.run import signals
from dpn_cli.run.artifact_kinds import resolve
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World, join, refuse_ranks
from dpn_cli.statistics import PERCENT, as_text, summarize
from dpn_cli.weights.backbone import Backbone, load_backbone
from dpn_cli.weights.locate import open_checkpoint
from tasks.classify.classifier import facts_of, takes_whole_images, turns_images
from tasks.classify.config import SupervisedConfig
from tasks.classify.distill.config import DistillConfig
from tasks.classify.options import ProbeImageReading, ProbeOptions
from tasks.classify.probe import Array, check_shots, draw_examples, encode, probe

# Images per class of the probe at the end of a training: arXiv 2302.01327 §5.1.
SHOTS = 25
NO_TEST = "{}: no images to test on; {}"


def fewshot(options: ProbeOptions, console: Console) -> dict[str, Any]:
    """Probe a checkpoint's representation and return accuracies in percent by shots and seed.

    Features are the input of the head, after pre-logits and tanh if any. Images are prepared as for the paper's probe,
    or resized without a crop for a classifier that was trained so. Raises `DataError` when a class has fewer images
    than the largest number of shots.
    """
    with signals.listen(signals.NO_RESULT), join(options.runtime.device) as world:
        refuse_ranks(world, "eval fewshot")
        assert options.checkpoint is not None, "these are options of several networks"
        network = ProbedNetwork.load(options.checkpoint, options)
        console.info(network.model.report.summary())
        splits, source = open_splits(options, exif=network.exif), _source_of(options, network.exif)
        return {
            "task": "fewshot",
            "data": source.location,
            "decoder": source.reading.versions(),
            **network.facts(splits.test, world, console),
            **_accuracies(network.model.to(world.device), splits, options, world.device, console, network.transform),
        }


@dataclass(frozen=True)
class ProbedNetwork:
    """A network to probe, and how images are prepared for a classifier, which may have been trained on others.

    `transform` resizes images whole; with `exif` they are turned as their EXIF orientation says.
    """

    location: str
    model: Backbone
    trained_on: Any
    transform: Transform | None
    exif: bool

    @classmethod
    def load(cls, location: str, options: ProbeOptions) -> ProbedNetwork:
        """Load weights of any format at the options' image size. Raises as `load_backbone` does."""
        path = resolve(location, "dpn eval fewshot")
        checkpoint = None if path == "none" else open_checkpoint(path)
        model = load_backbone(stem=None, checkpoint=checkpoint, image_size=options.image_size).eval()
        transform = (
            partial(resize, size=model.config.image_size) if checkpoint and takes_whole_images(checkpoint) else None
        )
        trained_on = facts_of(checkpoint).get("trained_on") if checkpoint else None
        return cls(location, model, trained_on, transform, checkpoint is not None and turns_images(checkpoint))

    def facts(self, test: LabelledImages, world: World, console: Console) -> dict[str, Any]:
        """Return the network's facts for a result; warn of test images that it was trained on."""
        overlap = count_overlap(test, self.trained_on, world)
        if warning := overlap and overlap.warning():
            console.warn(warning)
        if self.transform:
            console.info("images are resized whole, as this classifier was trained on them")
        return {
            "network": self.location,
            "arch": self.model.config.arch,
            "stem": self.model.config.stem,
            "image_size": list(self.model.config.image_size),
            "trained_on": overlap.to_dict() if overlap else None,
        }


@dataclass(frozen=True)
class Splits:
    """Images to draw from, images to test on, and their classes."""

    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of both splits."""
        return {"train": fingerprint(self.train), "test": fingerprint(self.test)}


@dataclass(frozen=True)
class ProbeFeatures:
    """Features that the head reads, (n, d) in float64, with their classes (n,): to draw from, and to test on."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]
    classes: int

    def accuracy(self, shots: int, seed: int) -> float:
        """Return the accuracy in percent with `shots` images per class, drawn by `seed`."""
        return 100 * probe(*draw_examples(*self.train, self.classes, shots, seed), *self.test, self.classes)


def final_probe_options(config: SupervisedConfig | DistillConfig) -> ProbeOptions | None:
    """Return the probe at the end of a training: three draws of the images per class; None without data for it."""
    data = config.data
    if config.fewshot_data is None:
        return None
    return ProbeOptions(
        checkpoint="none",
        source=config.fewshot_data,
        reading=ProbeImageReading(decode=decoder_of(data.decode), max_pixels=data.max_pixels, exif=data.exif),
        skip_bad_images=data.skip_bad_images,
        shots=(config.fewshot or SHOTS,),
        batch_size=config.eval_batch_size,
        runtime=config.runtime,
    )


def check_probe_data(options: ProbeOptions) -> None:
    """Raise `DataError` where the images of the probe at the end of a training are missing or too few."""
    source = _source_of(options)
    if not has_split(source, "val"):
        raise DataError(
            NO_TEST.format(f"--fewshot-data {source.location}", "put them next to (train/CLASS, val/CLASS)")
        )
    open_splits(options, f"--fewshot-data {options.source}: shots")


def probe_network(
    model: Backbone, options: ProbeOptions, device: torch.device, console: Console, transform: Transform | None
) -> dict[str, Any]:
    """Probe a network that is in memory on the data of `options`; returns accuracies as `fewshot` does."""
    splits = open_splits(options)
    return {"data": options.source, **_accuracies(model, splits, options, device, console, transform)}


def _accuracies(
    model: Backbone,
    splits: Splits,
    options: ProbeOptions,
    device: torch.device,
    console: Console,
    transform: Transform | None,
) -> dict[str, Any]:
    """Encode the images to draw from and those to test on; returns accuracies in percent by shots and seed."""
    features = encode_splits(model, splits, options, device, console, transform)
    accuracy = {shot: [features.accuracy(shot, seed) for seed in options.seeds] for shot in options.shots}
    return {
        "fingerprints": splits.fingerprints,
        "classes": features.classes,
        "images": {"train": len(features.train[1]), "test": len(features.test[1])},
        "crop": "whole" if transform else "centre",
        "accuracy": {
            str(shot): {"seeds": list(options.seeds), **summarize(values, PERCENT).to_dict()}
            for shot, values in accuracy.items()
        },
    }


def encode_splits(
    model: Backbone,
    splits: Splits,
    options: ProbeOptions,
    device: torch.device,
    console: Console,
    transform: Transform | None,
) -> ProbeFeatures:
    """Encode the images to draw from and those to test on.

    Raises `DataError` for an unreadable image unless they are skipped, `NonFiniteError` for features that are
    NaN or infinite.
    """

    def encoded(split: LabelledImages) -> tuple[Array, Array]:
        skip, rows = options.skip_bad_images, options.batch_size
        with console.counting("eval fewshot", len(split.labels)) as on_progress:
            features = encode(
                model, split, options.runtime, device, rows, skip_bad=skip, transform=transform, on_progress=on_progress
            )
        count = len(features[1])
        console.info(f"{count} images encoded")
        if count < len(split.labels):
            console.warn(f"{len(split.labels) - count} unreadable images are left out")
        if not np.isfinite(features[0]).all():
            raise NonFiniteError("the network's features are NaN or infinite; use --precision fp32, or other weights")
        return features

    return ProbeFeatures(encoded(splits.train), encoded(splits.test), len(splits.classes))


def _source_of(options: ProbeOptions, exif: bool = False) -> ImageSource:
    own = options.reading
    reading = ReadOptions(own.decode, own.max_pixels, exif=exif if own.exif is None else own.exif)
    columns = options.image_column, options.label_column
    return ImageSource(options.source, options.val_source, options.val_fraction, *columns, reading)


def open_splits(options: ProbeOptions, option: str = "--shots", *, exif: bool = False) -> Splits:
    """Open the images to draw from, at most `pool`, and those to test on.

    `exif` turns images as their EXIF orientation says, unless the options decide it. Raises `DataError` when a class
    has fewer images than the largest number of shots, naming `option`.
    """
    source = _source_of(options, exif)
    train, names = open_split(source, "train")
    if has_validation(source):
        test = open_split(source, "val")[0]
    elif source.val_fraction:
        train, test = hold_out(train, source.val_fraction)
    else:
        raise DataError(NO_TEST.format(f"--data {source.location}", "add --val-data or --val-fraction 0.5"))
    if len(train.labels) > options.pool:
        train = ImageSubset(train, sorted(hash_order(train)[: options.pool]))
    check_shots(option, train.labels, names, max(options.shots))
    return Splits(train, test, names)


def describe_accuracies(result: dict[str, Any]) -> list[str]:
    """Return a line for each number of shots."""
    lines = []
    for shots, entry in result["accuracy"].items():
        mean, interval = as_text(entry, digits=1)
        lines.append(f"{shots:>3}-shot {mean:>6} % (95 % {interval}, {count_noun(entry['n'], 'draw')})")
    return lines


def describe_probe(result: dict[str, Any]) -> str:
    """Return the result as text."""
    images = result["images"]
    lines = [f"{images['train']} images to draw from, {images['test']} to test on, {result['classes']} classes"]
    lines += describe_accuracies(result)
    if result["trained_on"] and (warning := Overlap(**result["trained_on"]).warning()):
        lines.append(f"WARNING: {warning}")
    return "\n".join(lines)
