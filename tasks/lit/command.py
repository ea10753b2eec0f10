"""From a settled recipe to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpn_cli import engine, stopping
from dpn_cli.console import Console
from dpn_cli.data.pixels import resize
from dpn_cli.distributed import World, join
from dpn_cli.memory import MicroBatch
from dpn_cli.run import run_in_folder, run_name, with_own_stem
from tasks.lit.batches import cached_batches, tokenize
from tasks.lit.cache import BATCH, cached_features
from tasks.lit.captions import Subset
from tasks.lit.data import open_pairs
from tasks.lit.encode import cache_root, describe_retrieval
from tasks.lit.features import Features
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.recipe import LitRecipe, in_steps
from tasks.lit.tokens import open_tokenizer
from tasks.lit.train import load_tower, new_text_tower, recipe_wants, run, source_of

DEMO_NOTE = (
    "This is the demo: generated scenes, their sentences and a small image tower. Nothing here is a number of the "
    "paper. For your own pictures: dpn lit train --data pairs.csv --checkpoint WEIGHTS"
)


def start(
    recipe: LitRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    if recipe.demo:
        console.info(DEMO_NOTE)
    recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    path = output_dir or Path("runs") / ("lit_demo" if recipe.demo else "lit") / run_name(recipe.backbone)
    return run_in_folder(
        recipe,
        recipe.runtime.device,
        path,
        lambda begun, folder, world: run(begun, folder, world, console),
        (lambda world: _dry_run(recipe, world, console)) if dry_run else None,
        kind="towers",
        resume=resume,
        overwrite=overwrite,
        console=console,
    )


def fill_cache(recipe: LitRecipe, console: Console) -> dict[str, Any] | None:
    """Encode all images of a recipe once and turn the captions into tokens; None on ranks that do not lead."""
    with stopping.listen(stopping.GOES_ON), join(recipe.runtime.device) as world:
        data, val = open_pairs(source_of(recipe))
        tokenizer = open_tokenizer(recipe.text.tokenizer, recipe.text.context, recipe.text.clean)
        tower = load_tower(recipe, world)
        console.info(tower.report.summary())
        root, wanted = cache_root(recipe.cache.folder), recipe_wants(recipe, tower, world)
        features = cached_features(data, wanted, root, world, console)
        held_out = cached_features(val, replace(wanted, views=0), root, world, console)
        if not world.leads:
            return None
        texts = tokenize(data, tokenizer, root)
        return {
            "task": "lit cache",
            "folder": str(root),
            "images": len(features),
            "held_out": len(held_out),
            "views": wanted.views,
            "width": features.width,
            "unreadable": len(features.bad) + len(held_out.bad),
            "left_out": data.dropped,
            "captions": len(texts.tokens),
            "cut": texts.cut,
        }


def _dry_run(recipe: LitRecipe, world: World, console: Console) -> None:
    """Encode some images and train two steps on them, keeping nothing; says what all of it would take."""
    data, val = open_pairs(source_of(recipe))
    recipe = in_steps(recipe, len(data.captions))
    tokenizer = open_tokenizer(recipe.text.tokenizer, recipe.text.context, recipe.text.clean)
    tower = load_tower(recipe, world)
    console.info(tower.report.summary())
    wanted, some = recipe_wants(recipe, tower, world), Subset(data, range(min(BATCH, len(data.captions))))
    began = time.perf_counter()
    found = wanted.encode(torch.stack([resize(some.pixels(row), wanted.size) for row in some.labels]))
    encoding = (time.perf_counter() - began) / len(found) * (len(data.captions) + len(val.captions))
    text = new_text_tower(recipe, tower, tokenizer)
    schedule = recipe.schedule.model_copy(update={"steps": 2, "warmup": 0, "decay_from": None})
    again = torch.arange(recipe.batch_size) % len(found)  # the few images stand for a whole batch
    done = engine.fit(
        engine.prepare(text, recipe.runtime, world),
        ContrastiveLoss(recipe.loss, world),
        cached_batches(
            Features([found.half()[:, None].numpy()], ()), again, tokenize(some, tokenizer), recipe.batch_size, 0, world
        ),
        None,
        engine.Training(recipe.optim, schedule, recipe.lr, recipe.batch_size, recipe.seed),
        recipe.runtime,
        world,
        engine.Outputs(warn=console.warn),
        MicroBatch.choose(recipe.runtime, recipe.batch_size // world.size, text, world.device),
    )
    hours = recipe.schedule.steps * done.seconds / 2 / 3600
    size = len(data.captions) * max(1, recipe.cache.views) * tower.embed_dim * 2 / 2**30
    console.info(
        f"dry run passed: {len(data.captions)} images, {len(val.captions)} held out; to encode them once about "
        f"{encoding / 3600:.3g} hours and {size:.3g} GiB; {recipe.schedule.steps} steps at {done.seconds / 2:.3g} s: "
        f"about {hours:.3g} hours here"
    )


def describe(result: dict[str, Any]) -> str:
    """Return a training's result as a few lines for a person."""
    left_out = sum(result["left_out"].values())
    height, width = result["image_size"]
    lines = [
        f"{result['arch']} stem {result['stem']} at {height}x{width}, text tower {result['text']['size']}, "
        f"{result['tokenizer']['name']}, loss {result['loss']} {result['train_loss']:.4g}, "
        f"temperature {result['temperature']:.3g}",
        f"{result['steps']} steps of {result['batch_size']} on {result['pairs']['images']} images with "
        f"{result['pairs']['captions']} captions ({left_out} left out, {result['cut']} captions cut)",
        "held out: " + describe_retrieval(result["retrieval"]),
    ]
    if "zeroshot" in result:
        scored = result["zeroshot"]
        lines.append(
            f"zero-shot: top-1 {scored['top1']:.2f} % of {scored['classes']} coloured shapes, "
            f"{scored['top1'] / scored['chance']:.1f} x chance"
        )
    return "\n".join(lines)


def describe_cache(result: dict[str, Any]) -> str:
    """Return what a cache holds, for a person."""
    kept = "the plain image" if not result["views"] else f"{result['views']} augmented views"
    return (
        f"{result['folder']}: features of {result['images']} + {result['held_out']} images ({kept}, width "
        f"{result['width']}, float16), {result['captions']} captions as tokens\n"
        f"{result['unreadable']} unreadable, {result['left_out']} without text or file, {result['cut']} captions cut"
    )
