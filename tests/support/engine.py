"""A small network, random batches and training jobs for the engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, TrainJob
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone

SINGLE_PROCESS = World(0, 1, torch.device("cpu"))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sigmoid cross-entropy of a batch."""
    return sigmoid_xent(model(batch["image"]), batch["label"])


def random_batches(rows: int = 8, classes: int = 3) -> engine.Batches:
    """Return batches of random images and soft labels that are a function of the step."""

    def batches(start: int) -> Generator[Batch, None, None]:
        step = start
        while True:
            generator = torch.Generator().manual_seed(step)
            yield {
                "image": torch.randn(rows, 3, 16, 16, generator=generator),
                "label": torch.rand(rows, classes, generator=generator),
            }
            step += 1

    return batches


def small_vit(seed: int = 0, **arguments: Any) -> Backbone:
    """Build a network of three classes for images of 16 x 16."""
    return load_backbone("mu/8", image_size=16, num_classes=3, seed=seed, **arguments)


def make_job(steps: int = 6, **fields: Any) -> TrainJob:
    """Return a job of a few steps on random images; `fields` replace its own."""
    own: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batches": random_batches(),
        "optim": Optim(),
        "schedule": Schedule(steps=steps, warmup=min(1, steps - 1)),
        "lr": 0.1,
        "batch_size": 8,
        "seed": 3,
        "world": SINGLE_PROCESS,
        "micro_batch": MicroBatch(8),
    }
    return TrainJob(**{**own, **fields})


def train_steps(
    model: nn.Module,
    steps: int = 6,
    *,
    checkpoint_every: int = 500,
    precision: Literal["fp32", "bf16"] = "fp32",
    **fields: Any,
) -> engine.FitResult:
    """Train for a few steps on random images."""
    runtime = Runtime(checkpoint_every=checkpoint_every, precision=precision)
    return engine.fit(model, make_job(steps, runtime=runtime, **fields))


def has_same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two networks have equal weights."""
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def fail_training(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the training of that number, counted from 1, end with an error."""
    count, fit = 0, engine.fit

    def failing(trainable: Any, job: engine.TrainJob) -> engine.FitResult:
        nonlocal count
        count += 1
        if count == number:
            raise error
        return fit(trainable, job)

    monkeypatch.setattr(engine, "fit", failing)


def rank_batches(world: World) -> engine.Batches:
    """Return this rank's rows of every random batch."""
    rows = world.rows(8)

    def batches(start: int):  # type: ignore[no-untyped-def]
        for batch in random_batches()(start):
            yield {name: value[rows.start : rows.stop] for name, value in batch.items()}

    return batches
