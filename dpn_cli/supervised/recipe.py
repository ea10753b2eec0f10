"""The recipe keys of supervised training, from scratch or from a checkpoint. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.errors import DpnError
from dpn_cli.recipe import (
    MAX_PIXELS,
    About,
    Backbone,
    NonNegative,
    Optim,
    Plain,
    Positive,
    Runtime,
    Say,
    Schedule,
    Section,
    Seed,
    Side,
    listed,
    merge,
    scaled_warmup,
    unsaid,
)

Share = Annotated[float, Field(gt=0, lt=1)]


class Data(Section):
    """Where the images are, and how they become pixels."""

    source: str | None = None
    val_source: str | None = None
    val_fraction: Share | None = None
    minival: Annotated[float, Field(ge=0, lt=1)] | None = None
    image_column: str | None = None
    label_column: str | None = None
    decode: Literal["exact", "fast", "pillow"] = "exact"
    max_pixels: Positive = MAX_PIXELS
    eval_resize: Side | None = None
    skip_bad_images: bool = False
    crop: Literal["inception", "whole"] = "inception"
    flip: bool = True


class Network(Backbone):
    """A backbone with what is thrown away at random while it trains."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    drop_path_rescale: bool = True


class RandAugment(Section):
    """How many random operations an image goes through, and how strong they are; the reference goes to 20."""

    layers: Annotated[int, Field(ge=0)] = 0
    magnitude: Annotated[float, Field(ge=0, le=30)] = 0.0


class SupervisedRecipe(Section):
    """All that decides a classifier's training."""

    about: About
    backbone: Network = Network()
    data: Data = Data()
    lr: Annotated[float, Field(gt=0)]
    seed: Seed = 0
    epochs: Annotated[float, Field(gt=0)] | None = None
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    head_bias: float | None = 0.0
    randaugment: RandAugment = RandAugment()
    mixup: NonNegative = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    freeze: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    select: Literal["best", "last"] = "last"
    fewshot: Positive | None = None
    batch_size: Positive
    eval_batch_size: Positive = 64
    evaluate_every: Positive = 2500
    optim: Optim = Optim()
    schedule: Schedule
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _one_checkpoint(self) -> SupervisedRecipe:
        if "{stem}" in (self.backbone.checkpoint or ""):
            raise ValueError("backbone.checkpoint: {stem} belongs to 'finetune vtab --compare'")
        return self

    @model_validator(mode="after")
    def _crop_fits(self) -> SupervisedRecipe:
        size, side = self.backbone.image_size or 384, self.data.eval_resize
        largest = size if isinstance(size, int) else max(size)
        if side is not None and side < largest:
            raise ValueError(
                f"data.eval_resize: the image size ({largest}) or more, as the centre of that size is cut from what is "
                f"resized (got {side})"
            )
        return self

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return (self.data.source or "").split(":")[0] == "demo"


RecipeT = TypeVar("RecipeT", bound=SupervisedRecipe)


def head_bias_of(recipe: SupervisedRecipe, classes: int) -> float:
    """Return the bias that a new head starts with.

    Left out, it makes the sigmoid loss start near the classes' base rate: -log(classes) to one decimal, which for
    1000 classes is the -6.9 of arXiv 2302.01327 Appendix C. The softmax loss needs none.
    """
    if recipe.head_bias is not None:
        return recipe.head_bias
    return -round(math.log(classes), 1) if recipe.loss == "sigmoid" else 0.0


def layered(shipped: Plain, config: Plain, command: Plain, shown: str, say: Say = unsaid) -> Plain:
    """Merge what a command was asked for over a shipped recipe, so that its duration stays one thing.

    `config` is ``--config``'s file, `command` the flags and settings, which win. Steps put epochs aside, also those of
    the layer below, and a warm-up that is not given too shrinks with a shorter training. In a file with both, epochs
    decide, as in the shipped recipes. Raises `DpnError` for a section that is a value, for steps and epochs in one
    command, and for a warm-up in steps when epochs decide how many steps there are.
    """
    for layer in (config, command):
        for section in ("data", "backbone", "schedule"):
            if not isinstance(layer.get(section, {}), dict):
                raise DpnError(f"{section}: a section of keys, not a value; see dpn recipes show {shown}")
    asked = command.get("schedule", {})
    steps, epochs = asked.get("steps"), command.get("epochs")
    if steps is not None and epochs is not None:
        raise DpnError(f"--steps {steps} and --epochs {epochs}: give one of them")
    if epochs is not None and "warmup" in asked:
        raise DpnError(
            f"--epochs {epochs} and schedule.warmup={asked['warmup']}: epochs become steps when the images are counted "
            "and decide the warm-up too; give --steps to set both"
        )
    merged = merge(shipped, _in_its_own_steps(config, shipped, say), config)
    return merge(merged, _in_its_own_steps(command, merged, say), command)


def last_given(section: str, key: str, *layers: Plain) -> Any:
    """Return the value that the last layer with one gives a key of a section; None without one."""
    sections = [layer.get(section) for layer in layers]
    return next((each[key] for each in reversed(sections) if isinstance(each, dict) and each.get(key)), None)


def _in_its_own_steps(layer: Plain, below: Plain, say: Say) -> Plain:
    """Return what the steps of a layer change beside the steps themselves."""
    schedule, usual = layer.get("schedule", {}), below["schedule"]
    steps = schedule.get("steps")
    if steps is None or layer.get("epochs") is not None:
        return {}
    if not isinstance(steps, int):
        raise DpnError(f"schedule.steps: a whole number of steps (got {steps!r})")
    warmup = usual.get("warmup", 0)
    # What is wrong with the steps below is said when the whole recipe is checked.
    if "warmup" in schedule or not (isinstance(warmup, int) and isinstance(usual["steps"], int) and steps > 0):
        return {"epochs": None}
    return {"epochs": None, "schedule": {"warmup": scaled_warmup(steps, warmup, usual["steps"], say)}}


def in_steps(recipe: RecipeT, images: int, say: Say = unsaid) -> RecipeT:
    """Return the recipe with its duration in steps: big_vision rounds epochs x images / batch, at least to one.

    The warm-up is that of `scaled_warmup`. Raises `DpnError` for other parts of a schedule that count steps.
    """
    if recipe.epochs is None:
        return recipe
    steps = max(1, round(recipe.epochs * images / recipe.batch_size))
    return recipe.model_copy(update={"schedule": counted(recipe.schedule, steps, say)})


def counted(schedule: Schedule, steps: int, say: Say = unsaid) -> Schedule:
    """Return the schedule of a duration that was counted from epochs; the warm-up is that of `scaled_warmup`.

    Raises `DpnError` for other parts of a schedule that count steps.
    """
    if schedule.decay_from is not None or schedule.cooldown or schedule.stairs:
        raise DpnError(
            "schedule: decay_from, cooldown and stairs count steps, and the duration is in epochs; give --steps"
        )
    warmup = scaled_warmup(steps, schedule.warmup, schedule.steps, say)
    return schedule.model_copy(update={"steps": steps, "warmup": warmup})
