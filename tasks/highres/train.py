"""Fine-tuning one classifier: data checked, trained, the best checkpoint chosen on minival, validation scored once."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn

from dpn_cli import distributed, engine
from dpn_cli.arch import size_name
from dpn_cli.backbone import Backbone, load_backbone
from dpn_cli.classifier import WEIGHTS, Classifier, load_classifier, predict, resize_for, save_classifier
from dpn_cli.console import Console
from dpn_cli.data.classified import ClassData, Source, describe_imagenet, open_class_data
from dpn_cli.data.labelled import fingerprint
from dpn_cli.data.loader import Augmentation, blend, crop_batches, worker_count
from dpn_cli.distributed import World
from dpn_cli.errors import DataError
from dpn_cli.freeze import freeze
from dpn_cli.losses import LOSSES
from dpn_cli.memory import MicroBatch
from dpn_cli.runstate import Checkpoints, MetricsLog, RunFolder, describe_device
from dpn_cli.scoring import Scores, score
from dpn_cli.trackers import build_tracker
from dpn_cli.trainstate import evaluated_weights
from tasks.highres.recipe import HighresRecipe, in_steps

Json = dict[str, Any]
# Training images that are decoded before training, to see whether the files are images at all.
SAMPLE = 100
DEMO_NOTE = (
    "This is the demo: generated scenes and a small network from scratch. Nothing here is an ImageNet number. "
    "For your own pictures: dpn finetune highres --data FOLDER --checkpoint WEIGHTS"
)


def run(recipe: HighresRecipe, folder: RunFolder, world: World, console: Console) -> Json:
    """Run or finish a fine-tuning in `folder` and return its result, which is written there too.

    Raises `DpnError` and its kin; what was trained until then is kept.
    """
    data = open_class_data(source_of(recipe), recipe.data.minival)
    recipe = in_steps(recipe, len(data.train.labels))
    facts = _check_data(recipe, data, folder, world, console)
    weights = folder.path / WEIGHTS
    if not distributed.from_leader(weights.is_file()):
        _train(recipe, data, facts, folder, world, console)
    classifier = load_classifier(str(folder.path))
    classifier.model.to(world.device).eval()
    scores = evaluate(classifier, data.val, recipe, world)
    trained = classifier.facts
    result = {
        "task": "highres",
        "arch": trained["arch"],
        "stem": recipe.backbone.stem,
        "image_size": list(classifier.model.config.image_size),
        "classes": len(data.classes),
        "images": {"train": len(data.train.labels), "minival": len(data.minival.labels), "val": scores.images},
        "skipped": scores.skipped,
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "minival_top1": trained["minival_top1"],
        "best_step": trained["best_step"],
        "steps": recipe.schedule.steps,
        "timing": trained["timing"],
        "data": facts["data"],
    }
    if world.leads:
        folder.finish(result)
    return result


def source_of(recipe: HighresRecipe) -> Source:
    """Return where the recipe's images are."""
    data = recipe.data
    return Source(data.source or "demo", data.val_source, data.val_fraction, data.image_column, data.label_column)


def _check_data(recipe: HighresRecipe, data: ClassData, folder: RunFolder, world: World, console: Console) -> Json:
    """Decode a sample, and see that a resumed run meets the classes and images it began with."""
    found: Json = {
        "classes": list(data.classes),
        "data": {name: fingerprint(getattr(data, name)) for name in ("train", "minival", "val")},
    }
    path = folder.path / "run.json"
    before = distributed.from_leader(json.loads(path.read_text("utf-8")) if path.is_file() else {})
    if "classes" in before and before["classes"] != found["classes"]:
        raise DataError(
            f"--data {recipe.data.source}: {len(found['classes'])} classes now, {len(before['classes'])} others when "
            f"this run began ({_change(before['classes'], found['classes'])}); start another with -o"
        )
    if "data" in before and before["data"] != found["data"]:
        raise DataError(
            f"--data {recipe.data.source}: the images have changed since this run began; start another with -o"
        )
    if note := describe_imagenet(data):
        console.info(note)
    console.info(
        f"{len(data.train.labels)} images to train on, {len(data.minival.labels)} to choose the best checkpoint, "
        f"{len(data.val.labels)} to validate, {len(data.classes)} classes; {recipe.schedule.steps} steps of "
        f"{recipe.batch_size}, {recipe.schedule.steps * recipe.batch_size / len(data.train.labels):.2f} epochs"
    )
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **found)
        for split in (data.train, data.minival, data.val):
            for index in range(0, len(split.labels), max(1, len(split.labels) // SAMPLE)):
                try:
                    split.pixels(index)
                except DataError:
                    if not recipe.data.skip_bad_images:
                        raise
    return found


def _change(before: list[str], now: list[str]) -> str:
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    return f"gone: {', '.join(gone[:3]) or 'none'}; new: {', '.join(new[:3]) or 'none'}"


def load_network(recipe: HighresRecipe, classes: int) -> Backbone:
    """Load the recipe's network with a zero head. Raises as `load_backbone` does."""
    section = recipe.backbone
    return load_backbone(
        section.arch,
        stem=section.stem,
        checkpoint=section.checkpoint,
        image_size=section.image_size or 384,
        num_classes=classes,
        pool=section.pool,
        pre_logits=section.pre_logits,
        drop_path=section.drop_path,
        grad_checkpointing=section.grad_checkpointing,
        seed=recipe.seed,
    )


def loss_of(recipe: HighresRecipe, model: Backbone, classes: int) -> engine.LossFn:
    """Return the engine's loss of a batch: images are normalised, and mixed where the batch says, on the device."""

    def one_hot(labels: Tensor) -> Tensor:
        return nn.functional.one_hot(labels, classes).float()

    def loss(trainable: nn.Module, batch: engine.Batch) -> Tensor:
        image, target = model.normalize(batch["image"]), one_hot(batch["label"])
        if "mix" in batch:
            image = blend(image, model.normalize(batch["other_image"]), batch["mix"])
            target = blend(target, one_hot(batch["other_label"]), batch["mix"])
        return LOSSES[recipe.loss](trainable(image).float(), target)

    return loss


def _train(
    recipe: HighresRecipe, data: ClassData, facts: Json, folder: RunFolder, world: World, console: Console
) -> None:
    """Train, take the best checkpoint on minival, and write the classifier's file."""
    classes = len(data.classes)
    model = load_network(recipe, classes)
    console.info(model.report.summary())
    if recipe.freeze:
        console.info(f"{freeze(model, recipe.freeze) / 1e6:.2f} M weights are frozen")
    size, config = model.config.image_size, model.config
    classifier = Classifier(model, data.classes, recipe.loss, recipe.data.eval_resize or resize_for(size), {})
    if world.leads:
        folder.update(backbone=model.report.to_dict())
    trainable = engine.prepare(model, recipe.runtime, world)
    workers = worker_count(recipe.runtime.workers, world.device, world.size)
    skipped: list[int] = []
    batches = crop_batches(
        data.train,
        Augmentation(size, recipe.data.decode, recipe.mixup),
        recipe.batch_size,
        recipe.seed,
        world,
        workers=workers,
        skip_bad=recipe.data.skip_bad_images,
        on_skip=skipped.append,
    )
    steps, chooses = recipe.schedule.steps, bool(data.minival.labels)
    every = min(recipe.evaluate_every, max(1, steps // 4)) if chooses else 0
    checkpoints = Checkpoints(folder.path / "checkpoints")
    track = build_tracker(recipe.runtime.report_to if world.leads else "none", folder.path, console)
    log = MetricsLog(folder.path / "metrics.jsonl", lambda record: track("highres", record))

    def minival() -> dict[str, float]:
        scores = evaluate(classifier, data.minival, recipe, world)
        return {"accuracy": scores.top1, "minival_loss": scores.loss}

    with console.progress("highres") as tick:
        done = engine.fit(
            trainable,
            loss_of(recipe, model, classes),
            batches,
            minival if chooses else None,
            engine.Training(recipe.optim, recipe.schedule, recipe.lr, recipe.batch_size, recipe.seed, recipe.ema),
            recipe.runtime,
            world,
            engine.Outputs(checkpoints, log, tick, console.warn),
            MicroBatch.choose(recipe.runtime, recipe.batch_size // world.size, model, world.device),
            evaluate_every=every,
        )
    if skipped:
        console.warn(f"{sum(skipped)} times an unreadable training image was replaced by the next one")
    best = checkpoints.load("best", console.warn) if chooses else None
    if best:
        model.load_state_dict(evaluated_weights(best[0]))
    classifier.facts = {
        "arch": f"{size_name(config.size) or config.size}/{config.patch[0]}",
        "minival_top1": best[1]["best"] if best else None,
        "best_step": best[1]["step"] if best else steps,
        "timing": {"train_seconds": round(done.seconds, 2), "wait_seconds": round(done.wait_seconds, 2)},
        "recipe": recipe.model_dump(mode="json"),
        "data": facts["data"],
    }
    if world.leads:
        save_classifier(classifier, folder.path / WEIGHTS)
        checkpoints.clear()
    distributed.barrier()


def evaluate(classifier: Classifier, split: Any, recipe: HighresRecipe, world: World) -> Scores:
    """Score a split with the recipe's precision and loader."""
    with engine.precision_of(recipe.runtime, world.device):
        return score(
            lambda images: predict(classifier, images),
            split,
            classifier.transform,
            len(classifier.classes),
            world,
            loss=recipe.loss,
            batch_size=recipe.eval_batch_size,
            workers=recipe.runtime.workers,
            skip_bad=recipe.data.skip_bad_images,
        )


def measure_step(recipe: HighresRecipe, data: ClassData, world: World, console: Console) -> float:
    """Train two steps and score a batch, keeping nothing; returns the seconds of the second step."""
    model = load_network(recipe, len(data.classes))
    console.info(model.report.summary())
    if recipe.freeze:
        freeze(model, recipe.freeze)
    schedule = recipe.schedule.model_copy(update={"steps": 2, "warmup": 0, "decay_from": None})
    training = engine.Training(recipe.optim, schedule, recipe.lr, recipe.batch_size, recipe.seed, recipe.ema)
    augmentation = Augmentation(model.config.image_size, recipe.data.decode, recipe.mixup)
    batches = crop_batches(data.train, augmentation, recipe.batch_size, recipe.seed, world, workers=0)
    micro = MicroBatch.choose(recipe.runtime, recipe.batch_size // world.size, model, world.device)
    trainable, loss = engine.prepare(model, recipe.runtime, world), loss_of(recipe, model, len(data.classes))
    done = engine.fit(
        trainable, loss, batches, None, training, recipe.runtime, world, engine.Outputs(warn=console.warn), micro
    )
    return done.seconds / 2
