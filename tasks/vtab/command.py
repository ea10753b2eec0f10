"""From a settled recipe to a result: output folder, ranks, signals, and the dry run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dpn_cli import engine
from dpn_cli.console import Console
from dpn_cli.distributed import World, from_leader
from dpn_cli.run import run_in_folder, run_name, with_own_stem
from dpn_cli.runstate import Checkpoints
from tasks.vtab.bench import Bench
from tasks.vtab.cells import Cell
from tasks.vtab.data import check_images, open_task
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.report import DEMO_NOTE
from tasks.vtab.sweep import run
from tasks.vtab.table import choose_tasks


def start(
    recipe: VtabRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Run the sweep and return its result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    if recipe.demo:
        console.info(DEMO_NOTE)
    if not recipe.compare:
        recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    return run_in_folder(
        recipe,
        recipe.runtime.device,
        output_dir or default_folder(recipe),
        lambda begun, folder, world: run(begun, folder, world, console),
        (lambda world: _dry_run(recipe, world, console)) if dry_run else None,
        kind="sweep",
        resume=resume,
        overwrite=overwrite,
        console=console,
    )


def default_folder(recipe: VtabRecipe) -> Path:
    """Return runs/vtab/ARCH-STEM, so that another network or demo never meets this run's folder."""
    return (
        Path("runs") / ("vtab_demo" if recipe.demo else "vtab") / run_name(recipe.backbone, "-vs-".join(recipe.stems))
    )


def _dry_run(recipe: VtabRecipe, world: World, console: Console) -> None:
    """Check all data, then save, resume and validate a training of two steps per stem; print what the run costs.

    The test split is not scored: a dry run is no reason to look at it.
    """
    tasks = choose_tasks(recipe.data.tasks, recipe.demo)
    data = {task: open_task(recipe.data, task) for task in tasks}
    if world.leads:
        check_images(data, recipe.data.skip_bad_images, console)
    schedule = recipe.schedule.model_copy(update={"steps": 2, "warmup": 0, "decay_from": None})
    runtime = recipe.runtime.model_copy(update={"checkpoint_every": 1})
    short = recipe.model_copy(update={"schedule": schedule, "runtime": runtime})
    seconds, size = 0.0, 0
    for stem in recipe.stems:
        bench = Bench(short, stem, tasks[0], data[tasks[0]], world, console)
        with tempfile.TemporaryDirectory() as own:
            scratch = Path(from_leader(own))
            cell = Cell(stem, tasks[0], recipe.lrs[0], recipe.seeds[0], "train800", scratch)
            outputs = engine.Outputs(Checkpoints(scratch), warn=console.warn)
            bench.fit(cell, outputs)
            # The second training resumes after the first step, when everything is warm: its one step is the measure.
            resumed = bench.fit(cell, outputs)
            seconds += resumed.seconds / len(recipe.stems)
        size = max(size, 4 * bench.model.report.parameters)
        console.info(f"stem {stem}: {bench.model.report.summary()}")
    cells = len(recipe.lrs) * len(recipe.seeds)
    trainings = len(recipe.stems) * len(tasks) * (cells + (len(recipe.seeds) if recipe.protocol == "vtab" else 0))
    hours = trainings * recipe.schedule.steps * seconds / 3600
    console.info(
        f"dry run passed: {len(tasks)} tasks, {trainings} trainings of {recipe.schedule.steps} steps "
        f"at {seconds:.3g} s a step: about {hours:.3g} hours here, and evaluation; "
        f"at most {cells * size / 1e9:.2g} GB on the disk"
    )
