"""The schema of the segmentation config, and the defaults for data and weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.config.launch import find_start
from dpn_cli.config.load import Logger, Plain, discard_message, find_last_value, merge, merge_layers, read_config
from dpn_cli.config.network import DROP_PATH, IMAGE_SIZE, BackboneConfig, Freeze
from dpn_cli.config.option import DATA, HELP, flag
from dpn_cli.config.paths import find_data
from dpn_cli.config.schema import (
    DATA_SOURCE,
    IMAGE_COLUMN,
    DataLocation,
    Flip,
    Pixels,
    Positive,
    Section,
    Side,
    UprightImageReading,
    refuse_unused,
)
from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.config.training import resolve_training_steps
from dpn_cli.errors import DpnError
from dpn_cli.sweep.grid import SweepConfig

ADE20K = "ADEChallengeData2016"
MOST_CLASSES = 254
# How many times the shorter side's cap the longer side's is where the config has no scale.
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


class SegmentNetwork(BackboneConfig):
    """The network that is trained; its input is a crop of an image."""

    image_size: Annotated[
        Pixels | None,
        IMAGE_SIZE.replace(help="Side of crops and windows in pixels, N or HxW, a multiple of the patch."),
    ] = None
    drop_path: Annotated[float, Field(ge=0, lt=1), DROP_PATH] = 0.0


class MaskData(UprightImageReading):
    """The locations of images and masks, and the class of each number in a mask."""

    dataset: Literal["ade20k", "folder"] = "folder"
    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Folder with images/{training,validation} and annotations/{training,validation}, "
            "hf:OWNER/NAME[:CONFIGURATION] with masks, or demo.",
            unset="$DPN_DATA_DIR/ADEChallengeData2016, ./ADEChallengeData2016, else demo",
        ),
    ] = None
    fraction: Annotated[
        float,
        BeforeValidator(_fraction),
        flag(
            "--fraction",
            help="Share of the training images, e.g. 1/16 or 0.25; smaller shares lie in larger ones.",
            panel=DATA,
            brief="Share of the training images, e.g. 1/16.",
        ),
    ] = 1.0
    classes: Annotated[
        str | None,
        flag(
            "--class-names",
            help="File with one class name per line.",
            panel=DATA,
            unset="classes.txt in --data",
            brief=HELP,
        ),
    ] = None
    label_offset: Annotated[
        int,
        Field(ge=0, le=65535),
        flag("--label-offset", help="Value of the first class in the masks.", panel=DATA),
    ] = 0
    ignore_label: Annotated[
        Annotated[int, Field(ge=0, le=65535)] | None,
        flag("--ignore-label", help="Value in the masks that loss and score ignore.", panel=DATA),
    ] = 255
    image_column: Annotated[str | None, IMAGE_COLUMN.replace(unset="image")] = None
    mask_column: Annotated[
        str | None,
        flag(
            "--mask-column",
            help="Column of a hf: data set with the masks.",
            panel=DATA,
            unset="annotation, mask or label",
        ),
    ] = None
    scale: tuple[Side, Side] | None = None
    inputs: Literal["imagenet", "checkpoint"] = "checkpoint"
    flip: Flip = True

    @model_validator(mode="after")
    def _longer_first(self) -> MaskData:
        if self.scale and self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the longer side's cap comes first (got {list(self.scale)})")
        return self

    def caps(self, crop: int) -> tuple[int, int]:
        """Return the caps of an image's longer and shorter side in pixels: `scale`, else 4 and 1 crops."""
        return self.scale or (LONGEST * crop, crop)


class Augment(Section):
    """The training transforms of mmsegmentation's ADE20K pipeline."""

    ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.5, 2.0)
    cat_max: Annotated[float, Field(gt=0, le=1)] = 0.75
    photometric: bool = True


class Evaluation(Section):
    """The steps from an image to a label map.

    With the size ``both``, the score at the images' own size is the result, and that after resizing stands next to it.
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
    def _one_more_pass(cls, evaluation: Any) -> Any:
        if isinstance(evaluation, dict) and evaluation.get("size") == "both":
            scales = evaluation.get("scales")
            if evaluation.get("flip") or (isinstance(scales, list | tuple) and len(scales) > 1):
                return {**evaluation, "size": "native"}
        return evaluation

    @property
    def second_size(self) -> Evaluation | None:
        """The evaluation whose score is reported next to the result; None without one."""
        return self.model_copy(update={"size": "resize"}) if self.size == "both" else None


class SegmentConfig(SweepConfig):
    """The config of ``dpn segment ade20k`` and ``dpn segment folder``."""

    backbone: SegmentNetwork = SegmentNetwork()
    data: MaskData = MaskData()
    augment: Augment = Augment()
    evaluation: Evaluation = Evaluation()
    final_norm: bool = False
    head_init: Literal["truncated_normal", "lecun_normal", "zero"] = "truncated_normal"
    freeze: Freeze = ()
    shift: ShiftSection = ShiftSection()
    evaluate_every: Positive | None = None

    @model_validator(mode="after")
    def _possible(self) -> SegmentConfig:
        refuse_unused(self.optim, "optim", ("layer_decay",), "segmentation trains all layers at one rate (App. G)")
        refuse_unused(self.backbone, "backbone", ("pre_logits",), "patch tokens do not pass the pre-logits layer")
        return self


def resolve(
    config: str,
    config_file: str | None,
    flags: Mapping[str, Any],
    settings: Mapping[str, Any],
    log: Logger = discard_message,
) -> Plain:
    """Merge the layers over the command's `config` (``ade20k`` or ``segment``); without data it becomes the demo's.

    Steps that are given replace epochs; what they change next to goes to `say`.
    Raises `DpnError` as `merge_layers` does, and when a folder's command has no data.
    """
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    source = find_last_value("data", "source", file, command) or (find_data(ADE20K) if config == "ade20k" else None)
    if source is None:
        raise DpnError(
            "--data: which data set? A folder with images/{training,validation} and annotations/{training,validation}, "
            "hf:OWNER/NAME, or demo"
        )
    shipped = "ade20k_demo" if source == "demo" else config
    return merge(merge_layers(read_config(shipped), file, command, shipped, log), {"data": {"source": source}})


def finalize(config: SegmentConfig, demo_checkpoint: str | None = None) -> SegmentConfig:
    """Return the config with its checkpoint decided; `demo_checkpoint` is the demo's, and None stays.

    Raises `DpnError` for a crop that the patch does not divide, and when real data meet no weights.
    """
    backbone = config.backbone
    demo = ("none" if backbone.arch else demo_checkpoint) if config.demo else None
    if config.demo and not (backbone.checkpoint or demo):
        return config  # the caller makes the demo's tower
    backbone = find_start(
        backbone,
        needs="segmentation starts from a pre-trained network",
        example="vit_base_patch16_224.augreg_in1k",
        otherwise=demo,
    )
    classes = config.data.classes
    if classes and not config.demo and not os.path.lexists(Path(classes).expanduser()):
        raise DpnError(f"--class-names {classes}: no such file; it holds one class name per line")
    return config.model_copy(update={"backbone": backbone})


def resolve_steps(config: SegmentConfig, images: int, log: Logger = discard_message) -> SegmentConfig:
    """Return the config with its duration in steps: App. G rounds the steps of an epoch down (20210 // 16 = 1263)."""
    return resolve_training_steps(config, images // config.batch_size, log)
