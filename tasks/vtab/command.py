"""Runs the sweep of a settled recipe, or its dry run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError
from dpn_cli.recipe.compare import spoken
from dpn_cli.recipe.layers import two_steps
from dpn_cli.recipe.start import Place
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console, several
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.session import Session, run_name, session
from dpn_cli.weights.origin import with_own_stem
from tasks.vtab.cells import Cell
from tasks.vtab.data import check_images, open_task
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.report import DEMO_NOTE, print_result
from tasks.vtab.sweep import parts, sweep
from tasks.vtab.table import choose_tasks
from tasks.vtab.trainer import Trainer, check_crops


def run(recipe: VtabRecipe, place: Place, console: Console) -> dict[str, Any] | None:
    """Run the sweep and return its result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its subclasses, which carry the exit code.
    """
    if recipe.demo:
        console.info(DEMO_NOTE)
    if not recipe.compare:
        recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    if place.cell is not None and place.cell >= (count := len(parts(recipe))):
        raise DpnError(f"--cell {place.cell}: there are {count}, 0 to {count - 1}; --print-cells lists them")
    with session(recipe, recipe.runtime, "sweep", place, default_folder(recipe), console) as begun:
        if place.dry_run:
            _dry_run(begun)
            return None
        result = begun.folder.result or sweep(begun, place)
        return result if begun.world.leads else None


def cells(recipe: VtabRecipe) -> list[str]:
    """Return what the numbers of ``--cell`` stand for."""
    return [f"{recipe.folders[network]}/{task.name}" for network, task in parts(recipe)]


def show(result: dict[str, Any]) -> None:
    """Print the tables of a result on stdout."""
    print_result(result, RichConsole(highlight=False))


def default_folder(recipe: VtabRecipe) -> Path:
    """Return runs/vtab/ARCH-STEM, so that every network, and the demo, has a folder of its own."""
    return Path("runs") / ("vtab_demo" if recipe.demo else "vtab") / run_name(recipe.backbone, recipe.versus)


def _dry_run(begun: Session[VtabRecipe]) -> None:
    """Check all data; train two steps per network, with a save and a resume between; print what the run will cost.

    The test split is not scored: a dry run must not look at it.
    """
    recipe, world, console = begun.recipe, begun.world, begun.console
    tasks = choose_tasks(recipe.data.tasks, recipe.demo)
    data = {task: open_task(recipe.data, task) for task in tasks}
    if world.leads:
        check_images(data, recipe.data.skip_bad_images, console)
        check_crops(recipe, tasks, console)
    runtime = recipe.runtime.model_copy(update={"checkpoint_every": 1})
    short = recipe.model_copy(update={"schedule": two_steps(recipe.schedule), "runtime": runtime})
    seconds, size = 0.0, 0
    for network in recipe.networks:
        trainer = Trainer(short, network, tasks[0], data[tasks[0]], world, console)
        with tempfile.TemporaryDirectory() as own:
            scratch = Path(from_leader(own))
            cell = Cell(network, tasks[0], recipe.lrs[0], recipe.seeds[0], "train800", scratch)
            outputs = engine.Outputs(Checkpoints(scratch), warn=console.warn)
            engine.fit(trainer.trainable, trainer.job(cell, outputs))
            # The second training resumes after the first step, when everything is warm: its one step is timed.
            resumed = engine.fit(trainer.trainable, trainer.job(cell, outputs))
            seconds += (resumed.seconds - resumed.earlier[0]) / len(recipe.networks)
        size = max(size, 4 * trainer.model.report.parameters)
        console.info(f"{spoken(network)}: {trainer.model.report.summary()}")
    cells = len(recipe.lrs) * len(recipe.seeds)
    trainings = len(recipe.networks) * len(tasks) * (cells + (len(recipe.seeds) if recipe.protocol == "vtab" else 0))
    hours = trainings * recipe.schedule.steps * seconds / 3600
    console.info(
        f"dry run passed: {several(len(tasks), 'task')}, {several(trainings, 'training')} of "
        f"{several(recipe.schedule.steps, 'step')} at {seconds:.3g} s a step: about {hours:.3g} hours on this machine, "
        f"plus evaluation; at most {cells * size / 1e9:.2g} GB on the disk"
    )
