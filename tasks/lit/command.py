"""From a settled recipe to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpn_cli.recipe.start import Place
from dpn_cli.run import console as terminal
from dpn_cli.run import stopping
from dpn_cli.run.console import Console, several
from dpn_cli.run.distributed import World, join
from dpn_cli.run.session import Session, run_name, session
from dpn_cli.weights.backbone import LoadReport
from dpn_cli.weights.origin import with_own_stem
from tasks.lit.batches import tokenize
from tasks.lit.cache import cached_features
from tasks.lit.data import open_pairs
from tasks.lit.encode import cache_root, describe_retrieval
from tasks.lit.recipe import LitRecipe, in_steps
from tasks.lit.rehearsal import rehearse_training
from tasks.lit.tokens import open_tokenizer
from tasks.lit.train import load_tower, open_zeroshot, recipe_encoder, source_of, train

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
            _dry_run(begun, place)
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


def prepare(recipe: LitRecipe, console: Console) -> None:
    """Encode the images that all trainings of a network read."""
    if recipe.cache.use:
        fill_cache(recipe, console)


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


def _dry_run(begun: Session[LitRecipe], place: Place) -> None:
    """Encode some images, rehearse the training on them, and tell what all of it takes."""
    data, val = open_pairs(source_of(begun.recipe))
    labelled = open_zeroshot(begun.recipe)
    recipe = in_steps(begun.recipe, len(data.captions))
    begun.console.info(f"{len(data.captions)} images, {len(val.captions)} held out")
    scored = len(val.captions) + (len(labelled.labels) if labelled else 0)
    cost = rehearse_training(replace(begun, recipe=recipe), data, val, scored)
    if begun.world.leads:
        place.costed(cost)


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
