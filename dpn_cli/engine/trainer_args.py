"""`TrainJob`: the arguments of `fit`, and `FitResult`: its outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.config.training import TrainingConfig
from dpn_cli.engine.cross_batch_loss import Batch as Batch
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.callbacks import Outputs as Outputs
from dpn_cli.run.distributed import World

LossFn = Callable[[nn.Module, Batch], Tensor]
"""Loss of a batch: a scalar, the mean over its rows; a `CrossBatchLoss` where each row's loss depends on the others."""
Batches = Callable[[int], Generator[Batch, None, None]]
"""``batches(step)`` yields this rank's rows of every global batch from a step on: a pure function of the step.

The caller closes the generator, which ends the processes that read the data.
"""
Evaluate = Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Arguments of `fit` next to the model.

    Args:
        loss_fn: maps (model, batch) to the mean loss of the batch's rows.
        batches: yields this rank's rows of every global batch, from a step on.
        optim: the update rule.
        schedule: the number of optimizer steps, and the course of the learning rate.
        lr: peak learning rate.
        batch_size: rows of the global batch.
        seed: seeds dropout and stochastic depth.
        world: this rank.
        runtime: precision, and the steps between two checkpoints.
        micro_batch: rows that go through the network at once. By default `runtime` and the network decide.
        ema_decay: decay of the weights' moving average; None keeps no average. With an average, it is what `evaluate`
            sees and what the model holds at the end.
        evaluate: returns metrics by name; called with the model in eval mode, after the last step.
        evaluate_every: steps between two evaluations; 0 evaluates at the end only.
        monitor: the metric to maximise, where the best weights are kept.
        gauges: returns further numbers for every record of the log, by name.
        layer_norms: log the norm of the gradient of every layer, too, and when the last `NORM_AVERAGE_STEPS` begin; see
            `LayerGradNorms`.
        keep_best: save the weights with the best `monitor` as ``best``; needs `evaluate_every`.
        outputs: checkpoints, log and display. A checkpoint found there is resumed from.
    """

    loss_fn: LossFn
    batches: Batches
    optim: Optim
    schedule: Schedule
    lr: float
    batch_size: int
    seed: int
    world: World
    runtime: Runtime = field(default_factory=Runtime)
    micro_batch: MicroBatch | None = None
    ema_decay: float | None = None
    evaluate: Evaluate | None = None
    evaluate_every: int = 0
    monitor: str = "accuracy"
    gauges: Callable[[], dict[str, float]] = dict
    layer_norms: bool = False
    keep_best: bool = True
    outputs: Outputs = field(default_factory=Outputs)

    @classmethod
    def from_config(cls, config: TrainingConfig, **fields: Any) -> TrainJob:
        """Return the job of a config whose duration is in steps; `fields` are the other fields."""
        return cls(
            optim=config.optim,
            schedule=config.schedule,
            lr=config.peak_lr,
            batch_size=config.batch_size,
            seed=config.seed,
            runtime=config.runtime,
            layer_norms=config.log.layer_norms,
            **fields,
        )


@dataclass
class FitResult:
    """The outcome of a training; times in seconds, over all sessions of a training that was interrupted.

    Work after the last save of an interrupted session does not count. `earlier` are the seconds of the sessions before
    this one, and those that they waited for data.
    """

    steps: int
    loss: float
    seconds: float
    wait_seconds: float
    micro_batch: int
    earlier: tuple[float, float] = (0.0, 0.0)
    metrics: dict[str, float] = field(default_factory=dict)
