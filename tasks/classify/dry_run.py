"""The dry run of a classifier's training."""

from __future__ import annotations

from collections import deque

from dpn_cli.config.cost import Cost
from dpn_cli.data.loader import count_workers
from dpn_cli.data.sources.base import ImageSubset
from dpn_cli.data.splits import ClassData
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit
from dpn_cli.metrics import rank_share
from dpn_cli.model.freeze import freeze
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.weights.backbone import Backbone
from tasks.classify.classifier import Classifier
from tasks.classify.config import ConfigT, SupervisedConfig
from tasks.classify.preflight import resize_side_of
from tasks.classify.train import evaluate, evaluation_interval, load_network, loss_of, training_batches


def dry_run_training(run: Run[ConfigT], data: ClassData) -> Cost:
    """Measure a training in a dry run, its duration in steps, and return its cost; probes of finished networks do not
    count. Raises as `dry_run_fit` does.
    """
    config, world, console = run.config, run.world, run.console
    model = load_network(config, len(data.classes))
    console.info(model.report.summary())
    name, weights = f"{model.config.arch} {model.config.stem}", 4 * model.report.parameters
    del model

    def begin() -> DryRunSetup:
        model = load_network(config, len(data.classes))
        if config.freeze:
            freeze(model, config.freeze)
        watched = bool(data.minival.labels)
        job = engine.TrainJob.from_config(
            config,
            loss_fn=loss_of(config, model, len(data.classes)),
            batches=training_batches(config, model, data, world, workers=0, skip_bad=config.data.skip_bad_images),
            ema_decay=config.ema,
            evaluate_every=evaluation_interval(config) if watched else 0,
            keep_best=config.select == "best",
            world=world,
            outputs=engine.Outputs(warn=console.warn),
        )
        workers = count_workers(config.runtime.workers, world.device, world.here)
        return DryRunSetup(
            engine.prepare(model, config.runtime, world), job, _sampled(config, model, data, world), workers
        )

    return dry_run_fit(begin, name, run.folder.path, weights=weights)


def _sampled(config: SupervisedConfig, model: Backbone, data: ClassData, world: World) -> Sampled:
    """Return the evaluation of a batch of every rank, of minival where there is one: nothing is told of its score."""
    split = data.minival if data.minival.labels else data.val
    images = min(config.eval_batch_size * world.size, len(split.labels))
    few = ImageSubset(split, range(images))
    here = config.model_copy(update={"runtime": config.runtime.model_copy(update={"workers": 0})})
    side = resize_side_of(config, model.config.image_size)
    classifier = Classifier(model, data.classes, config.loss, side, {}, split.reading.decoder)
    size, skip_bad = config.eval_batch_size, config.data.skip_bad_images
    probed = config.fewshot * len(data.classes) + len(data.minival.labels) if config.fewshot else 0
    return Sampled(
        images,
        lambda: evaluate(classifier, few, here, world),
        lambda: deque(rank_share(few, classifier.transform, world, size, 0, skip_bad=skip_bad), maxlen=0),
        during=len(data.minival.labels) + probed,
        end=len(data.val.labels),
    )
