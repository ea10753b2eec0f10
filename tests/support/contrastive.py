"""Contrastive trainings of a small text tower on random image features."""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.nn.functional as F

from dpn_cli.arch import Size
from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs, TrainJob
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run import distributed
from dpn_cli.run.distributed import World
from tasks.lit.loss import ContrastiveLoss, Kind
from tasks.lit.text_tower import TextTower

ROWS, WIDTH, CONTEXT = 12, 8, 5


KINDS: tuple[Kind, ...] = ("softmax", "siglip")


def make_text_tower(bias: float | None = None) -> TextTower:
    """Build a small text tower; with a bias it is for the sigmoid loss."""
    return TextTower(Size(16, 2, 64, 2), 30, CONTEXT, WIDTH, 10.0, bias, seed=0)


def make_pairs(step: int = 0) -> Batch:
    """Return the random image features and tokens of a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "image": F.normalize(torch.randn(ROWS, WIDTH, generator=generator), dim=-1),
        "tokens": torch.randint(30, (ROWS, CONTEXT), generator=generator),
    }


def mean_over_ranks(loss: float, world: World) -> float:
    """Return the mean of a number over the ranks."""
    return distributed.reduce_over_ranks(torch.tensor(loss)).item() / world.size


def train_contrastive(world: World, kind: Kind, micro: int, *, shard: bool = False) -> dict[str, float]:
    """Train three steps on this rank's share of every batch; returns loss and weights as sums."""
    model = engine.prepare(make_text_tower(-1.0 if kind == "siglip" else None), Runtime(shard=shard), world)
    mine = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)

    def batches(start: int) -> Generator[Batch, None, None]:
        for step in range(start, 3):
            yield {name: value[mine] for name, value in make_pairs(step).items()}

    observed: list[float] = []
    job = TrainJob(
        loss_fn=ContrastiveLoss(kind, world),
        batches=batches,
        optim=Optim(momentum=0.0),
        schedule=Schedule(steps=3),
        lr=0.5,
        batch_size=ROWS,
        seed=0,
        world=world,
        micro_batch=MicroBatch(micro),
        outputs=Outputs(tick=lambda tick: observed.append(mean_over_ranks(tick.loss, world))),
    )
    engine.fit(model, job)
    weights = {name: value.double().norm().item() for name, value in engine.unwrap(model).state_dict().items()}
    return {**weights, **{f"loss {step}": loss for step, loss in enumerate(observed)}}
