"""Running statistics of norms in a training: resumed, averaged, over ranks, and told how far the training is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.arch import Norm
from dpn_cli.config.schema import Runtime
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Outputs
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.model.config import OFFLINE
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone
from support.engine import has_same_weights, make_job, random_batches, rank_batches, small_vit, train_steps
from support.ranks import CPU, run_distributed

OVER_THE_BATCH: tuple[Norm, ...] = ("sn", *OFFLINE)
# Past their warm-ups within the trainings below.
OPTIONS: dict[Norm, dict[str, Any]] = {"powernorm": {"power_warmup": 1}, "un": {"un_warmup": 1}}


def network(norm: Norm) -> Backbone:
    return small_vit(norm=norm, norm_options=OPTIONS.get(norm))


@pytest.mark.parametrize("norm", OVER_THE_BATCH)
def test_a_resumed_training_ends_as_an_unbroken_one(norm: Norm, tmp_path: Path) -> None:
    unbroken, broken, resumed = (network(norm) for _ in range(3))
    train_steps(unbroken, 8)
    checkpoints = Checkpoints(tmp_path)
    ticks = []

    def stop(tick: object) -> None:
        ticks.append(tick)
        if len(ticks) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_steps(broken, 8, checkpoint_every=4, outputs=Outputs(checkpoints, tick=stop))
    train_steps(resumed, 8, outputs=Outputs(checkpoints))
    assert not has_same_weights(unbroken, broken)
    assert has_same_weights(unbroken, resumed)


def fitted(norm: Norm, world: World, batches: engine.Batches) -> Backbone:
    model = network(norm)
    full = MicroBatch(8, fixed=True)
    engine.fit(engine.prepare(model, Runtime(), world), make_job(6, batches=batches, world=world, micro_batch=full))
    return model


def train_all(world: World, folder: Path) -> None:
    for norm in OVER_THE_BATCH:
        torch.save(fitted(norm, world, rank_batches(world)).state_dict(), folder / f"{norm}-{world.rank}.pt")


def test_two_ranks_train_and_count_as_one(tmp_path: Path) -> None:
    run_distributed(train_all, tmp_path)
    for norm in OVER_THE_BATCH:
        single = fitted(norm, World(0, 1, CPU), random_batches()).state_dict()
        for rank in (0, 1):
            together = torch.load(tmp_path / f"{norm}-{rank}.pt")
            for name, value in single.items():
                torch.testing.assert_close(together[name], value, atol=2e-5, rtol=1e-4, msg=f"{norm} {name}")


def test_the_average_of_the_weights_has_averaged_statistics() -> None:
    model, states = network("bn"), list[dict[str, Tensor]]()

    def note(tick: object) -> None:
        states.append({name: value.clone() for name, value in model.state_dict().items()})

    start = {name: value.clone() for name, value in model.state_dict().items()}
    train_steps(model, 5, ema_decay=0.5, outputs=Outputs(tick=note))
    for name, average in start.items():
        for step, state in enumerate(states):
            decay = min(0.5, (1 + step) / (10 + step))
            average = decay * average + (1 - decay) * state[name]
        torch.testing.assert_close(model.state_dict()[name], average, atol=1e-6, rtol=1e-5)


def test_prepbn_follows_the_progress_of_the_training() -> None:
    model, shares = network("prepbn"), list[float]()
    norm: Any = model.blocks[0].norm1
    norm.register_forward_hook(lambda module, inputs, output: shares.append(float(module.progress)))
    train_steps(model, 4)
    assert shares == pytest.approx([0, 0.25 / 0.8, 0.5 / 0.8, 0.75 / 0.8])
    norm.share = 0.5
    shares.clear()
    train_steps(model, 4)
    assert shares == [0, 0.5, 1, 1]


def test_evaluation_uses_the_running_statistics_and_leaves_them() -> None:
    for norm in OVER_THE_BATCH:
        model: nn.Module = fitted(norm, World(0, 1, CPU), random_batches()).eval()
        original = {name: value.clone() for name, value in model.named_buffers()}
        images = next(random_batches()(9))["image"]
        with torch.no_grad():
            torch.testing.assert_close(model(images)[:1], model(images[:1]))
        assert all(torch.equal(value, original[name]) for name, value in model.named_buffers())
