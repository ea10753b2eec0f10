"""The config of one training: the keys that the tasks share. Imports no torch."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import model_validator

from dpn_cli.config.load import Logger, discard_message, steps_of
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.schema import (
    BATCH_SIZE,
    LR,
    SEED,
    Config,
    Epochs,
    Lr,
    Optim,
    Positive,
    Runtime,
    Schedule,
    Section,
    Seed,
)

# Steps at the end of a training over which Figures 2 and 4 of arXiv 2302.01327 take means of gradient norms.
NORM_AVERAGE_STEPS = 1000


class Log(Section):
    """Optional contents of metrics.jsonl.

    Args:
        layer_norms: the norm of the gradient of every block and every part of the stem, before clipping: the mean over
            the steps since the record before.
    """

    layer_norms: bool = False


class TrainingConfig(Config):
    """A config of one training. A task's config derives from it and adds its own `data` section and keys."""

    backbone: BackboneConfig = BackboneConfig()
    data: Section = Section()
    lr: Annotated[Lr, LR]
    seed: Annotated[Seed, SEED] = 0
    epochs: Epochs = None
    batch_size: Annotated[Positive, BATCH_SIZE]
    optim: Optim = Optim()
    schedule: Schedule
    runtime: Runtime = Runtime()
    log: Log = Log()

    @model_validator(mode="after")
    def _one_checkpoint(self) -> TrainingConfig:
        if "{stem}" in (self.backbone.checkpoint or "") and not getattr(self, "compare", ()):
            raise ValueError("backbone.checkpoint: {stem} is the stem of each network of --compare, and there is none")
        return self

    @property
    def demo(self) -> bool:
        """Return whether the data are the built-in scenes."""
        return getattr(self.data, "source", None) == "demo"

    @property
    def peak_lr(self) -> float:
        """The learning rate that the schedule's factors belong to."""
        return self.lr


ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


def resolve_training_steps(config: ConfigT, steps_per_epoch: float, log: Logger = discard_message) -> ConfigT:
    """Return the config with its duration in steps."""
    return config.model_copy(update={"schedule": steps_of(config.epochs, config.schedule, steps_per_epoch, log)})
