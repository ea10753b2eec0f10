"""The dry run of a sweep: one of its trainings for every network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from dpn_cli.config.cost import Cost
from dpn_cli.data.loader import count_workers
from dpn_cli.data.pixels import PixelSet, load
from dpn_cli.data.sources.base import ImageSubset
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit
from dpn_cli.run.run import Run
from dpn_cli.sweep.grid import format_network
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData
from tasks.vtab.tasks import TRAIN, VAL, Task
from tasks.vtab.train import Trainer
from tasks.vtab.trials import VtabTrial


def dry_run_sweep(run: Run[VtabConfig], network: str, data: Mapping[Task, TaskData]) -> Cost:
    """Measure a training on the task with the most classes in a dry run, and return the cost of the whole sweep.

    The test split is neither read nor scored: a dry run must not use it. Raises as `dry_run_fit` does.
    """
    config, world, console = run.config, run.world, run.console
    task = max(data, key=lambda task: task.classes)
    trainer = Trainer(config, network, task, data[task], world, console)
    console.info(f"{format_network(network)}: {trainer.model.report.summary()}")
    trial = VtabTrial(network, task, config.lrs[0], config.seeds[0], "train800", run.folder.path)

    def build_setup() -> DryRunSetup:
        job = trainer.job(trial, engine.Outputs(warn=console.warn))
        workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
        return DryRunSetup(trainer.trainable, job, _sample_work(trainer), workers)

    weights = 4 * trainer.model.report.parameters
    name = network if config.compare else f"{trainer.model.config.arch} {network}"
    return sweep_cost(config, dry_run_fit(build_setup, name, run.folder.path, weights=weights), data)


def sweep_cost(config: VtabConfig, trial: Cost, tasks: Collection[Task]) -> Cost:
    """Return the cost of a network's sweep from that of one training, whose evaluation is of one image."""
    seeds, trials = len(config.seeds), len(config.lrs) * len(config.seeds)
    final = seeds if config.protocol == "vtab" else 0
    trainings = len(tasks) * (trials + final)
    scored = trainings * VAL + sum(TRAIN + VAL + seeds * task.test for task in tasks)
    saved_weights = {"none": 0, "chosen": seeds, "all": trials + final}[config.keep_weights]
    return replace(
        trial,
        steps=trainings * trial.steps,
        trainings=trainings,
        evaluation_seconds=scored * trial.evaluation_seconds,
        kept=saved_weights * len(tasks) * trial.kept,
        passing=trial.passing + (trials + final) * trial.kept,  # until the learning rate of a task is chosen and scored
    )


def _sample_work(trainer: Trainer) -> Sampled:
    """Return the evaluation of a batch of validation images for every rank, decoded as those of the test split are."""
    config, world = trainer.config, trainer.world
    pixels, split = trainer.pixels("val200", train=False), trainer.data.val200
    images = min(config.eval_batch_size * world.size, len(pixels.images))
    samples = PixelSet(pixels.images[:images], pixels.labels[:images])
    rank_images = ImageSubset(split, range(world.rank, images, world.size))
    decode = partial(load, rank_images, trainer.size, workers=0, skip_bad=config.data.skip_bad_images)

    def evaluate() -> None:
        decode()
        trainer.evaluate(samples)

    return Sampled(images, evaluate, decode, end=1)
