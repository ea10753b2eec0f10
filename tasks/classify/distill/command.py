"""`dpn distill`, from a finalized config to a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.training import resolve_training_steps
from dpn_cli.data.loader import count_workers
from dpn_cli.data.prefetch import check_cache
from dpn_cli.data.shard_sampler import make_shard_order
from dpn_cli.errors import DataError, DpnError
from dpn_cli.report.shift_scores import describe_shifts
from dpn_cli.run import console as terminal
from dpn_cli.run.artifact_kinds import WEIGHTS, Kind
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.run import Run, open_run, run_name
from dpn_cli.run.run_dir import describe_device
from dpn_cli.weights.load_report import LoadReport
from tasks.classify.classifier import Classifier
from tasks.classify.distill.cache import check_views
from tasks.classify.distill.config import DistillConfig, limit_batch
from tasks.classify.distill.data import DistillSplits, check_count, open_images
from tasks.classify.distill.dry_run import dry_run_stages
from tasks.classify.distill.student import describe_resize, load_teacher, with_teacher_defaults
from tasks.classify.distill.train import Distillation
from tasks.classify.fewshot import check_probe_data, describe_accuracies, final_probe_options
from tasks.classify.preflight import check_divides

Json = dict[str, Any]
DEMO_NOTE = "This is the demo: generated scenes. For a network of your own: dpn distill --teacher WEIGHTS --data FOLDER"


def run(config: DistillConfig, launch: LaunchOptions, console: Console) -> Json | None:
    """Distil and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    teacher = load_teacher(config)
    config = with_teacher_defaults(config, teacher)
    kind: Kind = "classifier" if teacher.classes else "network"
    with open_run(config, config.runtime, kind, launch, default_folder(config), console) as run:
        result = None if launch.dry_run else run.folder.result
        if result is None:
            images = open_images(run.config, teacher.classes or None, console)
            count = len(images.train.labels)
            limited = limit_batch(run.config, count, console.info)
            counted = resolve_training_steps(limited, count / limited.batch_size, console.info)
            _check(replace(run, config=counted), teacher, images, dry_run=launch.dry_run)
            distillation = Distillation(replace(run, config=counted), teacher, images)
            if launch.dry_run:
                _dry_run(distillation, launch)
                return None
            result = distillation.train()
        console.info(f"weights: {run.folder.path / WEIGHTS}, for --checkpoint of any command")
        return result if run.world.leads else None


def load(config: DistillConfig) -> LoadReport:
    """Load the network that the training depends on, the teacher, and report on it."""
    return load_teacher(config).model.report


def default_folder(config: DistillConfig) -> Path:
    """Return runs/distill/TEACHER/ARCH-STEM of the student, without an arch STEM alone."""
    teacher_path = Path((config.teacher or "").rstrip("/"))
    name = (
        teacher_path.parent.name
        if teacher_path.name == WEIGHTS
        else teacher_path.name.removesuffix(".safetensors").removesuffix(".npz")
    )
    return Path("runs") / "distill" / name.replace(":", "-") / run_name(config.backbone)


def show(result: Json) -> None:
    """Print a result on stdout."""
    terminal.show(describe(result))


def describe(result: Json) -> str:
    """Return the result as text."""
    teacher, images = result["teacher"], result["images"]
    lines = [
        f"{result['arch']} stem {result['stem']} from {teacher['source']} ({teacher['arch']}, stem {teacher['stem']}), "
        f"start {result['start']}, {count_noun(result['steps'], 'step')} on {images['train']} images",
    ]
    names = {"start": "before the first step", "stem": "after the stem's stage", "all": "after the last step"}
    for stage, stage_result in result["stages"].items():
        parts = (
            [f"agreement {stage_result['agreement']:.2f} %", f"KL {stage_result['kl']:.4g} nats"]
            if result["classes"]
            else []
        )
        parts += (
            [] if stage_result["token_variance"] is None else [f"token variance {stage_result['token_variance']:.4f}"]
        )
        parts += [] if stage_result["top1"] is None else [f"top-1 {stage_result['top1']:.2f} %"]
        lines.append(f"{names[stage]}: {', '.join(parts)}")
    lines.append(f"compared with the teacher on {images['held_out']} held-out images")
    if result["top1"] is not None:
        lines.append(
            f"validation: top-1 {result['top1']:.2f} %, the teacher's {result['teacher_top1']:.2f} % ({images['val']} "
            "images)"
        )
    for name, probe in (result["fewshot"] or {}).items():
        lines += [f"{name}, {probe['data']}: {line.strip()}" for line in describe_accuracies(probe)]
    lines += describe_shifts(result)
    return "\n".join(lines)


def _check(run: Run[DistillConfig], teacher: Classifier, images: DistillSplits, *, dry_run: bool) -> None:
    """Check batch and images, and that a resumed run has its first images and teacher. Raises `DpnError`."""
    config, folder, world = run.config, run.folder, run.world
    check_count(f"--data {config.data.source}", len(images.train.labels), config.batch_size)
    check_divides(config.batch_size, config.runtime.micro_batch_size, world)
    if config.shift.names and images.val is None:
        raise DataError(
            "--shifts: scores teacher and student on labelled images, and there are none; name them with --val-data"
        )
    check_stages(config)
    if message := describe_resize(teacher):
        run.console.warn(message)
    if options := final_probe_options(config):
        check_probe_data(options)
    check_views(config, len(images.train.labels))
    order = make_shard_order(images.train, config.data, config.batch_size, config.seed, config.schedule.steps)
    workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
    check_cache(images.train, order, config.schedule.steps * config.batch_size, workers, world)
    parts = {name: len(part.labels) for name, part in images.parts().items()}
    run.console.info(
        f"{parts['train']} images to train on, {parts['held_out']} held out"
        + (f", {parts['val']} labelled ones to score" if "val" in parts else "")
        + f"; {count_noun(config.schedule.steps, 'step')} of {config.batch_size}, "
        f"{config.schedule.steps * config.batch_size / parts['train']:.2f} epochs"
    )
    if dry_run:
        _check_images(images, run)
        return
    current = {"data": images.fingerprints(), "teacher": teacher.model.report.digest}
    saved_facts = from_leader(folder.facts)
    if saved_facts.get("data", current["data"]) != current["data"]:
        raise DataError(
            f"--data {config.data.source}: the images have changed since this run started; start another with -o"
        )
    if saved_facts.get("teacher", current["teacher"]) != current["teacher"]:
        raise DataError(
            f"--teacher {config.teacher}: the weights have changed since this run started; start another with -o"
        )
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **current)
        _check_images(images, run)


def _check_images(images: DistillSplits, run: Run[DistillConfig]) -> None:
    if message := images.check(run.config.data.skip_bad_images):
        run.console.info(message)


def check_stages(config: DistillConfig) -> None:
    """Raise `DpnError` where a share of the steps leaves one of the two stages without any."""
    steps, share = config.schedule.steps, config.stem_share
    if share and not 0 < config.stem_steps < steps:
        raise DpnError(
            f"--stem-share {share:g}: {config.stem_steps} of {steps} steps would train the stem alone; give each "
            "stage one step at least, or leave it at 0"
        )


def _dry_run(distillation: Distillation, launch: LaunchOptions) -> None:
    """Measure the stages in a dry run, and print their cost."""
    if cache := distillation.cache:
        cache.check_space()
    costs = dry_run_stages(distillation)
    if distillation.world.leads:
        for cost in costs:
            launch.on_cost(cost)
