"""From a settled recipe to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpn_cli.console import Console
from dpn_cli.distributed import World
from dpn_cli.run import run_in_folder, run_name, with_own_stem
from tasks.segment.recipe import SegmentRecipe, in_steps
from tasks.segment.segmenter import WEIGHTS
from tasks.segment.train import DEMO_NOTE, describe_length, measure_step, open_data, run


def start(
    recipe: SegmentRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    name = run_name(recipe.backbone)
    task = "segment_demo" if recipe.demo else f"segment_{recipe.data.dataset}"
    share = f"-{recipe.data.fraction:g}" if recipe.data.fraction < 1 else ""
    if recipe.demo:
        console.info(DEMO_NOTE)
    path = output_dir or Path("runs") / task / f"{name}{share}"
    result = run_in_folder(
        recipe,
        recipe.runtime.device,
        path,
        lambda begun, folder, world: run(begun, folder, world, console),
        (lambda world: _dry_run(recipe, world, console)) if dry_run else None,
        kind="segmenter",
        resume=resume,
        overwrite=overwrite,
        console=console,
    )
    if result is not None:
        console.info(f"weights: {path / WEIGHTS}, for 'dpn segment eval' and 'predict'")
    return result


def _dry_run(recipe: SegmentRecipe, world: World, console: Console) -> None:
    data = open_data(recipe)
    recipe = in_steps(recipe, len(data.train))
    console.info(describe_length(recipe, data))
    seconds = measure_step(recipe, data, world, console)
    console.info(
        f"dry run passed: {seconds:.3g} s a step, about {recipe.schedule.steps * seconds / 3600:.3g} hours here, "
        "and evaluation"
    )


def describe(result: dict[str, Any]) -> str:
    """Return the result of a training as a few lines for a person."""
    share = f", fraction {result['fraction']:g}" if result["fraction"] < 1 else ""
    return (
        f"{result['arch']} stem {result['stem']} on {result['dataset']}{share}, crops of {result['crop'][0]}\n"
        f"{describe_scores(result)}\n"
        f"{result['steps']} steps on {result['train_images']} images ({result['passes']:g} passes)"
    )


def describe_scores(result: dict[str, Any]) -> str:
    """Return the scores of a result as a line for a person."""
    how = result["evaluation"]
    looks = [how["mode"], "resized" if how["size"] == "resize" else "native size"]
    looks += ["scales " + ",".join(f"{scale:g}" for scale in how["scales"])] if how["scales"] != [1.0] else []
    looks += ["flip"] if how["flip"] else []
    unseen = result["classes"] - result["classes_seen"]
    return (
        f"validation: mIoU {result['miou']:.2f} %, pixel accuracy {result['pixel_accuracy']:.2f} %, mean accuracy "
        f"{result['mean_accuracy']:.2f} % ({result['images']} images, {', '.join(looks)}; all pixels of the most "
        f"frequent class: mIoU {result['majority_miou']:.2f} %)"
        + (f"; resized: mIoU {result['resized']['miou']:.2f} %" if "resized" in result else "")
        + (f"; {unseen} of {result['classes']} classes do not occur" if unseen else "")
    )
