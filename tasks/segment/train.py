"""Training one segmentation network: data checked, trained to the last step, validation scored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpn_cli.data.loader import count_workers
from dpn_cli.data.resize import Size
from dpn_cli.data.turned_images import describe_turned_sample
from dpn_cli.engine import fit as engine
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.freeze import freeze
from dpn_cli.run import distributed
from dpn_cli.run.artifact_kinds import DIGEST
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from dpn_cli.run.run_dir import RunFolder, describe_device
from dpn_cli.weights.backbone import backbone_of
from dpn_cli.weights.resolve_stem import describe_start
from tasks.segment.artifact import WEIGHTS, Segmenter, load_segmenter, save_segmenter
from tasks.segment.config import SegmentConfig, resolve_steps
from tasks.segment.evaluate import save_under_shifts, score_once, score_sizes, score_under_shifts
from tasks.segment.iou import SegmentScores
from tasks.segment.labels import LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.loss import segmentation_loss
from tasks.segment.model import LinearSegmenter, initialize_head, normalize, use_imagenet_inputs
from tasks.segment.page_samples import save_samples
from tasks.segment.pairs import Pairs, fingerprint, list_digest, open_pairs, take
from tasks.segment.palette import Class, classes_of, rule_of
from tasks.segment.preflight import SAMPLE, check_crops, check_masks
from tasks.segment.transforms import SegmentAugmentation

Json = dict[str, Any]
DEMO_NOTE = (
    "This is the demo: generated scenes of 5 classes. Nothing here is an ADE20K number. "
    "For ADE20K: dpn segment ade20k --data ADEChallengeData2016 --checkpoint WEIGHTS"
)


@dataclass(frozen=True)
class SegmentData:
    """The data of a training and its scores; `whole` counts the training images before the fraction is taken."""

    train: Pairs
    val: Pairs
    whole: int
    classes: tuple[Class, ...]
    rule: LabelRule


def open_data(config: SegmentConfig) -> SegmentData:
    """Open a config's data. Raises `DataError`, and `DpnError` when the fraction leaves too few images for a batch."""
    data = config.data
    all_pairs = open_pairs(data, "train")
    classes, rule = classes_of(data), rule_of(data)
    train = take(all_pairs, data.fraction)
    if len(train) < config.batch_size:
        warning = f"--fraction {data.fraction:g} leaves {len(train)} of {len(all_pairs)}" if data.fraction < 1 else ""
        raise DpnError(
            f"{warning or f'--data {data.source} has {len(train)}'} images to train on, fewer than a batch of "
            f"{config.batch_size}; use a larger --fraction, or --batch-size {max(1, len(train))} at most"
        )
    return SegmentData(train, open_pairs(data, "val"), len(all_pairs), classes, rule)


def train(run: Run[SegmentConfig]) -> Json:
    """Run or finish a training in the folder of the run and return its result, which is written there too.

    Raises `DpnError` and its subclasses; the last checkpoint stays.
    """
    folder, world, console = run.folder, run.world, run.console
    data = open_data(run.config)
    config = resolve_steps(run.config, len(data.train), console.info)
    facts = _check_data(config, data, folder, world, console)
    if not distributed.from_leader((folder.path / WEIGHTS).is_file()):
        segmenter = new_segmenter(config, data, world, console, Checkpoints(folder.path / "checkpoints"))
        network = segmenter.network
        run.record_precision(config.runtime, network)
        if world.leads:
            folder.update(backbone=network.vit.report.to_dict(), **{DIGEST: None})
        with run.outputs("segment", run.tracker(config.runtime.report_to)) as outputs:
            job = job_of(config, data, segmenter, world, outputs)
            fit_result = engine.fit(engine.prepare(network, config.runtime, world), job)
        segmenter.facts = {
            "config": config.model_dump(mode="json"),
            "data": facts["data"],
        }
        if world.leads:
            folder.record_time(fit_result.seconds, fit_result.wait_seconds)
            save_segmenter(segmenter, folder.path / WEIGHTS)
        distributed.barrier()
    if world.leads:
        Checkpoints(folder.path / "checkpoints").clear()  # a run that was killed here finds them again
    segmenter = load_segmenter(str(folder.path))
    segmenter.network.to(world.device)
    scores, result_scores = score_sizes(segmenter, data.val, config.evaluation, config.runtime, world)
    result = {
        "task": "segment",
        "dataset": "demo" if config.demo else config.data.dataset,
        "arch": segmenter.arch,
        "stem": config.backbone.stem,
        "crop": list(segmenter.network.vit.config.image_size),
        "classes": len(data.classes),
        **result_scores,
        "fraction": config.data.fraction,
        "train_images": len(data.train),
        "train_list": list_digest(data.train),
        "steps": config.schedule.steps,
        "passes": passes(config, data),
        "seed": config.seed,
        "timing": folder.timing,
        "precision": folder.precision,
        "data": facts["data"],
        DIGEST: segmenter.network.vit.report.digest,
        "decoder": data.val.reading.versions(),
        "differs_from_paper": run.differs,
    }
    if config.shift.names:
        name = f"{segmenter.arch} {config.backbone.stem}"
        result["shifts"] = score_under_shifts(
            {name: segmenter}, {name: config.evaluation}, data.val, config.shift, config.runtime, world, console
        )
    if world.leads:
        if config.shift.names:
            save_under_shifts(folder.path, result["shifts"], data.val)
        save_samples(folder.path, segmenter, data.val, scores, config.evaluation, config.runtime, world)
        folder.finish(result)
        floor = {"calling every pixel the most frequent class": scores.majority_miou}
        if warning := result_warning("validation mIoU", scores.miou, floor):
            console.warn(warning)
    return result


def passes(config: SegmentConfig, data: SegmentData) -> float:
    """Return how often each training image is seen."""
    return round(config.schedule.steps * config.batch_size / len(data.train), 2)


def describe_length(config: SegmentConfig, data: SegmentData) -> str:
    """Log the number of images, steps and passes, and what an epoch-scaled length would be."""
    share = f" of {data.whole} (fraction {config.data.fraction:g}, list {list_digest(data.train)})"
    text = (
        f"{len(data.train)}{share if config.data.fraction < 1 else ''} images to train on, {len(data.val)} to "
        f"validate, {len(data.classes)} classes; {count_noun(config.schedule.steps, 'step')} of {config.batch_size}: "
        f"{passes(config, data):g} passes"
    )
    if config.data.fraction < 1 and config.epochs is None and not config.demo:
        steps = 128 * (len(data.train) // config.batch_size)
        text += f" (App. G keeps its steps whatever the fraction; --epochs 128 would be {steps})"
    return text


def _check_data(config: SegmentConfig, data: SegmentData, folder: RunFolder, world: World, console: Console) -> Json:
    """Read a sample of masks, and check that a resumed run has the classes and images of its start."""
    facts: Json = {
        "classes": [class_.name for class_ in data.classes],
        "data": {"train": fingerprint(data.train), "val": fingerprint(data.val)},
    }
    saved_facts = distributed.from_leader(folder.facts)
    for key, name in (("classes", "classes"), ("data", "images or masks")):
        if key in saved_facts and saved_facts[key] != facts[key]:
            raise DataError(
                f"--data {config.data.source}: the {name} have changed since this run started; start another with -o"
            )
    console.info(describe_length(config, data))
    if world.leads:
        folder.update(
            device=describe_device(world.device),
            ranks=world.size,
            status="running",
            train_list=list_digest(data.train),
            **facts,
        )
        for name, split in (("training", data.train), ("validation", data.val)):
            labels = check_masks(split, data.rule, SAMPLE // 2)
            if message := describe_turned_sample(split, len(split), split.reading.exif):
                console.info(f"{name}: {message}")
            missing = [class_.name for label, class_ in enumerate(data.classes) if label not in labels]
            if missing and len(split) <= SAMPLE // 2:
                console.warn(f"classes without a pixel in the {name} masks: {', '.join(missing[:8])}")
    return facts


def load_network(config: SegmentConfig, classes: int) -> LinearSegmenter:
    """Load the config's network with a fresh head. Raises as `load_backbone` and `freeze` do."""
    vit = backbone_of(config.backbone, num_classes=classes, align_corners=False, seed=config.seed)
    height, width = vit.config.image_size
    if height != width:
        raise DpnError(f"--image-size {height}x{width}: crops and windows are square; give one number")
    if config.data.inputs == "imagenet":
        use_imagenet_inputs(vit)
    initialize_head(vit, config.head_init, config.seed)
    if config.freeze:
        freeze(vit, config.freeze)
    return LinearSegmenter(vit, final_norm=config.final_norm)


def augmentation_of(config: SegmentConfig, crop: Size) -> SegmentAugmentation:
    """Return how the config makes training examples for a network that takes crops of `crop`."""
    augment, data = config.augment, config.data
    return SegmentAugmentation(crop, data.caps(crop[0]), augment.ratio, augment.cat_max, augment.photometric, data.flip)


def loss_of(network: LinearSegmenter) -> engine.LossFn:
    """Return the engine's loss of a batch; images are normalised on the device."""

    def loss(trainable: nn.Module, batch: engine.Batch) -> Tensor:
        return segmentation_loss(trainable(normalize(network.vit, batch["image"], batch["extent"])), batch)

    return loss


def job_of(
    config: SegmentConfig,
    data: SegmentData,
    segmenter: Segmenter,
    world: World,
    outputs: engine.Outputs,
    workers: int | None = None,
) -> engine.TrainJob:
    """Return the engine's job: the segmenter's training by a config whose duration is in steps."""
    network = segmenter.network
    augmentation = augmentation_of(config, network.vit.config.image_size)
    workers = count_workers(config.runtime.workers, world.device, world.local_ranks) if workers is None else workers
    batches = segment_batches(
        data.train, data.rule, augmentation, config.batch_size, config.seed, world, workers=workers
    )
    interval = config.evaluate_every or 0
    interval = interval if interval < config.schedule.steps else 0  # the end is scored anyway
    return engine.TrainJob.from_config(
        config,
        loss_fn=loss_of(network),
        batches=batches,
        evaluate=(lambda: {"miou": evaluate(segmenter, data, config, world).miou}) if interval else None,
        evaluate_every=interval,
        monitor="miou",
        world=world,
        micro_batch=MicroBatch.choose(config.runtime, world.most(config.batch_size), network.vit, world.device),
        outputs=outputs,
    )


def new_segmenter(
    config: SegmentConfig, data: SegmentData, world: World, console: Console, saved: Checkpoints | None = None
) -> Segmenter:
    """Load the config's network, report it, and warn of crops that show too little."""
    network = load_network(config, len(data.classes))
    console.info(describe_start(network.vit.report, saved))
    augmentation = augmentation_of(config, network.vit.config.image_size)
    if world.leads and (warning := check_crops(data.train, augmentation)):
        console.warn(warning)
    return Segmenter(network, data.classes, config.data, config.evaluation, {})


def evaluate(segmenter: Segmenter, data: SegmentData, config: SegmentConfig, world: World) -> SegmentScores:
    """Score the validation split in one pass, with the config's evaluation, precision and loader."""
    return score_once(segmenter, data.val, config.evaluation, config.runtime, world)
