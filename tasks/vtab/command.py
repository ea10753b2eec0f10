"""Runs the sweep of a settled recipe, or its dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.errors import DpnError
from dpn_cli.recipe.start import Place
from dpn_cli.run.console import Console
from dpn_cli.run.session import Session, run_name, session
from dpn_cli.weights.origin import with_own_stem
from tasks.vtab.data import check_images, open_task
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.rehearsal import rehearse_sweep
from tasks.vtab.report import DEMO_NOTE, print_result
from tasks.vtab.sweep import parts, sweep
from tasks.vtab.table import choose_tasks
from tasks.vtab.trainer import check_crops


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
            _dry_run(begun, place)
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


def _dry_run(begun: Session[VtabRecipe], place: Place) -> None:
    """Check all data, rehearse a training of every network, and tell what all of them take."""
    recipe, world, console = begun.recipe, begun.world, begun.console
    tasks = choose_tasks(recipe.data.tasks, recipe.demo)
    data = {task: open_task(recipe.data, task) for task in tasks}
    if world.leads:
        check_images(data, recipe.data.skip_bad_images, console)
        check_crops(recipe, tasks, console)
    for network in recipe.networks:
        cost = rehearse_sweep(begun, network, data)
        if world.leads:
            place.costed(cost)
