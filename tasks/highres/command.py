"""From a settled recipe to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpn_cli.console import Console
from dpn_cli.data.classified import open_class_data
from dpn_cli.distributed import World
from dpn_cli.run import run_in_folder
from tasks.highres.recipe import HighresRecipe, in_steps
from tasks.highres.train import DEMO_NOTE, measure_step, run, source_of


def start(
    recipe: HighresRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Fine-tune and return the result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    arch = (recipe.backbone.arch or Path(recipe.backbone.checkpoint or "scratch").stem).replace("/", "-")
    path = (
        output_dir or Path("runs") / ("highres_demo" if recipe.demo else "highres") / f"{arch}-{recipe.backbone.stem}"
    )
    if recipe.demo:
        console.info(DEMO_NOTE)
    return run_in_folder(
        recipe,
        recipe.runtime.device,
        path,
        lambda folder, world: run(recipe, folder, world, console),
        (lambda world: _dry_run(recipe, world, console)) if dry_run else None,
        resume=resume,
        overwrite=overwrite,
        console=console,
    )


def _dry_run(recipe: HighresRecipe, world: World, console: Console) -> None:
    data = open_class_data(source_of(recipe), recipe.data.minival)
    recipe = in_steps(recipe, len(data.train.labels))
    seconds = measure_step(recipe, data, world, console)
    console.info(
        f"dry run passed: {len(data.train.labels)} + {len(data.minival.labels)} + {len(data.val.labels)} images, "
        f"{len(data.classes)} classes, {recipe.schedule.steps} steps at {seconds:.3g} s a step: about "
        f"{recipe.schedule.steps * seconds / 3600:.3g} hours here, and evaluation"
    )


def describe(result: dict[str, Any]) -> str:
    """Return the result as a few lines for a person."""
    images = result["images"]
    height, width = result["image_size"]
    chosen = (
        f"best on minival: {result['minival_top1']:.2f} % of {images['minival']} images at step {result['best_step']}"
        if result["minival_top1"] is not None
        else "no minival: the last step is scored"
    )
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    return (
        f"{result['arch']} stem {result['stem']} at {height}x{width}, {result['classes']} classes\n"
        f"validation: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, loss {result['loss']:.4g} "
        f"({images['val']} images{skipped})\n"
        f"{chosen}; {result['steps']} steps on {images['train']} images"
    )
