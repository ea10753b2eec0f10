"""What a training will cost: steps and hours from FLOP counts and a measured matrix-product rate, and disk."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from dpn_cli.engine import fit as engine
from dpn_cli.model.flops import training_flops
from dpn_cli.recipe.schema import Optim, Runtime
from dpn_cli.run.distributed import World, join
from tasks.classify.check import check_batch
from tasks.classify.common import open_data
from tasks.classify.pretrain import open_tuning
from tasks.classify.pretrain_recipe import PretrainRecipe, runs_of
from tasks.classify.recipe import in_steps
from tasks.classify.train import load_network

# Training images where the data are not at hand: train[:99%] of ImageNet-1k, TFDS' sun397 split, and their classes.
USUAL = {False: (1_268_355, 1000), True: (76_128, 397)}
# Side of the measured matrices: large enough to show a device's rate, small enough for a second of measuring.
SIDE = {"cpu": 2048, "cuda": 8192}
MEASURED_SECONDS = 1.0
# Share of the matrix-product rate that a well-fed training reaches on a GPU; the rate itself is a bound.
SHARE = 0.5

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
        **disk(recipe.optim, parameters, ema=bool(recipe.ema), best=recipe.select == "best"),
    }


def duration(runtime: Runtime, flops: int, images: int, ranks: int) -> Json:
    """Measure the device, and return how long `ranks` of it take for so many FLOPs, in which `images` are loaded."""
    with join(runtime.device) as world:
        rate = matrix_rate(runtime, world.device)
        device = str(world.device)
    seconds = flops / rate / ranks
    return {
        "flops": flops,
        "device": device,
        "ranks": ranks,
        "matrix_flops_per_second": rate,
        "hours_at_matrix_rate": seconds / 3600,
        "hours": seconds / 3600 / SHARE,
        "images_per_second_needed": images / seconds * SHARE,
    }


def disk(optim: Optim, parameters: int, *, ema: bool, best: bool) -> Json:
    """Return the bytes of the weights, and of the checkpoints of a training that keeps its `best` state or does not."""
    state = 4 + (2 if optim.state_dtype == "bfloat16" else 4) + 4 + (4 if ema else 0)
    # The last state, the one before it, and one that is being written; the best one likewise.
    copies = 3 + (2 if best else 0)
    return {"weights_bytes": 4 * parameters, "checkpoints_bytes": copies * parameters * state}


def matrix_rate(runtime: Runtime, device: torch.device) -> float:
    """Measure FLOPs per second of a square matrix product in the precision of the training."""
    with engine.precision_of(runtime, device):
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    side = SIDE.get(device.type, 2048)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    matrix @ matrix
    products, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < MEASURED_SECONDS:
        for _ in range(3):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products += 3
    return 2 * side**3 * products / seconds


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
            describe_disk(result),
        ]
    )


def describe_duration(result: Json) -> str:
    """Return the estimate of `duration` as a line of text."""
    return (
        f"{result['device']} multiplies matrices at {_si(result['matrix_flops_per_second'])}FLOP/s (measured); "
        f"{result['ranks']} of it: {_hours(result['hours_at_matrix_rate'])} at that rate, {_hours(result['hours'])} at "
        f"{SHARE:.0%} of it, for which the loader has to make {result['images_per_second_needed']:,.0f} images/s"
    )


def describe_disk(result: Json) -> str:
    """Return the estimate of `disk` as a line of text."""
    return (
        f"disk: {result['weights_bytes'] / 1e6:.0f} MB of weights, {result['checkpoints_bytes'] / 1e6:.0f} MB of "
        "checkpoints while it trains"
    )


def _si(value: float) -> str:
    power = min(5, int(math.log10(value) // 3))
    return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}"


def _hours(hours: float) -> str:
    return (
        f"{hours * 60:.1f} minutes" if hours < 1 else f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    )
