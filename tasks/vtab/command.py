"""The sweep of a resolved config, or its dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.run.console import Console
from dpn_cli.run.run import Run, open_run, run_name
from dpn_cli.sweep.runner import check_trial_number
from dpn_cli.weights.resolve_stem import resolve_stem
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import check_images, open_task
from tasks.vtab.dry_run import dry_run_sweep
from tasks.vtab.result_tables import DEMO_NOTE, print_result
from tasks.vtab.sweep import sweep, sweep_parts
from tasks.vtab.tasks import choose_tasks
from tasks.vtab.train import check_crops


def run(config: VtabConfig, launch: LaunchOptions, console: Console) -> dict[str, Any] | None:
    """Run the sweep and return its result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its subclasses, which carry the exit code.
    """
    if config.demo:
        console.info(DEMO_NOTE)
    if not config.compare:
        config = config.model_copy(update={"backbone": resolve_stem(config.backbone, console)})
    check_trial_number(launch.trial, len(sweep_parts(config)))
    with open_run(config, config.runtime, "sweep", launch, default_folder(config), console) as run:
        if launch.dry_run:
            _dry_run(run, launch)
            return None
        result = run.folder.result or sweep(run, launch)
        return result if run.world.leads else None


def trial_names(config: VtabConfig) -> list[str]:
    """Return the names of the trials, in the order of their numbers (``--trial``)."""
    return [part.name(config) for part in sweep_parts(config)]


def show(result: dict[str, Any]) -> None:
    """Print the tables of a result on stdout."""
    print_result(result, RichConsole(highlight=False))


def default_folder(config: VtabConfig) -> Path:
    """Return runs/vtab/ARCH-STEM, so that every network, and the demo, has a folder of its own."""
    return Path("runs") / ("vtab_demo" if config.demo else "vtab") / run_name(config.backbone, config.joined_networks)


def _dry_run(run: Run[VtabConfig], launch: LaunchOptions) -> None:
    """Check all data, measure a training of every network in a dry run, and print their cost."""
    config, world, console = run.config, run.world, run.console
    tasks = choose_tasks(config.data.tasks, config.demo)
    data = {task: open_task(config.data, task) for task in tasks}
    if world.leads:
        check_images(data, config.data.skip_bad_images, console)
        check_crops(config, tasks, console)
    for network in config.networks:
        cost = dry_run_sweep(run, network, data)
        if world.leads:
            launch.on_cost(cost)
