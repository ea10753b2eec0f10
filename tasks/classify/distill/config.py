"""The config of ``dpn distill``. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpn_cli.arch import Norm, Placement, Stem
from dpn_cli.config.load import Logger, Plain, discard_message, find_last_value, merge, merge_layers, read_config
from dpn_cli.config.network import ARCH, DROP_PATH, IMAGE_SIZE, NORM, PLACEMENT, STEM, BackboneConfig
from dpn_cli.config.option import MODEL, RUNTIME, TRAIN, flag
from dpn_cli.config.paths import DEMO_OBJECTS, DEMOS, find_data
from dpn_cli.config.schema import (
    DATA_SOURCE,
    DECODE,
    FLIP,
    MAX_PIXELS,
    NOISE,
    VAL_DATA,
    CropArea,
    DataLocation,
    DistillCrop,
    Exif,
    ImageColumn,
    Jitter,
    LabelColumn,
    MaxPixels,
    NonNegative,
    Pixels,
    Positive,
    SampledData,
    Section,
    Side,
    SkipBadImages,
    refuse_unused,
)
from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.errors import DpnError
from dpn_cli.sweep.grid import SweepConfig

Start = Literal["retrofit", "anneal", "copy", "scratch"]
# Smallest batch that `limit_batch` chooses.
LEAST_BATCH = 32
Share = Annotated[float, Field(ge=0, lt=1)]


# Of a student that begins with the teacher's weights, the teacher has decided these.
TEACHERS_KEYS = ("pool", "pre_logits", "registers", "distillation_token", "layer_scale", "swiglu")


class Student(BackboneConfig):
    """The network that is trained: the teacher's with another stem or other norms, or one from scratch."""

    arch: Annotated[
        str | None,
        replace(
            ARCH.replace(
                help="Another ViT than the teacher's, SIZE/PATCH, trained from scratch.", unset="the teacher's"
            ),
            names=("--student-arch",),
        ),
    ] = None
    stem: Annotated[Stem | None, STEM.replace(unset="dpn")] = None
    norm: Annotated[Norm | None, NORM.replace(unset="the teacher's; ln from scratch")] = None
    placement: Annotated[Placement | None, PLACEMENT.replace(unset="the teacher's; pre,pre from scratch")] = None
    checkpoint: None = None
    image_size: Annotated[Pixels | None, IMAGE_SIZE.replace(unset="the teacher's")] = None
    drop_path: Annotated[float, Field(ge=0, lt=1), DROP_PATH] = 0.0
    start: Annotated[
        Start | None,
        flag(
            "--start",
            help="First weights of the student: retrofit (the teacher's, and a stem fitted to its tokens), anneal "
            "(retrofit, with norms that come in during the first stage), copy (the teacher's, norms of scale 1 and "
            "bias 0) or scratch.",
            panel=MODEL,
            unset="retrofit from a plain teacher, else copy; scratch with --student-arch",
        ),
    ] = None

    @model_validator(mode="after")
    def _start_fits(self) -> Student:
        if self.arch and self.start not in (None, "scratch"):
            raise ValueError(
                f"start ({self.start}): begins with the teacher's weights, and arch ({self.arch}) is another network; "
                "leave one of them out"
            )
        if not self.scratch:
            refuse_unused(self, "backbone", TEACHERS_KEYS, "the teacher decides it")
        return self

    @property
    def scratch(self) -> bool:
        """Return whether the student starts with weights of its own."""
        return self.start == "scratch" or self.arch is not None


class DistillData(SampledData):
    """Location of the images, and their decoding; labels are not used."""

    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Images without labels: a folder with images anywhere in it (in its train folder, if there is "
            "one), a packed folder or its URL, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, or demo.",
            unset="$DPN_DATA_DIR/imagenet, ./imagenet, else demo",
        ),
    ] = None
    val_source: Annotated[
        DataLocation | None,
        VAL_DATA.replace(
            help="Labelled images, on which teacher and student are scored after the training.",
            unset="the val images in --data, if there are any",
        ),
    ] = None
    held_out: Annotated[Share | None, Field(description="a share of the images from 0 to below 1, or null")] = None
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
    crop: DistillCrop | None = None
    crop_area: CropArea = None
    flip: Annotated[bool | None, FLIP.replace(unset="as the teacher was trained, else flip")] = None
    jitter: Jitter = 0.0
    noise: Annotated[
        float,
        Field(ge=0, le=255),
        NOISE.replace(
            help="Largest deviation of noise in the student's images, in grey levels; the teacher sees none."
        ),
    ] = 0.0


class Losses(Section):
    """Losses between student and teacher, with their weights."""

    tokens: NonNegative = 1.0
    representation: NonNegative = 1.0
    logits: NonNegative = 1.0
    attention: NonNegative = 0.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    layers: Annotated[
        tuple[tuple[int, int], ...], Field(description="pairs of blocks, student's and teacher's, e.g. [[5, 11]]")
    ] = ()

    @model_validator(mode="after")
    def _something_counts(self) -> Losses:
        if not self.tokens + self.representation + self.logits + self.attention:
            raise ValueError("tokens, representation, logits, attention: one of them at least is above 0")
        if self.layers and not self.tokens + self.attention:
            raise ValueError("layers: pairs of blocks for losses.tokens and losses.attention, which are both 0")
        return self


class DistillConfig(SweepConfig):
    """Config of ``dpn distill``."""

    backbone: Student = Student()
    teacher: Annotated[
        str | None,
        flag(
            "--teacher",
            help="The trained network: a file of any format that 'dpn checkpoint inspect' reads, a run's folder, "
            "timm:NAME or hf-hub:OWNER/NAME.",
            panel=MODEL,
            unset="needed; demo: the demo's tower",
            brief="Trained network: a file, a run, timm:NAME.",
        ),
    ] = None
    data: DistillData = DistillData()
    losses: Losses = Losses()
    stem_share: Annotated[
        Share,
        flag(
            "--stem-share",
            help="Share of the steps that trains stem, positions and class token alone, before all weights are "
            "trained.",
            panel=TRAIN,
        ),
    ] = 0.0
    stem_lr: Annotated[Annotated[float, Field(gt=0)] | None, Field(description="a number above 0, or null for lr")] = (
        None
    )
    batch_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="the largest share of the images in a batch, above 0 and below 1, or null for batch_size"),
    ] = None
    mixup: Annotated[
        NonNegative, flag("--mixup", help="Strength p of mixup, Beta(p, p), of images; 0 for none.", panel=TRAIN)
    ] = 0.0
    ema: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        flag("--ema", help="Decay of the averaged weights that are evaluated and kept.", panel=TRAIN),
    ] = None
    cache_teacher: Annotated[
        Positive | None,
        flag(
            "--cache-teacher",
            help="Cache the teacher's outputs for this many views of every image, and train on those "
            "views alone; deleted when the run has finished.",
            panel=RUNTIME,
            unset="none: the teacher runs in every step",
        ),
    ] = None
    fewshot_data: Annotated[
        DataLocation | None,
        flag(
            "--fewshot-data",
            help="Labelled images, as 'dpn pretrain --data' takes them, for a few-shot probe of teacher and student.",
            panel=TRAIN,
        ),
    ] = None
    fewshot: Positive = 25
    shift: ShiftSection = ShiftSection()
    eval_batch_size: Positive = 64
    evaluate_every: Positive = 2500

    @model_validator(mode="after")
    def _stages_fit(self) -> DistillConfig:
        if self.stem_lr is not None and not self.stem_share:
            raise ValueError("stem_lr: the learning rate of the stem's stage, and stem_share is 0; leave it out")
        if self.backbone.start == "anneal" and not self.stem_share:
            raise ValueError("backbone.start (anneal): norms come in during the stem's stage; give it a --stem-share")
        if self.backbone.scratch and self.stem_share:
            raise ValueError(
                "stem_share: trains a stem before blocks that are trained already, and this student begins from "
                "scratch; leave it at 0"
            )
        if self.cache_teacher and self.mixup:
            raise ValueError(
                f"cache_teacher ({self.cache_teacher}): keeps what the teacher computes for images, and mixup "
                f"({self.mixup:g}) mixes them anew in every step; leave one of them out"
            )
        return self

    @property
    def stem_steps(self) -> int:
        """The steps of the stem's stage, once the duration is in steps."""
        return round(self.stem_share * self.schedule.steps)

    @property
    def demo(self) -> bool:
        """Return whether the data are the built-in scenes, with any options."""
        return self.data.source in DEMOS


def resolve(
    config_file: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], log: Logger = discard_message
) -> Plain:
    """Merge the layers over the config of the data: the demo's without data and teacher, else the usual one.

    A student from scratch has only the logits of a teacher of another width to learn from.
    Raises `DpnError` as `merge_layers` does, and for a teacher without images.
    """
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    explicit_source = find_last_value("data", "source", file, command)
    source = explicit_source or find_data("imagenet")
    demo = source in DEMOS
    teacher = command.get("teacher") or file.get("teacher")
    if demo and teacher and not explicit_source:
        raise DpnError(
            "--data: no images; neither $DPN_DATA_DIR/imagenet nor ./imagenet is there; name a folder with --data "
            "(labels are not needed)"
        )
    shipped = "distill_demo" if demo else "distill"
    base = read_config(shipped)
    if (
        find_last_value("backbone", "arch", file, command)
        or find_last_value("backbone", "start", file, command) == "scratch"
    ):
        log("a student from scratch: losses.tokens and losses.representation are 0 unless they are set")
        base = merge(base, {"losses": {"tokens": 0.0, "representation": 0.0}})
    # A batch that is given is not made smaller.
    file, command = (
        {**layer, "batch_share": None} if "batch_size" in layer and "batch_share" not in layer else layer
        for layer in (file, command)
    )
    plain = merge_layers(base, file, command, shipped, log)
    if not plain.get("stem_share") and "stem_lr" not in command:
        plain = merge(plain, {"stem_lr": None})
    return merge(plain, {"data": {"source": DEMO_OBJECTS if demo else source}})


def limit_batch(config: DistillConfig, images: int, log: Logger = discard_message) -> DistillConfig:
    """Return the config with the batch for a number of images: a power of two up to their ``batch_share``.

    It is `LEAST_BATCH` at least, and `batch_size` at most. The batch of fewer images than `LEAST_BATCH` is all of them.
    """
    if config.batch_share is None or not images:
        return config
    batch = max(LEAST_BATCH, 2 ** int(math.log2(max(1.0, config.batch_share * images))))
    batch = min(batch, images, config.batch_size)
    if batch < config.batch_size:
        log(f"{images} images: batches of {batch} (batch_share {config.batch_share:g}; --batch-size sets another)")
    return config.model_copy(update={"batch_size": batch})


def finalize(config: DistillConfig, demo_teacher: str | None = None) -> DistillConfig:
    """Return the config with its teacher and its student's stem decided. Raises `DpnError` without a teacher."""
    teacher = config.teacher or demo_teacher
    if teacher is None:
        raise DpnError(
            "--teacher: which network is to be distilled? A file that 'dpn checkpoint inspect' reads, "
            "timm:vit_base_patch32_224.augreg_in21k_ft_in1k, hf-hub:OWNER/NAME, or --data demo to look around"
        )
    backbone = config.backbone.model_copy(update={"stem": config.backbone.stem or "dpn"})
    return config.model_copy(update={"teacher": teacher, "backbone": backbone})
