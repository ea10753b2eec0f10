"""The schema of the high-resolution recipe, and where data and weights come from when the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.arch import check_image_size, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.home import find_data, find_weights, home
from dpn_cli.recipe import (
    About,
    Backbone,
    Optim,
    Plain,
    Positive,
    Runtime,
    Schedule,
    Section,
    listed,
    merge,
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


class HighresRecipe(Section):
    """All that ``dpn finetune highres`` does."""

    about: About
    backbone: Backbone = Backbone()
    data: Data = Data()
    lr: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0)] = 0
    epochs: Annotated[float, Field(gt=0)] | None = None
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    mixup: Annotated[float, Field(ge=0)] = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    freeze: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    batch_size: Positive
    eval_batch_size: Positive = 64
    evaluate_every: Positive = 2500
    optim: Optim = Optim()
    schedule: Schedule
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _one_checkpoint(self) -> HighresRecipe:
        if "{stem}" in (self.backbone.checkpoint or ""):
            raise ValueError("backbone.checkpoint: {stem} belongs to 'finetune vtab --compare'")
        return self

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return self.data.source == "demo"


def resolve(config: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any]) -> Plain:
    """Merge the layers of the recipe; without data it becomes the demo's.

    A duration that is given brings its warm-up along, a tenth of it as in the paper, unless that is given too.
    Raises `DpnError` when steps and epochs are both given.
    """
    asked = merge(read_recipe(config) if config else {}, flags, settings)
    for section in ("data", "backbone", "schedule"):
        if not isinstance(asked.get(section, {}), dict):
            raise DpnError(f"{section}: a section of keys, not a value; see dpn recipes show highres")
    schedule = asked.get("schedule", {})
    if "steps" in schedule and asked.get("epochs") is not None:
        raise DpnError(f"--steps {schedule['steps']} and --epochs {asked['epochs']}: give one of them")
    source = asked.get("data", {}).get("source") or find_data("imagenet")
    shorter = {"schedule": {"warmup": schedule["steps"] // 10}} if isinstance(schedule.get("steps"), int) else {}
    return merge(
        read_recipe("highres_demo" if source == "demo" else "highres"), shorter, asked, {"data": {"source": source}}
    )


def settle(recipe: HighresRecipe) -> HighresRecipe:
    """Return the recipe with its checkpoint decided.

    Raises `DpnError` for an image size that the patch does not divide, and when real data meet no weights.
    """
    backbone = recipe.backbone
    if backbone.arch:
        patch = parse_arch(backbone.arch)[1]
        check_image_size(backbone.image_size or 384, (patch, patch))
    found = find_weights(backbone.arch, (backbone.stem,))
    checkpoint = backbone.checkpoint or found or ("none" if recipe.demo else None)
    if checkpoint is None:
        name = f"{(backbone.arch or 'ARCH').replace('/', '-')}-{backbone.stem}.safetensors"
        raise DpnError(
            "--checkpoint: fine-tuning starts from a trained network and no weights were given. Ways out: "
            "--checkpoint FILE ('dpn checkpoint inspect' says what is read); --stem none --checkpoint "
            f"timm:vit_base_patch32_224.augreg_in1k; put {name} into {home() / 'weights'}; --checkpoint none to train "
            "from scratch; --data demo to look around"
        )
    if checkpoint == "none" and not backbone.arch:
        raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
    return recipe.model_copy(update={"backbone": backbone.model_copy(update={"checkpoint": checkpoint})})


def in_steps(recipe: HighresRecipe, images: int) -> HighresRecipe:
    """Return the recipe with its duration in steps: big_vision rounds epochs x images / batch, at least to one."""
    if recipe.epochs is None:
        return recipe
    steps = max(1, round(recipe.epochs * images / recipe.batch_size))
    schedule = recipe.schedule.model_copy(update={"steps": steps, "warmup": steps // 10})
    return recipe.model_copy(update={"schedule": schedule})
