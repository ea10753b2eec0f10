"""Training of one classifier: data checks, training, choice of a checkpoint, one score on validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpn_cli.data.leakage import record
from dpn_cli.data.loader import blend, count_workers
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.splits import ClassData
from dpn_cli.engine import fit as engine
from dpn_cli.engine.losses import LOSSES
from dpn_cli.engine.state import evaluated_weights
from dpn_cli.metrics import Scores, score
from dpn_cli.model.freeze import freeze
from dpn_cli.report.shift_scores import describe_shifts
from dpn_cli.run import distributed
from dpn_cli.run.artifact_kinds import DIGEST
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import OnProgress, count_noun, ignore_progress
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.run.run import Run, run_name
from dpn_cli.statistics import format_accuracy
from dpn_cli.weights.backbone import Backbone, backbone_of
from dpn_cli.weights.resolve_stem import describe_start
from tasks.classify.classifier import WEIGHTS, Classifier, compute_logits, load_classifier, save_classifier
from tasks.classify.classifier_shifts import ClassifierShifts
from tasks.classify.config import ConfigT, SupervisedConfig, head_bias_of
from tasks.classify.fewshot import describe_accuracies, final_probe_options, probe_network
from tasks.classify.predictions_file import save_scores
from tasks.classify.preflight import (
    check_batch,
    check_data,
    check_shards,
    interval,
    resize_side_of,
    shot_pool,
)
from tasks.classify.probe import draw_rows, encode, probe
from tasks.classify.training_batches import augmentation_of, normalize, training_batches

Json = dict[str, Any]


def train(run: Run[ConfigT], data: ClassData, task: str) -> Json:
    """Train in the run's folder, or finish a run there, and return the result, which is also written there.

    The config's duration is in steps.
    Raises `DpnError` and its subclasses; its checkpoints are retained.
    """
    config, folder, world, console = run.config, run.folder, run.world, run.console
    facts = check_data(config, data, folder, world, console)
    if not distributed.from_leader((folder.path / WEIGHTS).is_file()):
        check_batch(config, world)
        check_shards(config, data, world)
        training = _ClassifierTraining(run, data, facts)
        with run.outputs(task, run.tracker(config.runtime.report_to)) as outputs:
            job = training.job(outputs)
            fit_result = engine.fit(engine.prepare(training.model, config.runtime, world), job)
        training.save(fit_result, outputs)
    classifier = load_classifier(str(folder.path))
    classifier.model.to(world.device).eval()
    scores = evaluate(classifier, data.val, config, world, keep_predictions=True)
    trained = classifier.facts
    result = {
        "task": task,
        "arch": trained["arch"],
        "stem": config.backbone.stem,
        "image_size": list(classifier.model.config.image_size),
        "parameters": trained["parameters"],
        "classes": len(data.classes),
        "head_bias": head_bias_of(config, len(data.classes)),
        "images": {"train": len(data.train.labels), "minival": len(data.minival.labels), "val": scores.images},
        "skipped": scores.skipped,
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "floors": scores.floors,
        "minival_top1": trained["minival_top1"],
        "best_step": trained["best_step"],
        "curve": trained["curve"],
        "lost_records": trained.get("lost_records", 0),
        "steps": config.schedule.steps,
        "timing": folder.timing,
        "precision": folder.precision,
        "data": facts["data"],
        DIGEST: classifier.model.report.digest,
        "decoder": data.val.reading.versions(),
        "differs_from_paper": run.differs,
    }
    if options := final_probe_options(config):
        transform = classifier.transform if classifier.resize_side is None else None
        result["fewshot"] = distributed.run_on_leader(
            world, lambda: probe_network(classifier.model, options, world.device, console, transform)
        )
    shifts = ClassifierShifts(data.val, config.shift, classifier)
    if config.shift.names:

        def top1(scored: Classifier, images: LabelledImages, on_progress: OnProgress) -> float:
            return evaluate(scored, images, config, world, on_progress=on_progress).top1

        result["shifts"] = shifts.score({f"{trained['arch']} {config.backbone.stem}": classifier}, top1, world, console)
    if warning := result_warning("validation top-1", scores.top1, scores.floors, scores.images):
        console.warn(warning)
    if world.leads:
        result |= save_scores(folder.path, scores, data.classes, data.val)
        if config.shift.names:
            shifts.save(folder.path, result["shifts"], scores.predictions[0].row)
        folder.finish(result)
    return result


def load_network(config: SupervisedConfig, classes: int) -> Backbone:
    """Load the config's network with a new head of zero weights. Raises as `load_backbone` does."""
    model = backbone_of(config.backbone, num_classes=classes, seed=config.seed)
    assert isinstance(model.head, nn.Linear)
    nn.init.constant_(model.head.bias, head_bias_of(config, classes))
    return model


def evaluation_interval(config: SupervisedConfig) -> int:
    """Return the steps between evaluations on minival: the config's, or a quarter of a training shorter than that."""
    return interval(config.evaluate_every, config.schedule.steps)


def loss_of(config: SupervisedConfig, model: Backbone, classes: int) -> engine.LossFn:
    """Return the engine's loss of a batch: images are normalised, and mixed if the batch has a mix, on the device."""

    def one_hot(labels: Tensor) -> Tensor:
        target = nn.functional.one_hot(labels, classes).float()
        return torch.lerp(target, torch.full_like(target, 1 / classes), config.label_smoothing)

    def loss(trainable: nn.Module, batch: engine.Batch) -> Tensor:
        image = normalize(model, batch["image"])
        target = batch["target"] if "target" in batch else one_hot(batch["label"])
        if "mix" in batch:
            image = blend(image, normalize(model, batch["other_image"]), batch["mix"])
            target = blend(target, one_hot(batch["other_label"]), batch["mix"])
        return LOSSES[config.loss](trainable(image).float(), target)

    return loss


class _ClassifierTraining:
    """Training of one classifier, and its evaluation on minival."""

    def __init__(self, run: Run[ConfigT], data: ClassData, facts: Json) -> None:
        config, console = run.config, run.console
        self.config, self.folder, self.world, self.console = config, run.folder, run.world, console
        self.data, self.facts = data, facts
        self.skipped: list[int] = []
        self.model = load_network(config, len(data.classes))
        console.info(describe_start(self.model.report, Checkpoints(self.folder.path / "checkpoints")))
        run.record_precision(config.runtime, self.model)
        if config.head_bias is None and config.loss == "sigmoid":
            bias = head_bias_of(config, len(data.classes))
            console.info(f"the head's bias starts at {bias:g}, -log of {len(data.classes)} classes")
        if config.freeze:
            console.info(f"{freeze(self.model, config.freeze) / 1e6:.2f} M weights are frozen")
        side = resize_side_of(config, self.model.config.image_size)
        reading = data.val.reading
        self.classifier = Classifier(self.model, data.classes, config.loss, side, {}, reading.decoder, reading.exif)

        console.info(
            f"training images: {augmentation_of(config, self.model).describe()}; evaluated images: "
            f"{self.classifier.preparation}"
        )

    def job(self, outputs: engine.Outputs) -> engine.TrainJob:
        """Return the engine's job."""
        config, data, world, model = self.config, self.data, self.world, self.model
        if world.leads:
            self.folder.update(backbone=model.report.to_dict(), **{DIGEST: None})
        batches = training_batches(
            config,
            model,
            data,
            world,
            workers=count_workers(config.runtime.workers, world.device, world.local_ranks),
            skip_bad=config.data.skip_bad_images,
            on_skip=self.skipped.append,
        )
        has_minival = bool(data.minival.labels)
        return engine.TrainJob.from_config(
            config,
            loss_fn=loss_of(config, model, len(data.classes)),
            batches=batches,
            ema_decay=config.ema,
            evaluate=self.minival if has_minival else None,
            evaluate_every=evaluation_interval(config) if has_minival else 0,
            keep_best=config.select == "best",
            world=world,
            outputs=outputs,
        )

    def save(self, result: engine.FitResult, outputs: engine.Outputs) -> None:
        """Take the last or the best checkpoint, and write the classifier's file."""
        config, data, world, console, model = self.config, self.data, self.world, self.console, self.model
        checkpoints, log = outputs.checkpoints, outputs.log
        assert checkpoints
        assert log
        if self.skipped:
            console.warn(f"{sum(self.skipped)} times an unreadable training image was replaced by the next one")
        has_minival = bool(data.minival.labels)
        best = checkpoints.load("best", console.warn) if has_minival and config.select == "best" else None
        if best:
            model.load_state_dict(evaluated_weights(best[0]))
        vit_config = model.config
        self.classifier.facts = {
            "arch": vit_config.arch,
            "parameters": model.report.parameters,
            "minival_top1": best[1]["best"] if best else result.metrics.get("accuracy"),
            "best_step": best[1]["step"] if best else config.schedule.steps,
            "curve": [record for record in log.records() if "accuracy" in record],
            "lost_records": log.count_lost(),
            "config": config.model_dump(mode="json"),
            "data": self.facts["data"],
            "trained_on": record(data.train) if world.leads else None,
        }
        if world.leads:
            self.folder.record_time(result.seconds, result.wait_seconds)
            save_classifier(self.classifier, self.folder.path / WEIGHTS)
            checkpoints.clear()
        distributed.barrier()

    def minival(self) -> dict[str, float]:
        """Score minival, and probe the representation where the config asks for it."""
        scores = evaluate(self.classifier, self.data.minival, self.config, self.world)
        metrics = {"accuracy": scores.top1, "minival_loss": scores.loss}
        if self.config.fewshot:
            metrics[f"fewshot_{self.config.fewshot}"] = self.fewshot(self.config.fewshot)
        return metrics

    def fewshot(self, shots: int) -> float:
        """Return the accuracy in percent on minival of a probe on a few training images per class."""
        return distributed.run_on_leader(self.world, lambda: self._probe(shots))

    def _probe(self, shots: int) -> float:
        pool, classes = shot_pool(self.data.train), len(self.data.classes)
        rows = draw_rows(torch.as_tensor(pool.labels).numpy(), classes, shots, 0).tolist()
        config, device = self.config, self.world.device
        skip_bad = config.data.skip_bad_images
        size = config.eval_batch_size
        # The probe's own crop would hide the edges of images that the network is trained on whole.
        transform = self.classifier.transform if self.classifier.resize_side is None else None
        train = encode(
            self.model, pool, config.runtime, device, size, rows=rows, skip_bad=skip_bad, transform=transform
        )
        test = encode(
            self.model, self.data.minival, config.runtime, device, size, skip_bad=skip_bad, transform=transform
        )
        return 100 * probe(*train, *test, classes)


def evaluate(
    classifier: Classifier,
    split: LabelledImages,
    config: SupervisedConfig,
    world: World,
    *,
    keep_predictions: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Scores:
    """Score a split with the config's precision and loader; see `score`."""
    with autocast(config.runtime, world.device, classifier.model):
        return score(
            lambda images: compute_logits(classifier, images),
            split,
            classifier.transform,
            len(classifier.classes),
            world,
            loss=config.loss,
            batch_size=config.eval_batch_size,
            workers=config.runtime.workers,
            skip_bad=config.data.skip_bad_images,
            keep_predictions=keep_predictions,
            on_progress=on_progress,
        )


def default_folder(config: SupervisedConfig, task: str) -> Path:
    """Return runs/TASK/ARCH-STEM."""
    return Path("runs") / task / run_name(config.backbone)


def describe_training(result: dict[str, Any]) -> str:
    """Return the result as text."""
    images, lost_records = result["images"], result.get("lost_records", 0)
    height, width = result["image_size"]
    if result["minival_top1"] is None:
        selection = "the last step is scored; there was no minival to watch"
    else:
        last = result["best_step"] == result["steps"]
        best_step = (
            "the last step is scored" if last else f"step {result['best_step']} was best on minival and is scored"
        )
        selection = f"{best_step}; minival: top-1 {result['minival_top1']:.2f} % ({images['minival']} images)"
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    probe = result.get("fewshot")
    probe_lines = [f"{probe['data']}: {line.strip()}" for line in describe_accuracies(probe)] if probe else []
    return (
        f"{result['arch']} stem {result['stem']} at {height}x{width}, {result['classes']} classes\n"
        f"validation: top-1 {format_accuracy(result['top1'], images['val'])}, top-5 {result['top5']:.2f} %, "
        f"loss {result['loss']:.4g}{skipped}\n"
        f"{selection}; {count_noun(result['steps'], 'step')} on {images['train']} images"
        + "".join(f"\n{line}" for line in (*probe_lines, *describe_shifts(result)))
        + (f"\nthe curve is incomplete: {lost_records} records of metrics.jsonl were lost" if lost_records else "")
    )
