"""Estimate of a training's cost without data: time from a measured matrix-product rate, disk, memory."""

from __future__ import annotations

import math
import time
from functools import cache
from typing import Any

import torch

from dpn_cli.config.schema import Optim, Runtime
from dpn_cli.engine.footprint import step_bytes
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.distributed import World, join
from dpn_cli.run.precision import Precision, precision_of
from dpn_cli.weights.backbone import Backbone

# Side of the measured matrices: large enough to show a device's rate, small enough for a second of measuring.
SIDE = {"cpu": 2048, "cuda": 8192}
MEASURED_SECONDS = 1.0
# Fraction of the matrix-product rate that a well-fed training reaches on a GPU; the rate itself is a bound.
TRAINING_FRACTION = 0.5

Json = dict[str, Any]


def measure_device(runtime: Runtime, model: Backbone) -> tuple[torch.device, float]:
    """Return the device, and its measured matrix-product rate in FLOPs per second in the precision of the network."""
    with join(runtime.device) as world:
        return world.device, matrix_rate(world.device, precision_of(runtime, world.device, model))


def estimate_memory(model: Backbone, optim: Optim, runtime: Runtime, batch: int, ranks: int, *, ema: bool) -> Json:
    """Return the micro-batch of one of `ranks` devices, and the bytes of a step on it.

    `batch` is that of all ranks. As in a training, the micro-batch halves until it fits into a GPU. Raises `DpnError`
    as `MicroBatch.choose` does.
    """
    with join(runtime.device) as world:
        device = world.device
    rank_batch = World(0, ranks, device).most(batch)
    micro_batch = MicroBatch.choose(runtime, rank_batch, model, device)
    shards = ranks if runtime.shard else 1
    bf16 = precision_of(runtime, device, model) == "bf16"

    def required() -> int:
        return step_bytes(model, optim, rank_batch, micro_batch.size, bf16=bf16, shards=shards, ema=ema)

    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        while required() > available and micro_batch.size > 1 and not micro_batch.fixed:
            micro_batch.halve()
    return {"micro_batch_size": micro_batch.size, "memory_bytes": required()}


def estimate_duration(runtime: Runtime, model: Backbone, flops: int, images: int, ranks: int) -> Json:
    """Measure the device, and return the hours of `flops` on `ranks` devices, which load `images` meanwhile."""
    device, rate = measure_device(runtime, model)
    seconds = flops / rate / ranks
    return {
        "flops": flops,
        "device": str(device),
        "ranks": ranks,
        "matrix_flops_per_second": rate,
        "hours_at_matrix_rate": seconds / 3600,
        "hours": seconds / 3600 / TRAINING_FRACTION,
        "images_per_second_needed": images / seconds * TRAINING_FRACTION,
    }


def estimate_disk(optim: Optim, parameters: int, *, ema: bool, best: bool) -> Json:
    """Return the bytes of the weights, and of a training's checkpoints, with or without its `best` state."""
    state = 4 + (2 if optim.state_dtype == "bfloat16" else 4) + 4 + (4 if ema else 0)
    # The last state, the previous one and the one being written; two of the best state.
    copies = 3 + (2 if best else 0)
    return {"weights_bytes": 4 * parameters, "checkpoints_bytes": copies * parameters * state}


@cache
def matrix_rate(device: torch.device, precision: Precision) -> float:
    """Measure FLOPs per second of a square matrix product in a precision."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    side = SIDE.get(device.type, 2048)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    matrix @ matrix
    products, start_time = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start_time) < MEASURED_SECONDS:
        for _ in range(3):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products += 3
    return 2 * side**3 * products / seconds


def describe_duration(result: Json) -> str:
    """Return the estimate of `estimate_duration` as a line of text."""
    loader = f"{result['images_per_second_needed']:,.0f} images/s"
    return (
        f"{result['device']} multiplies matrices at {_si(result['matrix_flops_per_second'])}FLOP/s (measured); "
        f"{result['ranks']} of it: {_hours(result['hours_at_matrix_rate'])} at that rate, {_hours(result['hours'])} at "
        f"{TRAINING_FRACTION:.0%} of it, for which the loader has to make {loader}"
    )


def describe_memory(result: Json) -> str:
    """Return the estimate of `estimate_memory` as a line of text."""
    return (
        f"memory of a device: {result['memory_bytes'] / 1e9:.2f} GB of weights, gradients, optimizer and activations, "
        f"{result['micro_batch_size']:,} images at once"
    )


def describe_disk(result: Json) -> str:
    """Return the estimate of `estimate_disk` as a line of text."""
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
