"""Cost of trainings: floating-point operations from configs, hours from a GPU's rate or from a measurement here.

Evaluations, decoding and the loader are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dpn_cli.arch import SIZES, Size
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count, training_flops
from dpn_cli.report.reading import hours, read_run
from dpn_cli.reproduce.cells import PaperTrial, Places, chain
from dpn_cli.reproduce.run import layers
from dpn_cli.weights.backbone import config_from_scratch
from tasks.classify.config import in_steps
from tasks.classify.pretrain_config import runs_of
from tasks.vtab.tasks import choose_tasks

# An H100 SXM's dense bfloat16 rate, and the share of it that a well-fed training of a ViT reaches.
H100, SHARE = 989.4e12, 0.3
# Images that are trained on: train[:99%] of ImageNet-1k, TFDS' sun397 split, and the demo's scenes.
IMAGES = {"imagenet": 1_268_355, "sun397": 76_128, "scenes": 216}
DEMO_IMAGES = 9_900
ADE20K_CLASSES = 150


def flops(jobs: Iterable[PaperTrial], places: Places) -> int:
    """Return the operations of trainings, forward and backward."""
    jobs = list(jobs)
    one = {job.group: job for job in jobs}  # the seeds of a group cost the same
    prices = {group: _flops(job, places) for group, job in one.items()}
    return sum(prices[job.group] for job in jobs)


def gpu_hours(operations: int) -> float:
    """Return the hours of one H100 at `SHARE` of its rate."""
    return operations / (H100 * SHARE) / 3600


def measured(jobs: Sequence[PaperTrial], places: Places) -> float | None:
    """Return the operations per second of the trainings that are done here; None without one."""
    operations, seconds = 0, 0.0
    for job in jobs:
        if places.done(job) and (taken := hours(read_run(places.out / job.name))):
            operations, seconds = operations + _flops(job, places), seconds + 3600 * taken
    return operations / seconds if seconds else None


def _flops(job: PaperTrial, places: Places) -> int:
    usual = Places(places.out, {}, {}, places.settings)  # the price does not depend on where the data are
    config, start = layers(job.line(usual)), layers(chain(job)[0].line(usual))
    first, pixels = start.backbone, config.backbone.image_size or start.backbone.image_size
    vit_config = config_from_scratch(
        first.arch, first.stem, first.norm, first.placement, first.norm_options, pixels, first.pool
    )
    if job.command == "lit train":
        return _lit(config, vit_config)
    shown = int(config.schedule.steps * config.batch_size)
    if job.command == "finetune vtab":
        trainings = len(choose_tasks(config.data.tasks, config.demo)) * len(config.lrs) * len(config.seeds)
        return trainings * shown * training_flops(vit_config)
    if job.command == "segment ade20k":
        patches = vit_config.grid[0] * vit_config.grid[1]
        return shown * (training_flops(vit_config) + 3 * 2 * patches * vit_config.size.width * ADE20K_CLASSES)
    images = IMAGES.get(next((name for _, name in job.data), ""), DEMO_IMAGES)
    runs = runs_of(config) if job.command == "pretrain" else [config]
    steps = sum(in_steps(run, images).schedule.steps for run in runs)
    return int(steps * config.batch_size) * training_flops(vit_config)


def _lit(config: Any, vit_config: ViTConfig) -> int:
    """Count the text tower forward and backward for every pair, and the image tower forward for as many images.

    Where data have fewer images than the training has pairs, an image is encoded once, and the price is lower.
    """
    size = vit_config.size if config.text.size is None else SIZES[config.text.size]
    pairs = int(config.schedule.steps * config.batch_size)
    return pairs * (3 * 2 * _text_macs(size, config.text.context) + 2 * count(vit_config).forward)


def _text_macs(size: Size, tokens: int) -> int:
    linear = tokens * (4 * size.width**2 + 2 * size.width * size.mlp)
    return size.depth * (linear + 2 * tokens**2 * size.width)
