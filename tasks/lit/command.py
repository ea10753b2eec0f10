"""From a finalized config to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.data.turned_images import describe_turned_sample
from dpn_cli.report.shift_scores import describe_shifts
from dpn_cli.run import console as terminal
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World, join
from dpn_cli.run.run import Run, open_run, run_name
from dpn_cli.weights.load_report import LoadReport
from dpn_cli.weights.resolve_stem import resolve_stem
from tasks.lit.batches import tokenize
from tasks.lit.cache import cached_features
from tasks.lit.config import LitConfig, resolve_steps
from tasks.lit.data import open_pairs
from tasks.lit.dry_run import dry_run_training
from tasks.lit.encode import cache_root, describe_retrieval
from tasks.lit.final_zeroshot import open_zeroshot, source_of
from tasks.lit.tokenizer import open_tokenizer
from tasks.lit.train import encoder_of, load_tower, train

DEMO_NOTE = (
    "This is the demo: generated scenes and their sentences. Nothing here is a number of the "
    "paper. For your own images: dpn lit train --data pairs.csv --checkpoint WEIGHTS"
)


def run(config: LitConfig, launch: LaunchOptions, console: Console) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    config = config.model_copy(update={"backbone": resolve_stem(config.backbone, console)})
    with open_run(config, config.runtime, "towers", launch, default_folder(config), console) as run:
        if launch.dry_run:
            _dry_run(run, launch)
            return None
        result = run.folder.result or train(run)
        return result if run.world.leads else None


def default_folder(config: LitConfig) -> Path:
    """Return runs/lit/ARCH-STEM."""
    return Path("runs") / ("lit_demo" if config.demo else "lit") / run_name(config.backbone)


def load(config: LitConfig) -> LoadReport:
    """Load the frozen tower and say how that went. Raises as `load_backbone` does."""
    return load_tower(config, World(0, 1, torch.device("cpu"))).report


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(describe_training(result))


def prepare(config: LitConfig, console: Console) -> None:
    """Encode the images that all trainings of a network read."""
    if config.cache.use:
        fill_cache(config, console)


def fill_cache(config: LitConfig, console: Console) -> dict[str, Any] | None:
    """Encode all images of a config once and turn the captions into tokens; None on ranks that do not lead."""
    with signals.listen(signals.PARTS_KEPT), join(config.runtime.device) as world:
        data, val = open_pairs(source_of(config))
        tokenizer = open_tokenizer(config.text.tokenizer, config.text.context, config.text.clean)
        tower = load_tower(config, world)
        console.info(tower.report.summary())
        root, encoder = cache_root(config.cache.folder), encoder_of(config, tower, world)
        features = cached_features(data, encoder, root, world, console)
        held_out = cached_features(val, replace(encoder, views=0), root, world, console)
        if not world.leads:
            return None
        texts = tokenize(data, tokenizer, root)
        return {
            "task": "lit cache",
            "folder": str(root),
            "images": len(features),
            "held_out": len(held_out),
            "views": encoder.views,
            "width": features.width,
            "unreadable": len(features.bad) + len(held_out.bad),
            "left_out": data.dropped,
            "captions": len(texts.tokens),
            "cut": texts.cut,
        }


def _dry_run(run: Run[LitConfig], launch: LaunchOptions) -> None:
    """Encode some images, measure the training in a dry run, and print the cost."""
    data, val = open_pairs(source_of(run.config))
    labelled = open_zeroshot(run.config)
    config = resolve_steps(run.config, len(data.captions))
    run.console.info(f"{len(data.captions)} images, {len(val.captions)} held out")
    if message := describe_turned_sample(data, len(data.captions), data.reading.exif):
        run.console.info(message)
    passes = 1 + run.config.shift.count_passes()
    scored = len(val.captions) + (passes * len(labelled.labels) if labelled else 0)
    cost = dry_run_training(replace(run, config=config), data, val, scored)
    if run.world.leads:
        launch.on_cost(cost)


def describe_training(result: dict[str, Any]) -> str:
    """Return a training's result as text."""
    left_out = sum(result["left_out"].values())
    height, width = result["image_size"]
    lines = [
        f"{result['arch']} stem {result['stem']} at {height}x{width}, text tower {result['text']['size']}, "
        f"{result['tokenizer']['name']}, loss {result['loss']} {result['train_loss']:.4g}, "
        f"temperature {result['temperature']:.3g}",
        f"{count_noun(result['steps'], 'step')} of {result['batch_size']} on {result['pairs']['images']} images with "
        f"{result['pairs']['captions']} captions ({left_out} left out, {count_noun(result['cut'], 'caption')} cut)",
        "held out: " + describe_retrieval(result["retrieval"]),
    ]
    if "zeroshot" in result:
        scored = result["zeroshot"]
        class_words = "coloured shapes" if scored["prompts"] == "demo" else "classes"
        lines.append(
            f"zero-shot: top-1 {scored['top1']:.2f} % of {scored['classes']} {class_words}, "
            f"{scored['top1'] / scored['chance']:.1f} x chance"
        )
    return "\n".join([*lines, *describe_shifts(result)])


def describe_cache(result: dict[str, Any]) -> str:
    """Return the content of a cache as text."""
    views_text = "the plain image" if not result["views"] else f"{result['views']} augmented views"
    return (
        f"{result['folder']}: features of {result['images']} + {result['held_out']} images ({views_text}, width "
        f"{result['width']}, float16), {result['captions']} captions as tokens\n"
        f"{result['unreadable']} unreadable, {result['left_out']} without text or file, "
        f"{count_noun(result['cut'], 'caption')} cut"
    )
