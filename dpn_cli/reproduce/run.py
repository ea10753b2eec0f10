"""Runs the trials of tables and figures with the configs and trainers of the ordinary commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image

from dpn_cli.commands.train import add_command, load_trainer
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import Logger, discard_message
from dpn_cli.data.sources import synthetic
from dpn_cli.errors import DataError, DpnError, NonFiniteError
from dpn_cli.reproduce.experiment import Locations, PaperTrial
from dpn_cli.reproduce.trainings import SCENES
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World, barrier, from_leader
from dpn_cli.run.files import make_folder
from dpn_cli.sweep.engines.dispatch import dispatch
from dpn_cli.sweep.engines.local import LOGS
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.runner import catch_failure
from dpn_cli.sweep.scheduler import Work

# One trial after the other.
IN_THIS_PROCESS = LaunchOptions()
NO_START = "starts from {}, which has no result"
# Scenes of each class in the splits of the folder that the search at the demo's size reads.
SPLITS = {"train": 10, "val": 4, "test": 4}
FIRST_SCENE = 2_000_000


@dataclass
class UnfinishedTrials:
    """Reasons, by name, why trials have no result: they `failed`, or were not started and are `waiting`."""

    failed: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)


@lru_cache
def _parser(command: str) -> Any:
    """Return the command that parses the words of a training, as the command line has it."""
    app = typer.Typer()
    add_command(app, command, TRAIN_COMMANDS[command])
    return typer.main.get_command(app)


def arguments_of(line: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the command of a line and its parsed arguments. Raises `typer.TyperException` as the command line does."""
    command = next(name for name in TRAIN_COMMANDS if list(line[: len(name.split())]) == name.split())
    with _parser(command).make_context(command, list(line[len(command.split()) :])) as context:
        return command, dict(context.params)


def layers(line: Sequence[str], log: Logger = discard_message) -> Any:
    """Return the config of a training's command line. Raises `DpnError`."""
    command, arguments = arguments_of(line)
    return TRAIN_COMMANDS[command].layers(arguments, log)


def run(
    trials: Sequence[PaperTrial],
    locations: Locations,
    world: World,
    console: Console,
    launch: LaunchOptions = IN_THIS_PROCESS,
) -> UnfinishedTrials:
    """Run the trials without a result, in order, and return the reasons of the unfinished ones.

    A trial that diverges or runs out of memory is noted, and those after it go on; so is one whose process dies, where
    trials run in processes of their own. Everything else raises `DpnError`: a usage or data error would stop other
    trials, too. Every rank must call it.
    """
    unfinished = UnfinishedTrials()
    runnable = list[PaperTrial]()
    for trial in trials:
        if from_leader(locations.is_finished(trial)):
            continue
        if missing := from_leader(locations.missing_data(trial)):
            unfinished.waiting[trial.name] = f"needs {', '.join(missing)}"
        else:
            runnable.append(trial)
    for trial in {trial.group: trial for trial in runnable}.values():
        layers(trial.line(locations))  # a usage error in one of them is raised before the first starts
    if any(name == SCENES for trial in runnable for _, name in trial.data):
        if world.leads:
            write_scenes(Path(locations.data[SCENES]))
        barrier()
    if launch.starts_processes:
        if world.size > 1:
            raise DpnError(f"{launch.processes}: starts processes itself; leave it or torchrun out")
        _run_in_processes(runnable, locations, console, launch, unfinished)
    else:
        _run_in_order(runnable, locations, world, console, unfinished)
    return unfinished


def _run_in_order(
    trials: Sequence[PaperTrial], locations: Locations, world: World, console: Console, unfinished: UnfinishedTrials
) -> None:
    for number, trial in enumerate(trials, 1):
        start = trial.start
        if start and start.group not in locations.weights and not from_leader(locations.is_finished(start)):
            unfinished.waiting[trial.name] = NO_START.format(start.name)
            continue
        signals.check()
        console.info(f"{trial.name} ({number} of {len(trials)})")
        with catch_failure(trial.name, world, console) as errors:
            _run_trial(trial, locations, console)
        if errors:
            unfinished.failed[trial.name] = str(errors[0])


def _run_in_processes(
    trials: Sequence[PaperTrial],
    locations: Locations,
    console: Console,
    launch: LaunchOptions,
    unfinished: UnfinishedTrials,
) -> None:
    data = {locations.data[name] for trial in trials for _, name in trial.data}
    sources = sorted(path for path in data if Path(path).exists())
    backend = backend_of(launch, locations.out / LOGS, sources, console.info)
    works = [
        Work(
            trial.name,
            (*trial.line(locations), "--no-report"),
            (trial.start.name,) if trial.start else (),
            network=trial.group,
        )
        for trial in trials
    ]
    report = dispatch(works, backend, console, _fatal_error)
    unfinished.failed |= report.failed
    unfinished.waiting |= {work.name: NO_START.format(work.after[0]) for work in report.unstarted}


def _fatal_error(code: int) -> type[DpnError] | None:
    """Return the error of a mistake of the user, which stops all trials; None for other exit codes."""
    return next((kind for kind in (DpnError, DataError) if kind.exit_code == code), None)


def _run_trial(trial: PaperTrial, locations: Locations, console: Console) -> None:
    line = trial.line(locations)
    command, arguments = arguments_of(line)
    training = TRAIN_COMMANDS[command]
    config, trainer = load_trainer(training, training.layers(arguments, console.info), console)
    if config.runtime.compile:
        torch.compiler.reset()  # the compiler gives up after eight networks
    launch = LaunchOptions(locations.out / trial.name, resume=True, explicit_keys=training.explicit_keys(arguments))
    result = trainer.run(config, launch, console)
    if failures := training.failures(result or {}):
        raise NonFiniteError("; ".join(failures))


def write_scenes(folder: Path) -> None:
    """Write scenes as PNG files to SPLIT/CLASS folders; existing files stay."""
    names = synthetic.LABELS["demo_object"]
    remaining = {(split, label): count for split, count in SPLITS.items() for label in range(len(names))}
    number = FIRST_SCENE
    while any(remaining.values()):
        scene = synthetic.demo_scene(number)
        label = synthetic.label(scene, "demo_object")
        split = next((split for split in SPLITS if remaining[split, label]), None)
        if split:
            remaining[split, label] -= 1
            path = folder / split / names[label].replace(" ", "_") / f"{number}.png"
            if not path.is_file():
                make_folder(path.parent)
                image, _ = synthetic.render(scene)
                Image.fromarray(np.asarray(image)).save(path)
        number += 1
