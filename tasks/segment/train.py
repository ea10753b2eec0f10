"""Training one segmentation network: data checked, trained to the last step, validation scored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpn_cli import distributed, engine
from dpn_cli.backbone import load_backbone
from dpn_cli.console import Console
from dpn_cli.data.crops import Size
from dpn_cli.data.loader import worker_count
from dpn_cli.distributed import World
from dpn_cli.errors import DataError, DpnError
from dpn_cli.files import replace_text
from dpn_cli.freeze import freeze
from dpn_cli.kinds import DIGEST
from dpn_cli.memory import MicroBatch
from dpn_cli.run import describe_start
from dpn_cli.runstate import Checkpoints, MetricsLog, RunFolder, describe_device
from dpn_cli.sanity import result_warning
from dpn_cli.trackers import build_tracker
from tasks.segment.check import SAMPLE, check_crops, check_masks
from tasks.segment.classes import Class, classes_of, rule_of
from tasks.segment.evaluation import score_once, score_sizes
from tasks.segment.labels import LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.loss import segmentation_loss
from tasks.segment.network import (
    LinearSegmenter,
    initialize_head,
    normalized,
    use_imagenet_inputs,
)
from tasks.segment.pairs import Pairs, fingerprint, list_digest, open_pairs, take
from tasks.segment.recipe import SegmentRecipe, in_steps
from tasks.segment.scoring import SegmentScores
from tasks.segment.segmenter import WEIGHTS, Segmenter, load_segmenter, save_segmenter
from tasks.segment.transforms import Augmentation

Json = dict[str, Any]
DEMO_NOTE = (
    "This is the demo: generated scenes of 5 classes and a small network. Nothing here is an ADE20K number. "
    "For ADE20K: dpn segment ade20k --data ADEChallengeData2016 --checkpoint WEIGHTS"
)


@dataclass(frozen=True)
class SegmentData:
    """What is trained and scored on; `whole` is the number of training images before the fraction was taken."""

    train: Pairs
    val: Pairs
    whole: int
    classes: tuple[Class, ...]
    rule: LabelRule


def open_data(recipe: SegmentRecipe) -> SegmentData:
    """Open a recipe's data. Raises `DataError`, and `DpnError` when the fraction leaves too few images for a batch."""
    data = recipe.data
    whole = open_pairs(data, "train")
    classes, rule = classes_of(data), rule_of(data)
    train = take(whole, data.fraction)
    if len(train) < recipe.batch_size:
        left = f"--fraction {data.fraction:g} leaves {len(train)} of {len(whole)}" if data.fraction < 1 else ""
        raise DpnError(
            f"{left or f'--data {data.source} has {len(train)}'} images to train on, fewer than a batch of "
            f"{recipe.batch_size}; use a larger --fraction, or --batch-size {max(1, len(train))} at most"
        )
    return SegmentData(train, open_pairs(data, "val"), len(whole), classes, rule)


def run(recipe: SegmentRecipe, folder: RunFolder, world: World, console: Console) -> Json:
    """Run or finish a training in `folder` and return its result, which is written there too.

    Raises `DpnError` and its kin; what was trained until then is kept.
    """
    data = open_data(recipe)
    recipe = in_steps(recipe, len(data.train), console.info)
    facts = _check_data(recipe, data, folder, world, console)
    if not distributed.from_leader((folder.path / WEIGHTS).is_file()):
        _train(recipe, data, facts, folder, world, console)
    if world.leads:
        Checkpoints(folder.path / "checkpoints").clear()  # a run that was killed here finds them again
    segmenter = load_segmenter(str(folder.path))
    segmenter.network.to(world.device)
    scores, described = score_sizes(segmenter, data.val, recipe.evaluation, recipe.runtime, world)
    result = {
        "task": "segment",
        "dataset": "demo" if recipe.demo else recipe.data.dataset,
        "arch": segmenter.arch,
        "stem": recipe.backbone.stem,
        "crop": list(segmenter.network.vit.config.image_size),
        "classes": len(data.classes),
        **described,
        "fraction": recipe.data.fraction,
        "train_images": len(data.train),
        "train_list": list_digest(data.train),
        "steps": recipe.schedule.steps,
        "passes": passes(recipe, data),
        "seed": recipe.seed,
        "timing": segmenter.facts["timing"],
        "data": facts["data"],
        DIGEST: segmenter.network.vit.report.digest,
        "decoder": data.val.reading.describe(),
    }
    if world.leads:
        replace_text(folder.path / "per_class.csv", scores.per_class(data.classes))
        folder.finish(result)
        floor = {"calling every pixel the most frequent class": scores.majority_miou}
        if warning := result_warning("validation mIoU", scores.miou, floor):
            console.warn(warning)
    return result


def passes(recipe: SegmentRecipe, data: SegmentData) -> float:
    """Return how often each training image is seen."""
    return round(recipe.schedule.steps * recipe.batch_size / len(data.train), 2)


def describe_length(recipe: SegmentRecipe, data: SegmentData) -> str:
    """Say how many images are trained on for how many steps and passes, and what an epoch-scaled length would be."""
    share = f" of {data.whole} (fraction {recipe.data.fraction:g}, list {list_digest(data.train)})"
    text = (
        f"{len(data.train)}{share if recipe.data.fraction < 1 else ''} images to train on, {len(data.val)} to "
        f"validate, {len(data.classes)} classes; {recipe.schedule.steps} steps of {recipe.batch_size}: "
        f"{passes(recipe, data):g} passes"
    )
    if recipe.data.fraction < 1 and recipe.epochs is None and not recipe.demo:
        steps = 128 * (len(data.train) // recipe.batch_size)
        text += f" (App. G keeps its steps whatever the fraction; --epochs 128 would be {steps})"
    return text


def _check_data(recipe: SegmentRecipe, data: SegmentData, folder: RunFolder, world: World, console: Console) -> Json:
    """Read a sample of masks, and see that a resumed run meets the classes and images it began with."""
    found: Json = {
        "classes": [one.name for one in data.classes],
        "data": {"train": fingerprint(data.train), "val": fingerprint(data.val)},
    }
    before = distributed.from_leader(folder.facts)
    for key, what in (("classes", "classes"), ("data", "images or masks")):
        if key in before and before[key] != found[key]:
            raise DataError(
                f"--data {recipe.data.source}: the {what} have changed since this run began; start another with -o"
            )
    console.info(describe_length(recipe, data))
    if world.leads:
        folder.update(
            device=describe_device(world.device),
            ranks=world.size,
            status="running",
            train_list=list_digest(data.train),
            **found,
        )
        for name, split in (("training", data.train), ("validation", data.val)):
            seen = check_masks(split, data.rule, SAMPLE // 2)
            missing = [one.name for label, one in enumerate(data.classes) if label not in seen]
            if missing and len(split) <= SAMPLE // 2:
                console.warn(f"classes without a pixel in the {name} masks: {', '.join(missing[:8])}")
    return found


def build_network(recipe: SegmentRecipe, classes: int) -> LinearSegmenter:
    """Load the recipe's network with a fresh head. Raises as `load_backbone` and `freeze` do."""
    section = recipe.backbone
    vit = load_backbone(
        section.arch,
        stem=section.stem,
        checkpoint=section.checkpoint,
        image_size=section.image_size or 512,
        num_classes=classes,
        pool=section.pool,
        drop_path=section.drop_path,
        grad_checkpointing=section.grad_checkpointing,
        align_corners=False,
        seed=recipe.seed,
    )
    height, width = vit.config.image_size
    if height != width:
        raise DpnError(f"--image-size {height}x{width}: crops and windows are square; give one number")
    if recipe.data.inputs == "imagenet":
        use_imagenet_inputs(vit)
    initialize_head(vit, recipe.head_init, recipe.seed)
    if recipe.freeze:
        freeze(vit, recipe.freeze)
    return LinearSegmenter(vit, final_norm=recipe.final_norm)


def augmentation_of(recipe: SegmentRecipe, crop: Size) -> Augmentation:
    """Return how the recipe makes training examples for a network that takes crops of `crop`."""
    augment, data = recipe.augment, recipe.data
    return Augmentation(crop, data.caps(crop[0]), augment.ratio, augment.cat_max, augment.photometric, data.flip)


def loss_of(network: LinearSegmenter) -> engine.LossFn:
    """Return the engine's loss of a batch; images are normalised on the device."""

    def loss(trainable: nn.Module, batch: engine.Batch) -> Tensor:
        return segmentation_loss(trainable(normalized(network.vit, batch["image"], batch["extent"])), batch)

    return loss


def fit(
    recipe: SegmentRecipe,
    data: SegmentData,
    segmenter: Segmenter,
    world: World,
    outputs: engine.Outputs,
    workers: int | None = None,
) -> engine.FitResult:
    """Train the segmenter's network in place."""
    network = segmenter.network
    how = augmentation_of(recipe, network.vit.config.image_size)
    workers = worker_count(recipe.runtime.workers, world.device, world.size) if workers is None else workers
    batches = segment_batches(data.train, data.rule, how, recipe.batch_size, recipe.seed, world, workers=workers)
    asked = recipe.evaluate_every or 0
    every = asked if asked < recipe.schedule.steps else 0  # the end is scored anyway
    return engine.fit(
        engine.prepare(network, recipe.runtime, world),
        loss_of(network),
        batches,
        (lambda: {"miou": evaluate(segmenter, data, recipe, world).miou}) if every else None,
        engine.Training(recipe.optim, recipe.schedule, recipe.lr, recipe.batch_size, recipe.seed),
        recipe.runtime,
        world,
        outputs,
        MicroBatch.choose(recipe.runtime, recipe.batch_size // world.size, network.vit, world.device),
        evaluate_every=every,
        watch="miou",
    )


def _load_checked(
    recipe: SegmentRecipe, data: SegmentData, world: World, console: Console, saved: Checkpoints | None = None
) -> LinearSegmenter:
    """Load the recipe's network, say what was loaded, and warn of crops that show next to nothing."""
    network = build_network(recipe, len(data.classes))
    console.info(describe_start(network.vit.report, saved))
    how = augmentation_of(recipe, network.vit.config.image_size)
    if world.leads and (warning := check_crops(data.train, how)):
        console.warn(warning)
    return network


def _train(
    recipe: SegmentRecipe, data: SegmentData, facts: Json, folder: RunFolder, world: World, console: Console
) -> None:
    checkpoints = Checkpoints(folder.path / "checkpoints")
    network = _load_checked(recipe, data, world, console, checkpoints)
    if world.leads:
        folder.update(backbone=network.vit.report.to_dict(), **{DIGEST: None})
    track = build_tracker(recipe.runtime.report_to if world.leads else "none", folder.path, console)
    log = MetricsLog(folder.path / "metrics.jsonl", lambda record: track("segment", record))
    segmenter = Segmenter(network, data.classes, recipe.data, recipe.evaluation, {})
    with console.progress("segment") as tick:
        done = fit(recipe, data, segmenter, world, engine.Outputs(checkpoints, log, tick, console.warn, console.info))
    segmenter.facts = {
        "timing": {"train_seconds": round(done.seconds, 2), "wait_seconds": round(done.wait_seconds, 2)},
        "recipe": recipe.model_dump(mode="json"),
        "data": facts["data"],
    }
    if world.leads:
        save_segmenter(segmenter, folder.path / WEIGHTS)
    distributed.barrier()


def evaluate(segmenter: Segmenter, data: SegmentData, recipe: SegmentRecipe, world: World) -> SegmentScores:
    """Score the validation split in one pass, with the recipe's evaluation, precision and loader."""
    return score_once(segmenter, data.val, recipe.evaluation, recipe.runtime, world)


def measure_step(recipe: SegmentRecipe, data: SegmentData, world: World, console: Console) -> float:
    """Train two steps and keep nothing; returns the seconds of a step."""
    network = _load_checked(recipe, data, world, console)
    check_masks(data.train, data.rule)
    check_masks(data.val, data.rule)
    schedule = recipe.schedule.model_copy(update={"steps": 2, "warmup": 0, "decay_from": None})
    short = recipe.model_copy(update={"schedule": schedule, "evaluate_every": None})
    segmenter = Segmenter(network, data.classes, recipe.data, recipe.evaluation, {})
    return fit(short, data, segmenter, world, engine.Outputs(warn=console.warn), workers=0).seconds / 2
