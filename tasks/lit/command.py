"""From a settled recipe to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpn_cli.data.pixels import resize
from dpn_cli.engine import fit as engine
from dpn_cli.recipe.start import Place
from dpn_cli.recipe.training import of_two_steps
from dpn_cli.run import console as terminal
from dpn_cli.run import stopping
from dpn_cli.run.console import Console, several
from dpn_cli.run.distributed import World, join
from dpn_cli.run.session import run_name, session
from dpn_cli.weights.backbone import LoadReport
from dpn_cli.weights.origin import with_own_stem
from tasks.lit.batches import cached_batches, tokenize
from tasks.lit.cache import BATCH, cached_features
from tasks.lit.captions import Subset
from tasks.lit.data import open_pairs
from tasks.lit.encode import cache_root, describe_retrieval
from tasks.lit.features import Features
from tasks.lit.recipe import LitRecipe, in_steps
from tasks.lit.tokens import open_tokenizer
from tasks.lit.train import job_of, load_tower, new_text_tower, open_zeroshot, recipe_encoder, source_of, train

DEMO_NOTE = (
    "This is the demo: generated scenes and their sentences. Nothing here is a number of the "
    "paper. For your own pictures: dpn lit train --data pairs.csv --checkpoint WEIGHTS"
)


def run(recipe: LitRecipe, place: Place, console: Console) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run."""
    if recipe.demo:
        console.info(DEMO_NOTE)
    recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    with session(recipe, recipe.runtime, "towers", place, default_folder(recipe), console) as begun:
        if place.dry_run:
            _dry_run(begun.recipe, begun.world, console)
            return None
        result = begun.folder.result or train(begun)
        return result if begun.world.leads else None


def default_folder(recipe: LitRecipe) -> Path:
    """Return runs/lit/ARCH-STEM."""
    return Path("runs") / ("lit_demo" if recipe.demo else "lit") / run_name(recipe.backbone)


def load(recipe: LitRecipe) -> LoadReport:
    """Load the frozen tower and say how that went. Raises as `load_backbone` does."""
    return load_tower(recipe, World(0, 1, torch.device("cpu"))).report


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(describe_training(result))


def fill_cache(recipe: LitRecipe, console: Console) -> dict[str, Any] | None:
    """Encode all images of a recipe once and turn the captions into tokens; None on ranks that do not lead."""
    with stopping.listen(stopping.PARTS_KEPT), join(recipe.runtime.device) as world:
        data, val = open_pairs(source_of(recipe))
        tokenizer = open_tokenizer(recipe.text.tokenizer, recipe.text.context, recipe.text.clean)
        tower = load_tower(recipe, world)
        console.info(tower.report.summary())
        root, encoder = cache_root(recipe.cache.folder), recipe_encoder(recipe, tower, world)
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


def _dry_run(recipe: LitRecipe, world: World, console: Console) -> None:
    """Encode some images and train two steps on them, keeping nothing; says what all of it would take."""
    data, val = open_pairs(source_of(recipe))
    open_zeroshot(recipe)
    recipe = in_steps(recipe, len(data.captions))
    tokenizer = open_tokenizer(recipe.text.tokenizer, recipe.text.context, recipe.text.clean)
    tower = load_tower(recipe, world)
    console.info(tower.report.summary())
    encoder, some = recipe_encoder(recipe, tower, world), Subset(data, range(min(BATCH, len(data.captions))))
    began = time.perf_counter()
    features = encoder.encode(torch.stack([resize(some.pixels(row), encoder.size) for row in some.labels]))
    encoding = (time.perf_counter() - began) / len(features) * (len(data.captions) + len(val.captions))
    text = new_text_tower(recipe, tower, tokenizer)
    again = torch.arange(recipe.batch_size) % len(features)  # the few images stand for a whole batch
    some_features = Features([features.half()[:, None].numpy()], ())
    batches = cached_batches(some_features, again, tokenize(some, tokenizer), recipe.batch_size, 0, world)
    job = job_of(of_two_steps(recipe), text, batches, world, engine.Outputs(warn=console.warn))
    done = engine.fit(engine.prepare(text, recipe.runtime, world), job)
    hours = recipe.schedule.steps * done.seconds / 2 / 3600
    size = len(data.captions) * max(1, recipe.cache.views) * tower.embed_dim * 2 / 2**30
    console.info(
        f"dry run passed: {len(data.captions)} images, {len(val.captions)} held out; to encode them once about "
        f"{encoding / 3600:.3g} hours and {size:.3g} GiB; {several(recipe.schedule.steps, 'step')} at "
        f"{done.seconds / 2:.3g} s: about {hours:.3g} hours here"
    )


def describe_training(result: dict[str, Any]) -> str:
    """Return a training's result as text."""
    left_out = sum(result["left_out"].values())
    height, width = result["image_size"]
    lines = [
        f"{result['arch']} stem {result['stem']} at {height}x{width}, text tower {result['text']['size']}, "
        f"{result['tokenizer']['name']}, loss {result['loss']} {result['train_loss']:.4g}, "
        f"temperature {result['temperature']:.3g}",
        f"{several(result['steps'], 'step')} of {result['batch_size']} on {result['pairs']['images']} images with "
        f"{result['pairs']['captions']} captions ({left_out} left out, {several(result['cut'], 'caption')} cut)",
        "held out: " + describe_retrieval(result["retrieval"]),
    ]
    if "zeroshot" in result:
        scored = result["zeroshot"]
        named = "coloured shapes" if scored["prompts"] == "demo" else "classes"
        lines.append(
            f"zero-shot: top-1 {scored['top1']:.2f} % of {scored['classes']} {named}, "
            f"{scored['top1'] / scored['chance']:.1f} x chance"
        )
    return "\n".join(lines)


def describe_cache(result: dict[str, Any]) -> str:
    """Return the content of a cache as text."""
    kept = "the plain image" if not result["views"] else f"{result['views']} augmented views"
    return (
        f"{result['folder']}: features of {result['images']} + {result['held_out']} images ({kept}, width "
        f"{result['width']}, float16), {result['captions']} captions as tokens\n"
        f"{result['unreadable']} unreadable, {result['left_out']} without text or file, "
        f"{several(result['cut'], 'caption')} cut"
    )
