"""`dpn eval fewshot`: accuracies of the few-shot probe by number of shots and draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpn_cli import stopping
from dpn_cli.backbone import load_backbone
from dpn_cli.classifier import facts_of
from dpn_cli.console import Console
from dpn_cli.data.classified import Part, Source, has_split, hash_order, hold_out, open_split
from dpn_cli.data.labelled import Labelled, fingerprint
from dpn_cli.data.trained_on import Known, look_up
from dpn_cli.distributed import join
from dpn_cli.errors import DataError, DpnError
from dpn_cli.fewshot import POOL, check_shots, encode, pick, probe
from dpn_cli.kinds import resolve
from dpn_cli.recipe import Runtime
from dpn_cli.sources import open_checkpoint
from dpn_cli.statistics import PERCENT, summarize


def fewshot(
    checkpoint: str,
    source: Source,
    shots: Sequence[int],
    seeds: Sequence[int],
    runtime: Runtime,
    console: Console,
    *,
    arch: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    pool: int = POOL,
    batch_size: int = 64,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Probe a checkpoint's representation and return accuracies in percent by shots and seed.

    Features are what the head reads (after pre-logits and tanh where there are). Raises `DataError` when a class has
    fewer images than the largest number of shots.
    """
    with stopping.listen(stopping.NO_RESULT), join(runtime.device) as world:
        if world.size > 1:
            raise DpnError("eval fewshot: run on one rank")
        place = resolve(checkpoint, "dpn eval fewshot")
        opened = None if place == "none" else open_checkpoint(place)
        facts = facts_of(opened) if opened else {}
        model = load_backbone(arch, stem=None, checkpoint=opened, image_size=image_size)
        console.info(model.report.summary())
        model.to(world.device).eval()
        train, names = open_split(source, "train")
        if has_split(source, "val"):
            test: Labelled = open_split(source, "val")[0]
        elif source.val_fraction:
            train, test = hold_out(train, source.val_fraction)
        else:
            raise DataError(f"--data {source.place}: no images to test on; add --val-data or --val-fraction 0.5")
        if len(train.labels) > pool:
            train = Part(train, sorted(hash_order(train)[:pool]))
        check_shots("--shots", train.labels, names, max(shots))
        known = look_up(test, facts.get("trained_on"), world)
        if warning := known and known.warning():
            console.warn(warning)
        features = []
        for split in (train, test):
            features.append(encode(model, split, runtime, world.device, batch_size, skip_bad=skip_bad))
            count = len(features[-1][1])
            console.info(f"{count} images encoded")
            if count < len(split.labels):
                console.warn(f"{len(split.labels) - count} unreadable images are left out")
        (x_train, y_train), (x_test, y_test) = features
        accuracy = {
            shot: {
                seed: 100 * probe(*pick(x_train, y_train, len(names), shot, seed), x_test, y_test, len(names))
                for seed in seeds
            }
            for shot in shots
        }
        return {
            "task": "fewshot",
            "network": checkpoint,
            "data": source.place,
            "fingerprints": {"train": fingerprint(train), "test": fingerprint(test)},
            "trained_on": known.to_dict() if known else None,
            "classes": len(names),
            "images": {"train": len(y_train), "test": len(y_test)},
            "decoder": source.reading.describe(),
            "arch": model.config.arch,
            "stem": model.config.stem,
            "image_size": list(model.config.image_size),
            "accuracy": {
                str(shot): {"seeds": list(by_seed), **summarize(list(by_seed.values()), PERCENT).to_dict()}
                for shot, by_seed in accuracy.items()
            },
        }


def describe(result: dict[str, Any]) -> str:
    """Return the result as lines for a person."""
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
