"""The config keys of supervised training, from scratch or from a checkpoint. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from dpn_cli.config.load import Logger, discard_message
from dpn_cli.config.network import DROP_PATH, BackboneConfig, Freeze
from dpn_cli.config.option import TRAIN, flag
from dpn_cli.config.paths import DEMOS
from dpn_cli.config.schema import (
    DATA_SOURCE,
    DECODE,
    FLIP,
    MAX_PIXELS,
    VAL_DATA,
    VAL_FRACTION,
    Crop,
    CropArea,
    DataLocation,
    Exif,
    ImageColumn,
    Jitter,
    LabelColumn,
    MaxPixels,
    Noise,
    NonNegative,
    NonNegativeInt,
    Positive,
    SampledData,
    Section,
    Side,
    SkipBadImages,
    TorchvisionPolicy,
)
from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.config.training import resolve_training_steps
from dpn_cli.sweep.grid import SweepConfig

Share = Annotated[float, Field(gt=0, lt=1)]
# timm's RandAugment in its own notation, or one of torchvision's AutoAugment policies.
Policy = Annotated[
    str,
    Field(
        pattern=r"^(rand(-(m\d+|n[1-9]\d*|p(0?\.\d+|1)|mstd\d+(\.\d+)?|mmax\d+|inc[01]))*|"
        + "|".join(get_args(TorchvisionPolicy))
        + ")$",
        description="timm's RandAugment, e.g. rand-m9-mstd0.5-inc1, or AutoAugment's cifar10, imagenet or svhn",
    ),
]


class SupervisedData(SampledData):
    """Location of the images, and their decoding."""

    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Folder with train/CLASS and val/CLASS (or CLASS, with --val-fraction), a packed folder (dpn data "
            "pack) or its URL, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, or demo.",
            unset="$DPN_DATA_DIR/imagenet, ./imagenet, else demo",
        ),
    ] = None
    val_source: Annotated[DataLocation | None, VAL_DATA] = None
    val_fraction: Annotated[Share | None, VAL_FRACTION] = None
    minival: Annotated[float, Field(ge=0, lt=1)] | None = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    decode: Annotated[
        Literal["exact", "fast", "pillow"],
        DECODE.replace(
            help="exact: the reference's pixels; fast: JPEGs shrunk while they are decoded; pillow: Pillow's pixels."
        ),
    ] = "exact"
    exif: Exif = False
    max_pixels: MaxPixels = MAX_PIXELS
    eval_resize: Side | None = None
    skip_bad_images: SkipBadImages = False
    crop: Crop | None = "inception"
    crop_area: CropArea = None
    flip: Annotated[
        bool | None, FLIP.replace(unset="own images: flipped where they are in colour, with random crops")
    ] = True
    jitter: Jitter = 0.0
    noise: Noise = 0.0


class SupervisedNetwork(BackboneConfig):
    """A backbone with dropout and stochastic depth."""

    drop_path: Annotated[float, Field(ge=0, lt=1), DROP_PATH] = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    drop_path_rescale: bool = True


class RandAugment(Section):
    """Number and strength of the random operations on an image; the reference goes to 20."""

    layers: NonNegativeInt = 0
    magnitude: Annotated[float, Field(ge=0, le=30)] = 0.0


class SupervisedConfig(SweepConfig):
    """Config of a classifier's training."""

    backbone: SupervisedNetwork = SupervisedNetwork()
    data: SupervisedData = SupervisedData()
    lr_batch: Positive | None = None
    loss: Annotated[Literal["sigmoid", "softmax"], flag("--loss", help="Loss over the classes.", panel=TRAIN)] = (
        "sigmoid"
    )
    head_bias: float | None = 0.0
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=1),
        flag("--label-smoothing", help="Share of each target that is spread over all classes.", panel=TRAIN),
    ] = 0.0
    randaugment: RandAugment = RandAugment()
    auto_augment: Policy | None = None
    erase: Annotated[float, Field(ge=0, le=1)] = 0.0
    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    mixup: Annotated[NonNegative, flag("--mixup", help="Strength p of mixup, Beta(p, p); 0 for none.", panel=TRAIN)] = (
        0.0
    )
    mixing: Literal["big_vision", "timm"] = "big_vision"
    cutmix: NonNegative = 0.0
    ema: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        flag("--ema", help="Decay of the averaged weights that are evaluated and kept.", panel=TRAIN),
    ] = None
    freeze: Freeze = ()
    select: Literal["best", "last"] = "last"
    fewshot: Positive | None = None
    fewshot_data: DataLocation | None = None
    shift: ShiftSection = ShiftSection()
    eval_batch_size: Positive = 64
    evaluate_every: Positive = 2500

    @model_validator(mode="after")
    def _crop_fits(self) -> SupervisedConfig:
        size, side = self.backbone.image_size or 1, self.data.eval_resize
        largest = size if isinstance(size, int) else max(size)
        if side is not None and side < largest:
            raise ValueError(
                f"data.eval_resize: the image size ({largest}) or more, as the centre of that size is cut from what is "
                f"resized (got {side})"
            )
        return self

    @model_validator(mode="after")
    def _crop_area_fits(self) -> SupervisedConfig:
        if self.data.crop_area and self.data.crop == "whole":
            raise ValueError(
                f"data.crop_area ({self.data.crop_area:g}): of random crops, and data.crop is whole; leave it at null, "
                "or choose data.crop"
            )
        return self

    @model_validator(mode="after")
    def _augmentations_fit(self) -> SupervisedConfig:
        if self.auto_augment and self.randaugment.layers:
            raise ValueError(
                f"auto_augment ({self.auto_augment}) and randaugment.layers ({self.randaugment.layers}): one policy is "
                "applied; leave one of them at null or 0"
            )
        if self.data.jitter and (policy := self.auto_augment or (self.randaugment.layers and "randaugment")):
            raise ValueError(
                f"data.jitter ({self.data.jitter:g}) and {policy}: a policy changes colours itself; leave data.jitter "
                "at 0 or the policy out (--augment none)"
            )
        if self.data.noise and self.erase:
            raise ValueError(
                f"data.noise ({self.data.noise:g}) and erase ({self.erase:g}): erasing gives normalised images, and "
                "noise is counted in grey levels; leave one of them at 0"
            )
        if self.repeats > 1 and self.data.shuffle == "shards":
            raise ValueError(
                f"repeats ({self.repeats}): such epochs draw a share of all images; leave data.shuffle at images, or "
                "repeats at 1"
            )
        if self.mixing == "big_vision" and self.cutmix:
            raise ValueError(f"cutmix ({self.cutmix:g}): timm's; set mixing to timm, or leave it at 0")
        if self.mixing == "timm" and not self.mixup + self.cutmix:
            raise ValueError("mixing (timm): needs mixup or cutmix above 0; leave it at big_vision to mix nothing")
        return self

    @property
    def peak_lr(self) -> float:
        """The learning rate of this batch size: `lr`, or `lr` scaled from that of `lr_batch`."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr

    @property
    def demo(self) -> bool:
        """Return whether the data are the built-in scenes, with any options."""
        return self.data.source in DEMOS


ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


def head_bias_of(config: SupervisedConfig, classes: int) -> float:
    """Return the bias that a new head starts with.

    Left out, it makes the sigmoid loss start near the classes' base rate: -log(classes) to one decimal, which for
    1000 classes is the -6.9 of arXiv 2302.01327 Appendix C. The softmax loss needs none.
    """
    if config.head_bias is not None:
        return config.head_bias
    return -round(math.log(classes), 1) if config.loss == "sigmoid" else 0.0


def resolve_steps(config: ConfigT, images: int, log: Logger = discard_message) -> ConfigT:
    """Return the config with its duration in steps: big_vision rounds epochs x images / batch, at least to one."""
    return resolve_training_steps(config, images / config.batch_size, log)
