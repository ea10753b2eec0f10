"""Dry run of a classifier's training."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.data.loader import count_workers
from dpn_cli.data.pixels import Transform
from dpn_cli.data.sources.base import ImageSubset, LabelledImages
from dpn_cli.data.splits import ClassData
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit, summarize_network
from dpn_cli.metrics import rank_share
from dpn_cli.model.freeze import freeze
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.weights.backbone import Backbone
from tasks.classify.classifier import Classifier
from tasks.classify.config import ConfigT, SupervisedConfig, resolve_steps
from tasks.classify.distill.config import DistillConfig
from tasks.classify.fewshot import check_probe_data, final_probe_options
from tasks.classify.preflight import check_batch, check_images, check_shards, resize_side_of
from tasks.classify.train import evaluate, evaluation_interval, load_network, loss_of
from tasks.classify.training_batches import training_batches

ClassifyConfigT = TypeVar("ClassifyConfigT", SupervisedConfig, DistillConfig)


def dry_run_training(run: Run[ConfigT], data: ClassData) -> Cost:
    """Measure a training in a dry run, its duration in steps, and return its cost. Raises as `dry_run_fit` does.

    Probes of finished networks do not count.
    """
    config, world, console = run.config, run.world, run.console
    model = load_network(config, len(data.classes))
    console.info(model.report.summary())
    name, weights = summarize_network(model)
    del model

    def build_setup() -> DryRunSetup:
        model = load_network(config, len(data.classes))
        if config.freeze:
            freeze(model, config.freeze)
        has_minival = bool(data.minival.labels)
        job = engine.TrainJob.from_config(
            config,
            loss_fn=loss_of(config, model, len(data.classes)),
            batches=training_batches(config, model, data, world, workers=0, skip_bad=config.data.skip_bad_images),
            ema_decay=config.ema,
            evaluate_every=evaluation_interval(config) if has_minival else 0,
            keep_best=config.select == "best",
            world=world,
            outputs=engine.Outputs(warn=console.warn),
        )
        workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
        return DryRunSetup(
            engine.prepare(model, config.runtime, world), job, _sample_work(config, model, data, world), workers
        )

    return dry_run_fit(build_setup, name, run.folder.path, weights=weights)


def _sample_work(config: SupervisedConfig, model: Backbone, data: ClassData, world: World) -> Sampled:
    """Return the evaluation of one batch per rank, on minival if any; no score is shown."""
    split = data.minival if data.minival.labels else data.val
    samples = first_batch(split, config.eval_batch_size, world)
    in_process = without_workers(config)
    side = resize_side_of(config, model.config.image_size)
    classifier = Classifier(model, data.classes, config.loss, side, {}, split.reading.decoder, split.reading.exif)
    probe_images = config.fewshot * len(data.classes) + len(data.minival.labels) if config.fewshot else 0
    return Sampled(
        len(samples.labels),
        lambda: evaluate(classifier, samples, in_process, world),
        lambda: load_batch(samples, classifier.transform, config, world),
        during=len(data.minival.labels) + probe_images,
        end=len(data.val.labels) * (1 + config.shift.count_passes()),
    )


def first_batch(split: LabelledImages, batch_size: int, world: World) -> ImageSubset:
    """Return the first images of a split, one batch per rank at most."""
    return ImageSubset(split, range(min(batch_size * world.size, len(split.labels))))


def without_workers(config: ClassifyConfigT) -> ClassifyConfigT:
    """Return a config that loads images in the training's process."""
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"workers": 0})})


def load_batch(
    images: LabelledImages, transform: Transform, config: SupervisedConfig | DistillConfig, world: World
) -> None:
    """Load this rank's fraction of some images, and drop them."""
    skip_bad = config.data.skip_bad_images
    deque(rank_share(images, transform, world, config.eval_batch_size, 0, skip_bad=skip_bad), maxlen=0)


def dry_run(run: Run[ConfigT], data: ClassData, trainings: Sequence[ConfigT], launch: LaunchOptions) -> None:
    """Check the data, measure the last of some trainings in a dry run, and print the cost of all."""
    config, world = run.config, run.world
    trials = [resolve_steps(trial, len(data.train.labels)) for trial in trainings]
    check_batch(config, world)
    check_shards(trials[-1], data, world)
    if world.leads:
        check_images(config, data, run.console)
    if options := final_probe_options(config):
        check_probe_data(options)
    run.console.info(
        f"{len(data.train.labels)} + {len(data.minival.labels)} + {len(data.val.labels)} images, "
        f"{len(data.classes)} classes"
    )
    cost = dry_run_training(replace(run, config=trials[-1]), data)
    steps = sum(trial.schedule.steps for trial in trials)
    networks = min(2, len(trials))  # of a sweep: the best network, and the one to compare with it
    if world.leads:
        launch.on_cost(replace(cost.of_steps(steps, len(trials)), kept=networks * cost.kept))
