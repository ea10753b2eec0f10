"""Estimate of a training's cost: steps, hours from FLOP counts and a measured matrix-product rate, memory, disk."""

from __future__ import annotations

from typing import Any

import torch

from dpn_cli.engine.planning import (
    describe_disk,
    describe_duration,
    describe_memory,
    estimate_disk,
    estimate_duration,
    estimate_memory,
)
from dpn_cli.model.flops import training_flops
from dpn_cli.run.distributed import World
from tasks.classify.config import resolve_steps
from tasks.classify.data import open_data, open_tuning_splits
from tasks.classify.preflight import check_batch
from tasks.classify.pretrain_config import PretrainConfig, list_trials
from tasks.classify.train import load_network

# Training images and classes without data, by whether there are stages: train[:99%] of ImageNet-1k, TFDS' sun397.
DEFAULT_DATA = {False: (1_268_355, 1000), True: (76_128, 397)}

Json = dict[str, Any]


def estimate(config: PretrainConfig, images: int | None, *, count_data: bool, ranks: int) -> Json:
    """Count the FLOPs of the config's trainings, measure the device, and return steps, hours and bytes.

    With `count_data` the images are counted in the config's data. Raises `DpnError` and its subclasses.
    """
    default_images, classes = DEFAULT_DATA[bool(config.stages)]
    if count_data:
        data = (open_tuning_splits if config.stages else open_data)(config)
        default_images, classes = len(data.train.labels), len(data.classes)
    images = images or default_images
    check_batch(config, World(0, ranks, torch.device("cpu")))
    runs = list_trials(config)
    steps = [resolve_steps(run, images).schedule.steps for run in runs]
    model = load_network(config, classes)
    flops = training_flops(model.config, grad_checkpointing=config.backbone.grad_checkpointing)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ema = bool(config.ema)
    image_draws = config.batch_size * sum(steps)
    return {
        "task": "plan pretrain",
        "arch": config.backbone.arch,
        "stem": config.backbone.stem,
        "norm": model.config.norm,
        "placement": model.config.placement,
        "parameters": parameters,
        "images": images,
        "runs": len(runs),
        "steps": sum(steps),
        "batch_size": config.batch_size,
        "flops_per_image": flops,
        **estimate_duration(config.runtime, model, flops * image_draws, image_draws, ranks),
        **estimate_memory(model, config.optim, config.runtime, config.batch_size, ranks, ema=ema),
        **estimate_disk(config.optim, parameters, ema=ema, best=config.select == "best"),
    }


def describe_plan(result: Json) -> str:
    """Return the estimate as text."""
    steps, runs = result["steps"], result["runs"]
    return "\n".join(
        [
            f"{result['arch']} stem {result['stem']}, norm {result['norm']} {result['placement']}: "
            f"{result['parameters'] / 1e6:.1f} M weights, "
            f"{result['flops_per_image'] / 1e9:.1f} GFLOP an image forward and backward",
            f"{steps:,} steps of {result['batch_size']:,}{f' in {runs} runs' if runs > 1 else ''} on "
            f"{result['images']:,} images: {result['flops']:.3g} FLOP",
            describe_duration(result),
            describe_memory(result),
            describe_disk(result),
        ]
    )
