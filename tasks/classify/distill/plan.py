"""Estimate of a distillation's cost: the teacher's forward passes, the student's steps, and the disk for both."""

from __future__ import annotations

from typing import Any

import torch

from dpn_cli.config.training import resolve_training_steps
from dpn_cli.engine.planning import describe_disk, describe_duration, estimate_disk, estimate_duration
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from tasks.classify.distill.cache import check_views, count_values, target_shapes
from tasks.classify.distill.config import DistillConfig, Losses, limit_batch
from tasks.classify.distill.data import check_count, open_images
from tasks.classify.distill.student import check_pair, load_teacher, new_student, start_of
from tasks.classify.plan import DEFAULT_DATA
from tasks.classify.preflight import check_divides

Json = dict[str, Any]


def estimate(config: DistillConfig, arch: str, images: int | None, *, count_data: bool, ranks: int) -> Json:
    """Count the FLOPs of teacher and student, measure the device, and return steps, hours and bytes.

    The teacher is the config's, or without one a plain ViT of `arch` with 1000 classes. With `count_data` the images
    are counted in the config's data. Evaluations are left out. Raises `DpnError` and its subclasses.
    """
    if config.teacher:
        teacher = load_teacher(config).model
    else:
        size = config.backbone.image_size or 224
        teacher = load_backbone(arch, stem="none", image_size=size, num_classes=DEFAULT_DATA[False][1])
    start = start_of(config.backbone, teacher)
    unfitted = config.backbone.model_copy(update={"start": start if start == "scratch" else "copy"})
    student, _ = new_student(config.model_copy(update={"backbone": unfitted}), teacher, lambda: iter(()))
    check_pair(config, teacher, student)
    option = f"--data {config.data.source}" if images is None else f"--images {images}"
    if images is None:
        images = len(open_images(config, None, Console()).train.labels) if count_data else DEFAULT_DATA[False][0]
    config = limit_batch(config, images)
    check_count(option, images, config.batch_size)
    check_divides(config.batch_size, config.runtime.micro_batch_size, World(0, ranks, torch.device("cpu")))
    config = resolve_training_steps(config, images / config.batch_size)
    check_views(config, images)
    steps, student_config, losses = config.schedule.steps, student.config, config.losses
    stem_steps, parameters = config.stem_steps, student.report.parameters
    views = (config.cache_teacher or 0) * images
    image_draws = steps * config.batch_size
    teacher_images = views or image_draws
    checkpointing = config.backbone.grad_checkpointing
    linear, products = attention_multiply_adds(student_config, losses)
    forward = 2 * (count_macs(teacher.config).forward + sum(attention_multiply_adds(teacher.config, losses)))
    all_weights = training_flops(student_config, grad_checkpointing=checkpointing) + 6 * (linear + products)
    stem = training_flops(student_config, grad_checkpointing=checkpointing, stem_only=True) + 4 * linear + 6 * products
    flops = teacher_images * forward + config.batch_size * (stem_steps * stem + (steps - stem_steps) * all_weights)
    return {
        "task": "plan distill",
        "teacher": {"arch": teacher.config.arch, "stem": teacher.config.stem, "parameters": teacher.report.parameters},
        "arch": student_config.arch,
        "stem": student_config.stem,
        "parameters": parameters,
        "images": images,
        "steps": steps,
        "stem_steps": stem_steps,
        "batch_size": config.batch_size,
        "teacher_images": teacher_images,
        "teacher_flops_per_image": forward,
        "flops_per_image": all_weights,
        "stem_flops_per_image": stem,
        **estimate_duration(config.runtime, student, flops, image_draws + views, ranks),
        **estimate_disk(config.optim, parameters, ema=bool(config.ema), best=False),
        "stages_bytes": 4 * parameters * (2 if stem_steps else 1),
        "cache_bytes": 2 * views * count_values(target_shapes(teacher.config, losses)),
    }


def attention_multiply_adds(config: ViTConfig, losses: Losses) -> tuple[int, int]:
    """Return the multiply-adds of the attention that losses compare, in its linear layer and its query-key products.

    Blocks do not return attention, so both are computed a second time; see `Observed`.
    """
    blocks = (len(losses.layers) or 1) if losses.attention else 0
    width, tokens = config.size.width, config.grid[0] * config.grid[1] + config.prefix_tokens
    inner = config.attn_width or width
    return blocks * tokens * 3 * width * inner, blocks * tokens**2 * inner


def describe_plan(result: Json) -> str:
    """Return the estimate as text."""
    teacher, cache = result["teacher"], result["cache_bytes"]
    stem = (
        f", {result['stem_flops_per_image'] / 1e9:.1f} while the stem alone is trained" if result["stem_steps"] else ""
    )
    return "\n".join(
        [
            f"{result['arch']} stem {result['stem']} ({result['parameters'] / 1e6:.1f} M weights) from "
            f"{teacher['arch']} stem {teacher['stem']} ({teacher['parameters'] / 1e6:.1f} M): "
            f"{result['flops_per_image'] / 1e9:.1f} GFLOP an image forward and backward{stem}, "
            f"{result['teacher_flops_per_image'] / 1e9:.1f} for the teacher",
            f"{result['steps']:,} steps of {result['batch_size']:,} on {result['images']:,} images, the teacher on "
            f"{result['teacher_images']:,}: {result['flops']:.3g} FLOP",
            describe_duration(result),
            f"{describe_disk(result)}, {result['stages_bytes'] / 1e6:.0f} MB of the stages before the last"
            + (f", {cache / 1e9:.3g} GB of what the teacher computes" if cache else ""),
        ]
    )
