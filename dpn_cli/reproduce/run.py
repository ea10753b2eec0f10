"""Runs the trainings of tables by the ordinary commands' own configs and modules."""

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
from dpn_cli.errors import DataError, DpnError, NonFiniteError, OutOfMemoryError
from dpn_cli.reproduce.cells import PaperTrial, Places
from dpn_cli.reproduce.trainings import SCENES
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World, barrier, from_leader
from dpn_cli.run.files import make_folder
from dpn_cli.sweep.engines.local import LOGS, last_error
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.scheduler import Work, run_all

# One training after the other, in this process.
ALONE = LaunchOptions()
# Scenes of each class in the splits of the folder that the search at the demo's size reads.
SPLITS = {"train": 10, "val": 4, "test": 4}
FIRST_SCENE = 2_000_000


@dataclass
class FailedRuns:
    """Reasons, by name, of trainings without a result."""

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


def layers(line: Sequence[str], say: Logger = discard_message) -> Any:
    """Return the config of a training's command line. Raises `DpnError`."""
    command, arguments = arguments_of(line)
    return TRAIN_COMMANDS[command].layers(arguments, say)


def run(
    jobs: Sequence[PaperTrial], places: Places, world: World, console: Console, how: LaunchOptions = ALONE
) -> FailedRuns:
    """Run the jobs that have no result, in their order, and return what became of those that still have none.

    A training that diverges or runs out of memory is noted, and those after it go on; so is one whose process dies,
    where trainings run in several, as `how` says. Everything else raises `DpnError`: a mistake or what is wrong with
    the data is that of others, too. Every rank must call it.
    """
    ran = FailedRuns()
    to_do = [job for job in jobs if not from_leader(places.done(job))]
    for job in to_do:
        if missing := from_leader(places.missing(job)):
            ran.waiting[job.name] = f"needs {', '.join(missing)}"
    to_do = [job for job in to_do if job.name not in ran.waiting]
    for job in {job.group: job for job in to_do}.values():
        layers(job.line(places))  # what is wrong with one of them is told before the first begins
    if any(name == SCENES for job in to_do for _, name in job.data):
        if world.leads:
            write_scenes(Path(places.data[SCENES]))
        barrier()
    if how.starts_processes:
        if world.size > 1:
            raise DpnError(f"{how.processes}: starts processes itself; leave it or torchrun out")
        _in_processes(to_do, places, console, how, ran)
    else:
        _one_by_one(to_do, places, world, console, ran)
    return ran


def _one_by_one(jobs: Sequence[PaperTrial], places: Places, world: World, console: Console, ran: FailedRuns) -> None:
    for number, job in enumerate(jobs, 1):
        start = job.start
        if start and start.group not in places.weights and not from_leader(places.done(start)):
            ran.waiting[job.name] = f"starts from {start.name}, which has no result"
            continue
        signals.check()
        console.info(f"{job.name} ({number} of {len(jobs)})")
        try:
            _run_one(job, places, console)
        except (NonFiniteError, OutOfMemoryError) as error:
            if world.size > 1 and isinstance(error, OutOfMemoryError):
                raise  # the other ranks are waiting for this one's gradients
            console.warn(f"{job.name} failed: {error}")
            ran.failed[job.name] = str(error)


def _in_processes(
    jobs: Sequence[PaperTrial], places: Places, console: Console, how: LaunchOptions, ran: FailedRuns
) -> None:
    sources = sorted({places.data[name] for job in jobs for _, name in job.data if Path(places.data[name]).exists()})
    backend = backend_of(how, places.out / LOGS, sources, console.info)
    works = [
        Work(job.name, (*job.line(places), "--no-report"), (job.start.name,) if job.start else (), network=job.group)
        for job in jobs
    ]
    begun: list[str] = []

    def on_start(work: Work) -> None:
        begun.append(work.name)
        console.info(f"{work.name} ({len(begun)} of {len(works)}): {backend.log_of(work.name)}")

    def on_end(work: Work, code: int) -> None:
        error = last_error(backend.log_of(work.name)) if code else ""
        if mistake := next((kind for kind in (DpnError, DataError) if kind.exit_code == code), None):
            raise mistake(f"{work.name}: {error} ({backend.log_of(work.name)})")
        if code:
            ran.failed[work.name] = error
            console.warn(f"{work.name} failed: {ran.failed[work.name]}")
        else:
            console.info(f"{work.name}: done")

    for work in run_all(works, backend, on_start, on_end, signals.check_here):
        ran.waiting[work.name] = f"starts from {work.after[0]}, which has no result"


def _run_one(job: PaperTrial, places: Places, console: Console) -> None:
    line = job.line(places)
    command, arguments = arguments_of(line)
    training = TRAIN_COMMANDS[command]
    config, trainer = load_trainer(training, training.layers(arguments, console.info), console)
    if config.runtime.compile:
        torch.compiler.reset()  # the compiler gives up after eight networks
    launch = LaunchOptions(places.out / job.name, resume=True, explicit_keys=training.explicit_keys(arguments))
    result = trainer.run(config, launch, console)
    if failures := training.failures(result or {}):
        raise NonFiniteError("; ".join(failures))


def write_scenes(folder: Path) -> None:
    """Write scenes as PNG files to SPLIT/CLASS folders, unless they are there."""
    names = synthetic.LABELS["demo_object"]
    left = {(split, label): most for split, most in SPLITS.items() for label in range(len(names))}
    number = FIRST_SCENE
    while any(left.values()):
        scene = synthetic.demo_scene(number)
        label = synthetic.label(scene, "demo_object")
        split = next((split for split in SPLITS if left[split, label]), None)
        if split:
            left[split, label] -= 1
            path = folder / split / names[label].replace(" ", "_") / f"{number}.png"
            if not path.is_file():
                make_folder(path.parent)
                image, _ = synthetic.render(scene)
                Image.fromarray(np.asarray(image)).save(path)
        number += 1
