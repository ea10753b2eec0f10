"""The recipe keys of supervised training, from scratch or from a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.errors import DpnError
from dpn_cli.recipe import (
    About,
    Backbone,
    NonNegative,
    Optim,
    Plain,
    Positive,
    Runtime,
    Schedule,
    Section,
    listed,
    read_recipe,
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
    decode: Literal["exact", "fast"] = "exact"
    eval_resize: Positive | None = None
    skip_bad_images: bool = False
    crop: Literal["inception", "whole"] = "inception"


class Network(Backbone):
    """A backbone with what is thrown away at random while it trains."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    drop_path_rescale: bool = True


class RandAugment(Section):
    """How many random operations an image goes through, and how strong they are (10 is the reference's full level)."""

    layers: Annotated[int, Field(ge=0)] = 0
    magnitude: NonNegative = 0.0


class SupervisedRecipe(Section):
    """All that decides a classifier's training."""

    about: About
    backbone: Network = Network()
    data: Data = Data()
    lr: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0)] = 0
    epochs: Annotated[float, Field(gt=0)] | None = None
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    head_bias: float = 0.0
    randaugment: RandAugment = RandAugment()
    mixup: NonNegative = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    freeze: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    select: Literal["best", "last"] = "best"
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

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return (self.data.source or "").split(":")[0] == "demo"


RecipeT = TypeVar("RecipeT", bound=SupervisedRecipe)


def duration(asked: Mapping[str, Any], shipped: str) -> Plain:
    """Return what the steps that a command asks for change in the shipped recipe beside the steps themselves.

    The warm-up keeps its share of the duration unless it is given too. Raises `DpnError` for a section that is a value,
    when steps and epochs are both given, and for a warm-up in steps when epochs decide how many steps there are.
    """
    for section in ("data", "backbone", "schedule"):
        if not isinstance(asked.get(section, {}), dict):
            raise DpnError(f"{section}: a section of keys, not a value; see dpn recipes show {shipped}")
    schedule: Plain = asked.get("schedule", {})
    if "steps" in schedule and asked.get("epochs") is not None:
        raise DpnError(f"--steps {schedule['steps']} and --epochs {asked['epochs']}: give one of them")
    if asked.get("epochs") is not None and "warmup" in schedule:
        raise DpnError(
            f"--epochs {asked['epochs']} and schedule.warmup={schedule['warmup']}: epochs become steps when the images "
            "are counted, and the warm-up keeps its share of them; give --steps to set both"
        )
    if not isinstance(schedule.get("steps"), int):
        return {}
    usual = read_recipe(shipped)["schedule"]
    return {"epochs": None, "schedule": {"warmup": schedule["steps"] * usual["warmup"] // usual["steps"]}}


def in_steps(recipe: RecipeT, images: int) -> RecipeT:
    """Return the recipe with its duration in steps: big_vision rounds epochs x images / batch, at least to one.

    The warm-up keeps its share of the duration.
    """
    if recipe.epochs is None:
        return recipe
    steps = max(1, round(recipe.epochs * images / recipe.batch_size))
    warmup = steps * recipe.schedule.warmup // recipe.schedule.steps
    schedule = recipe.schedule.model_copy(update={"steps": steps, "warmup": warmup})
    return recipe.model_copy(update={"schedule": schedule})
