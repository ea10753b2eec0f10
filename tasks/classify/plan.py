"""What a training will cost: steps and hours from FLOP counts and a measured matrix-product rate, memory, disk."""

from __future__ import annotations

from typing import Any

import torch

from dpn_cli.engine.planning import describe_disk, describe_duration, describe_memory, disk, duration, memory
from dpn_cli.model.flops import training_flops
from dpn_cli.run.distributed import World
from tasks.classify.check import check_batch
from tasks.classify.common import open_data
from tasks.classify.pretrain import open_tuning
from tasks.classify.pretrain_recipe import PretrainRecipe, runs_of
from tasks.classify.recipe import in_steps
from tasks.classify.train import load_network

# Training images where the data are not at hand: train[:99%] of ImageNet-1k, TFDS' sun397 split, and their classes.
USUAL = {False: (1_268_355, 1000), True: (76_128, 397)}

Json = dict[str, Any]


def estimate(recipe: PretrainRecipe, images: int | None, *, here: bool, ranks: int) -> Json:
    """Count the FLOPs of the recipe's trainings, measure the device, and return steps, hours and bytes.

    With `here` the images are counted in the recipe's data. Raises `DpnError` and its subclasses.
    """
    usual, classes = USUAL[bool(recipe.stages)]
    if here:
        data = (open_tuning if recipe.stages else open_data)(recipe)
        usual, classes = len(data.train.labels), len(data.classes)
    images = images or usual
    check_batch(recipe, World(0, ranks, torch.device("cpu")))
    runs = runs_of(recipe)
    steps = [in_steps(run, images).schedule.steps for run in runs]
    model = load_network(recipe, classes)
    flops = training_flops(model.config, grad_checkpointing=recipe.backbone.grad_checkpointing)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ema = bool(recipe.ema)
    drawn = recipe.batch_size * sum(steps)
    return {
        "task": "plan pretrain",
        "arch": recipe.backbone.arch,
        "stem": recipe.backbone.stem,
        "norm": model.config.norm,
        "placement": model.config.placement,
        "parameters": parameters,
        "images": images,
        "runs": len(runs),
        "steps": sum(steps),
        "batch_size": recipe.batch_size,
        "flops_per_image": flops,
        **duration(recipe.runtime, flops * drawn, drawn, ranks),
        **memory(model, recipe.optim, recipe.runtime, recipe.batch_size, ranks, ema=ema),
        **disk(recipe.optim, parameters, ema=ema, best=recipe.select == "best"),
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
