"""From a settled recipe to a result: output folder, ranks, signals, and the dry run."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from dpn_cli import stopping
from dpn_cli.console import Console
from dpn_cli.distributed import World, from_leader, join
from dpn_cli.errors import DpnError, StoppedError
from dpn_cli.runstate import RunFolder
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.report import DEMO_NOTE
from tasks.vtab.sweep import run, timing
from tasks.vtab.table import choose_tasks


def start(
    recipe: VtabRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Run the sweep and return its result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    with stopping.listen(), join(recipe.runtime.device) as world:
        if recipe.demo:
            console.info(DEMO_NOTE)
        if dry_run:
            _dry_run(recipe, world, console)
            return None
        path = output_dir or default_folder(recipe)
        folder = _open(path, recipe, world, resume=resume, overwrite=overwrite)
        result = folder.result
        if result is None:
            console.info(f"run folder {path}")
            try:
                result = run(recipe, folder, world, console)
            except StoppedError:
                if world.leads:
                    folder.update(status="stopped")
                raise
            except DpnError as error:
                if world.leads:
                    folder.update(status="failed", error=str(error))
                raise
        return result if world.leads else None


def default_folder(recipe: VtabRecipe) -> Path:
    """Return runs/vtab/ARCH-STEM, so that another network or demo never meets this run's folder."""
    arch = (recipe.backbone.arch or Path(recipe.backbone.checkpoint or "scratch").stem).replace("/", "-")
    return Path("runs") / ("vtab_demo" if recipe.demo else "vtab") / f"{arch}-{'-vs-'.join(recipe.stems)}"


def _open(path: Path, recipe: VtabRecipe, world: World, *, resume: bool, overwrite: bool) -> RunFolder:
    """Open the folder on rank 0 and tell all ranks how that went."""
    problem: DpnError | None = None
    if world.leads:
        try:
            RunFolder.open(path, recipe.model_dump(mode="json"), resume=resume, overwrite=overwrite)
        except DpnError as error:
            problem = error
    problem = from_leader(problem)
    if problem is not None:
        raise problem
    return RunFolder(path)


def _dry_run(recipe: VtabRecipe, world: World, console: Console) -> None:
    """Do two steps of every stem on its first task, through save, resume and scoring; print what a run costs."""
    tasks = choose_tasks(recipe.data.tasks, recipe.demo)
    short = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"tasks": (tasks[0].name,)}),
            "lrs": recipe.lrs[:1],
            "seeds": recipe.seeds[:1],
            "schedule": recipe.schedule.model_copy(update={"steps": 2, "warmup": 0}),
            "runtime": recipe.runtime.model_copy(update={"checkpoint_every": 1}),
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = _open(Path(scratch) / "run", short, world, resume=False, overwrite=False)
        began = time.perf_counter()
        run(short, folder, world, console)
        seconds = time.perf_counter() - began
        step = timing(folder)["train_seconds"] / (2 * len(recipe.stems))
    cells = len(recipe.stems) * len(tasks) * len(recipe.lrs) * len(recipe.seeds)
    hours = cells * recipe.schedule.steps * step / 3600
    console.info(
        f"dry run passed in {seconds:.0f} s: {len(tasks)} tasks, {cells} trainings of {recipe.schedule.steps} "
        f"steps at {step:.3g} s a step: about {hours:.3g} hours here, and evaluation. Nothing was written"
    )
