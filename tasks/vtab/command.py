"""Runs the sweep of a settled config, or its dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.config.launch import Place
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console
from dpn_cli.run.run import Session, run_name, session
from dpn_cli.weights.resolve_stem import with_own_stem
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import check_images, open_task
from tasks.vtab.dry_run import rehearse_sweep
from tasks.vtab.result_tables import DEMO_NOTE, print_result
from tasks.vtab.sweep import parts, sweep
from tasks.vtab.tasks import choose_tasks
from tasks.vtab.train import check_crops


def run(config: VtabConfig, place: Place, console: Console) -> dict[str, Any] | None:
    """Run the sweep and return its result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its subclasses, which carry the exit code.
    """
    if config.demo:
        console.info(DEMO_NOTE)
    if not config.compare:
        config = config.model_copy(update={"backbone": with_own_stem(config.backbone, console)})
    if place.cell is not None and place.cell >= (count := len(parts(config))):
        raise DpnError(f"--cell {place.cell}: there are {count}, 0 to {count - 1}; --print-cells lists them")
    with session(config, config.runtime, "sweep", place, default_folder(config), console) as begun:
        if place.dry_run:
            _dry_run(begun, place)
            return None
        result = begun.folder.result or sweep(begun, place)
        return result if begun.world.leads else None


def cells(config: VtabConfig) -> list[str]:
    """Return what the numbers of ``--cell`` stand for."""
    return [f"{config.folders[network]}/{task.name}" for network, task in parts(config)]


def show(result: dict[str, Any]) -> None:
    """Print the tables of a result on stdout."""
    print_result(result, RichConsole(highlight=False))


def default_folder(config: VtabConfig) -> Path:
    """Return runs/vtab/ARCH-STEM, so that every network, and the demo, has a folder of its own."""
    return Path("runs") / ("vtab_demo" if config.demo else "vtab") / run_name(config.backbone, config.versus)


def _dry_run(begun: Session[VtabConfig], place: Place) -> None:
    """Check all data, rehearse a training of every network, and tell what all of them take."""
    config, world, console = begun.config, begun.world, begun.console
    tasks = choose_tasks(config.data.tasks, config.demo)
    data = {task: open_task(config.data, task) for task in tasks}
    if world.leads:
        check_images(data, config.data.skip_bad_images, console)
        check_crops(config, tasks, console)
    for network in config.networks:
        cost = rehearse_sweep(begun, network, data)
        if world.leads:
            place.costed(cost)
