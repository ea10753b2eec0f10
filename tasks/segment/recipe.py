"""The schema of the segmentation recipe, and where data and weights come from when the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.arch import check_image_size, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.home import find_data, find_weights, home
from dpn_cli.recipe import (
    About,
    Backbone,
    Optim,
    Pictures,
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
    read_recipe,
    unsaid,
)
from dpn_cli.supervised.recipe import counted, last_given, layered

ADE20K = "ADEChallengeData2016"
MOST_CLASSES = 254
# How many times the shorter side's cap the longer side's is where the recipe has no scale.
LONGEST = 4


def _fraction(value: object) -> object:
    """Accept 0.25, "0.25" and "1/4"."""
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"a share of the training images above 0 and at most 1, e.g. 0.25 or 1/16 (got {value!r})")
    return float(share)


class Data(Pictures):
    """Where images and masks are, and which number in a mask is which class."""

    dataset: Literal["ade20k", "folder"] = "folder"
    source: str | None = None
    fraction: Annotated[float, BeforeValidator(_fraction)] = 1.0
    classes: str | None = None
    label_offset: Annotated[int, Field(ge=0, le=65535)] = 0
    ignore_label: Annotated[int, Field(ge=0, le=65535)] | None = 255
    image_column: str | None = None
    mask_column: str | None = None
    scale: tuple[Side, Side] | None = None
    inputs: Literal["imagenet", "checkpoint"] = "checkpoint"
    flip: bool = True

    @model_validator(mode="after")
    def _longer_first(self) -> Data:
        if self.scale and self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the longer side's cap comes first (got {list(self.scale)})")
        return self

    def caps(self, crop: int) -> tuple[int, int]:
        """Return the caps of a picture's longer and shorter side in pixels: `scale`, else 4 and 1 crops."""
        return self.scale or (LONGEST * crop, crop)


class Augment(Section):
    """The training transforms of mmsegmentation's ADE20K pipeline."""

    ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.5, 2.0)
    cat_max: Annotated[float, Field(gt=0, le=1)] = 0.75
    photometric: bool = True


class Evaluation(Section):
    """How an image becomes a label map.

    With the size ``both``, the score at the images' own size is the result, and that after resizing stands beside it.
    It becomes ``native`` with several scales or flips, where the other size takes more than one pass over the images.
    """

    mode: Literal["slide", "whole"] = "slide"
    size: Literal["native", "resize", "both"] = "resize"
    stride: Side | None = None
    scales: Annotated[tuple[Annotated[float, Field(gt=0, le=4)], ...], Field(min_length=1)] = (1.0,)
    flip: bool = False
    batch_size: Positive = 8

    @model_validator(mode="before")
    @classmethod
    def _one_more_pass(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("size") == "both":
            scales = given.get("scales")
            if given.get("flip") or (isinstance(scales, list | tuple) and len(scales) > 1):
                return {**given, "size": "native"}
        return given

    @property
    def beside(self) -> Evaluation | None:
        """The evaluation whose score stands beside the result; None without one."""
        return self.model_copy(update={"size": "resize"}) if self.size == "both" else None


class SegmentRecipe(Section):
    """All that ``dpn segment ade20k`` and ``dpn segment folder`` do."""

    about: About
    backbone: Backbone = Backbone()
    data: Data = Data()
    augment: Augment = Augment()
    evaluation: Evaluation = Evaluation()
    final_norm: bool = False
    head_init: Literal["truncated_normal", "lecun_normal", "zero"] = "truncated_normal"
    lr: Annotated[float, Field(gt=0)]
    seed: Seed = 0
    epochs: Annotated[float, Field(gt=0)] | None = None
    freeze: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    batch_size: Positive
    evaluate_every: Positive | None = None
    optim: Optim = Optim()
    schedule: Schedule
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _possible(self) -> SegmentRecipe:
        if "{stem}" in (self.backbone.checkpoint or ""):
            raise ValueError("backbone.checkpoint: {stem} belongs to 'finetune vtab --compare'")
        if self.optim.layer_decay != 1:
            raise ValueError("optim.layer_decay: segmentation trains all layers at one rate (App. G); leave it at 1")
        return self

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return self.data.source == "demo"


def resolve(
    recipe: str, config: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], say: Say = unsaid
) -> Plain:
    """Merge the layers over the command's `recipe` (``ade20k`` or ``segment``); without data it becomes the demo's.

    Steps that are given replace epochs; what they change beside goes to `say`.
    Raises `DpnError` as `layered` does, and when a folder's command has no data.
    """
    file, command = read_recipe(config) if config else {}, merge(flags, settings)
    source = last_given("data", "source", file, command) or (find_data(ADE20K) if recipe == "ade20k" else None)
    if source is None:
        raise DpnError(
            "--data: which data set? A folder with images/{training,validation} and annotations/{training,validation}, "
            "hf:OWNER/NAME, or demo"
        )
    shipped = "ade20k_demo" if source == "demo" else recipe
    return merge(layered(read_recipe(shipped), file, command, shipped, say), {"data": {"source": source}})


def settle(recipe: SegmentRecipe, demo_checkpoint: str | None = None) -> SegmentRecipe:
    """Return the recipe with its checkpoint decided; `demo_checkpoint` is the demo's, and None stays.

    Raises `DpnError` for a crop that the patch does not divide, and when real data meet no weights.
    """
    backbone = recipe.backbone
    if backbone.arch:
        patch = parse_arch(backbone.arch)[1]
        check_image_size(backbone.image_size or 512, (patch, patch))
    found = find_weights(backbone.arch, (backbone.stem or "dpn",))
    checkpoint = backbone.checkpoint or found
    if checkpoint is None and recipe.demo:
        checkpoint = "none" if backbone.arch else demo_checkpoint
    if checkpoint is None and not recipe.demo:
        name = f"{(backbone.arch or 'ARCH').replace('/', '-')}-{backbone.stem or 'dpn'}.safetensors"
        raise DpnError(
            "--checkpoint: segmentation starts from a pre-trained network and no weights were given. Ways out: "
            "--checkpoint FILE ('dpn checkpoint inspect' says what is read); --checkpoint "
            f"timm:vit_base_patch16_224.augreg_in1k; put {name} into {home() / 'weights'}; --checkpoint none for "
            "from scratch; --data demo to look around"
        )
    if checkpoint == "none" and not backbone.arch:
        raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
    classes = recipe.data.classes
    if classes and not recipe.demo and not Path(classes).expanduser().is_file():
        raise DpnError(f"--classes {classes}: no such file; it holds one class name per line")
    return recipe.model_copy(update={"backbone": backbone.model_copy(update={"checkpoint": checkpoint})})


def in_steps(recipe: SegmentRecipe, images: int, say: Say = unsaid) -> SegmentRecipe:
    """Return the recipe with its duration in steps: App. G rounds the steps of an epoch down (20210 // 16 = 1263).

    Raises `DpnError` as `counted` does.
    """
    if recipe.epochs is None:
        return recipe
    steps = max(1, round(recipe.epochs * (images // recipe.batch_size)))
    return recipe.model_copy(update={"schedule": counted(recipe.schedule, steps, say)})
