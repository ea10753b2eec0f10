"""From a settled recipe to a result: data, output folder, ranks, the dry run, and the text of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpn_cli.classifier import WEIGHTS
from dpn_cli.console import Console
from dpn_cli.data.classified import ClassData, Source, open_class_data
from dpn_cli.data.reading import Reading, decoder_of
from dpn_cli.distributed import World
from dpn_cli.run import run_in_folder, run_name
from dpn_cli.runstate import RunFolder
from dpn_cli.supervised.check import check_batch
from dpn_cli.supervised.recipe import RecipeT, SupervisedRecipe, in_steps
from dpn_cli.supervised.train import measure_step, train_classifier

OpenData = Callable[[SupervisedRecipe], ClassData]
Train = Callable[[RecipeT, ClassData, RunFolder, World], dict[str, Any]]


def open_data(recipe: SupervisedRecipe) -> ClassData:
    """Open the recipe's training images, minival and validation images. Raises `DataError`."""
    return open_class_data(source_of(recipe), recipe.data.minival, chooses=recipe.select == "best")


def source_of(recipe: SupervisedRecipe) -> Source:
    """Return where the recipe's images are."""
    data = recipe.data
    return Source(
        data.source or "demo",
        data.val_source,
        data.val_fraction,
        data.image_column,
        data.label_column,
        Reading(decoder_of(data.decode), data.max_pixels),
    )


def start(
    recipe: RecipeT,
    task: str,
    output_dir: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    console: Console,
    folder: str | None = None,
    open_data: OpenData = open_data,
    train: Train[RecipeT] | None = None,
    runs: Sequence[RecipeT] = (),
) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run.

    The run's folder is below ``runs/`` in `folder`, or one named after the task. `open_data`, `train` and the list of
    `runs` are for tasks that do more than one training.
    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    kind = f"{task}_demo" if recipe.demo else folder or task
    path = output_dir or Path("runs") / kind / run_name(recipe.backbone)

    def run(begun: RecipeT, opened: RunFolder, world: World) -> dict[str, Any]:
        data = open_data(begun)
        if train is not None:
            return train(begun, data, opened, world)
        counted = in_steps(begun, len(data.train.labels), console.info)
        return train_classifier(counted, data, task, opened, world, console)

    def try_out(world: World) -> None:
        data = open_data(recipe)
        counted = [in_steps(each, len(data.train.labels)) for each in runs or [recipe]]
        check_batch(recipe, world)
        seconds = measure_step(counted[-1], data, world, console)
        steps = sum(each.schedule.steps for each in counted)
        console.info(
            f"dry run passed: {len(data.train.labels)} + {len(data.minival.labels)} + {len(data.val.labels)} images, "
            f"{len(data.classes)} classes, {steps} steps in {len(counted)} trainings at {seconds:.3g} s a step: about "
            f"{steps * seconds / 3600:.3g} hours here, and evaluation"
        )

    result = run_in_folder(
        recipe,
        recipe.runtime.device,
        path,
        run,
        try_out if dry_run else None,
        kind="classifier",
        resume=resume,
        overwrite=overwrite,
        console=console,
    )
    if result is not None:
        console.info(f"weights: {path / result.get('weights', WEIGHTS)}, for --checkpoint of any command")
    return result


def describe(result: dict[str, Any]) -> str:
    """Return the result as a few lines for a person."""
    images, lost = result["images"], result.get("lost_records", 0)
    height, width = result["image_size"]
    if result["minival_top1"] is None:
        chosen = "the last step is scored; there was no minival to watch"
    else:
        last = result["best_step"] == result["steps"]
        which = "the last step is scored" if last else f"step {result['best_step']} was best on minival and is scored"
        chosen = f"{which}; minival: top-1 {result['minival_top1']:.2f} % ({images['minival']} images)"
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    return (
        f"{result['arch']} stem {result['stem']} at {height}x{width}, {result['classes']} classes\n"
        f"validation: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, loss {result['loss']:.4g} "
        f"({images['val']} images{skipped})\n"
        f"{chosen}; {result['steps']} steps on {images['train']} images"
        + (f"\nthe curve is incomplete: {lost} records of metrics.jsonl were lost" if lost else "")
    )
