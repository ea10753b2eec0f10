"""Configs: YAML in, one validated and frozen object out. Imports neither torch nor a task.

Layers, later ones win: schema defaults < shipped config < ``--config`` < flags < ``--set a.b=c``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpn_cli.arch import (
    MOST_INTEGER,
    MOST_PIXELS,
    parse_whole_number,
)
from dpn_cli.config.option import DATA, HELP, OUTPUT, RUNTIME, TRAIN, argument, flag
from dpn_cli.config.urls import check_url

# The largest seed that every library takes.
MOST_SEED = 2**32 - 1
Positive = Annotated[int, Field(gt=0, le=MOST_INTEGER)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST_INTEGER)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Side = Annotated[int, Field(gt=0, le=MOST_PIXELS)]
NonNegative = Annotated[float, Field(ge=0)]
# Where data are, as `--data` says it.
DataLocation = Annotated[str, AfterValidator(check_url)]
# Pillow's own limit: what it refuses as a decompression bomb.
MAX_PIXELS = 2 * (1024**3 // 4 // 3)


def height_by_width(value: object) -> object:
    """Accept 224, "224", [224, 160] and "224x160" (height x width)."""
    if isinstance(value, str) and "x" in value:
        return tuple(parse_whole_number(side) or side for side in value.split("x"))
    return value


def split_list(value: object) -> object:
    """Accept ``"a,b"`` for ["a", "b"], and 3 for [3]."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return [value] if isinstance(value, int | float) else value


Pixels = Annotated[
    Side | tuple[Side, Side],
    BeforeValidator(height_by_width),
    Field(description=f"a side of at most {MOST_PIXELS} pixels, or height x width, e.g. 224 or 224x160"),
]


class Section(BaseModel):
    """A part of a config: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class About(Section):
    """The origin of a config and its expected result."""

    paper: str
    table: str
    command: str
    expected: str


# Keys that several schemas have under one meaning; a schema with another meaning writes its own.
DATA_SOURCE = flag(
    "--data", help="Location of the data.", panel=DATA, brief="Folder, pack, URL, hf:OWNER/NAME, wds:PATTERN, or demo."
)
VAL_DATA = flag("--val-data", help="Validation images, if they are outside --data.", panel=DATA, unset="--data's")
VAL_FRACTION = flag(
    "--val-fraction",
    help="Fraction of every class held out for validation.",
    panel=DATA,
    brief="Fraction held out for validation.",
)
DECODE = flag("--decode", help="JPEG decoder: exact (identical to the reference) or pillow.", panel=DATA)
IMAGE_COLUMN = flag(
    "--image-column",
    help="Image column of a hf: data set.",
    panel=DATA,
    unset="the only one of its kind",
)
LR = flag("--lr", help="Peak learning rate.", panel=TRAIN, brief=HELP)
SEED = flag("--seed", help="Seed of image order, crops and new weights.", panel=TRAIN)
EPOCHS = flag(
    "--epochs",
    help="Number of passes over the training images.",
    panel=TRAIN,
    unset="by --steps",
    brief=HELP,
)
BATCH_SIZE = flag(
    "--batch-size",
    "-b",
    help="Images per optimizer step over all ranks.",
    panel=TRAIN,
    brief="Images per optimizer step.",
)

# Of commands that do not train: their batches change nothing beyond floating-point rounding.
FORWARD_BATCH_SIZE = flag("--batch-size", "-b", help="Number of images per forward pass.", panel=RUNTIME)
ForwardBatchSize = Annotated[Positive, FORWARD_BATCH_SIZE]
IMAGE_FILES = argument("Images, or folders of images.")
HTML = flag(
    "--html",
    help="Write an HTML page of thumbnails with predictions.",
    panel=OUTPUT,
    brief="Page of thumbnails with predictions.",
)
MICRO_BATCH_SIZE = flag(
    "--micro-batch-size",
    help="Images per forward pass, or auto for as many as fit into memory.",
    panel=RUNTIME,
)
LabelColumn = Annotated[
    str | None,
    flag("--label-column", help="Column of the class indices.", panel=DATA, unset="the only one of its kind"),
]
ImageColumn = Annotated[str | None, IMAGE_COLUMN]
SkipBadImages = Annotated[bool, flag("--skip-bad-images", help="Skip and count unreadable images.", panel=DATA)]
FLIP = flag(
    "--flip/--no-flip",
    help="Flip training images at random; disable it for digits, text, and left or right.",
    panel=DATA,
)
Flip = Annotated[bool, FLIP]
JITTER = flag(
    "--jitter",
    help="How far brightness, contrast and saturation of training images change: 0.4 is by 40 %.",
    panel=DATA,
)
Jitter = Annotated[float, Field(ge=0, lt=1), JITTER]
NOISE = flag("--noise", help="Largest deviation of noise in training images, in grey levels of 255.", panel=TRAIN)
Noise = Annotated[float, Field(ge=0, le=255), NOISE]
EXIF = flag("--exif/--no-exif", help="Turn images as their EXIF orientation says, as phones store them.", panel=DATA)
Exif = Annotated[bool, EXIF]
MaxPixels = Annotated[
    Positive,
    flag(
        "--max-pixels",
        help="Largest image in pixels. Larger JPEGs are decoded at reduced size; other large images are refused.",
        panel=DATA,
    ),
]
Workers = Annotated[
    Annotated[int, Field(ge=0, le=1024)] | Literal["auto"],
    flag("--workers", "-j", help="Number of decoding processes, or auto.", panel=RUNTIME),
]
Crop = Literal["inception", "whole", "timm_bicubic", "timm_bilinear"]
# `centre` is the view in which a classifier is evaluated: the shorter side resized, the centre cut out.
DistillCrop = Literal[Crop, "centre"]
CropArea = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None, Field(description="a share of the image above 0 and up to 1, or null")
]
TorchvisionPolicy = Literal["cifar10", "imagenet", "svhn"]
Lr = Annotated[float, Field(gt=0)]
Epochs = Annotated[Annotated[float, Field(gt=0)] | None, EPOCHS]


def refuse_unused(section: Section, name: str, keys: Sequence[str], reason: str) -> None:
    """Raise `ValueError` for a key that is not at its default where it has no effect."""
    for key in keys:
        default = type(section).model_fields[key].default
        if getattr(section, key) != default:
            default_text = f"{default:g}" if isinstance(default, float) else "null" if default is None else "false"
            raise ValueError(f"{name}.{key}: {reason}; leave it at {default_text}")


class SampledData(Section):
    """The order of training images."""

    shuffle: Annotated[
        Literal["images", "shards"],
        flag(
            "--shuffle",
            help="Shuffle all images together, or a few shards of a pack or webdataset at a time. Use shards for "
            "remote "
            "data larger than the cache.",
            panel=DATA,
        ),
    ] = "images"
    open_shards: Positive = 16


class ImageReading(Section):
    """Options for reading image files: the decoder of JPEGs and the largest number of pixels."""

    decode: Annotated[Literal["exact", "pillow"], DECODE] = "exact"
    max_pixels: MaxPixels = MAX_PIXELS


class UprightImageReading(ImageReading):
    """Options for reading image files of people's own, which may be stored turned."""

    exif: Exif = False


Beta = Annotated[float, Field(ge=0, lt=1)]
RunExif = Annotated[bool | None, EXIF.replace(unset="as in the run's training")]


class RunImageReading(Section):
    """Options for reading image files for a run; by default the run's own."""

    decode: Annotated[Literal["exact", "pillow"] | None, DECODE.replace(unset="the run's")] = None
    max_pixels: MaxPixels = MAX_PIXELS
    exif: RunExif = None


class PredictionFiles(Section):
    """Files of predictions, in addition to the printed ones."""

    csv: Annotated[
        Path | None,
        flag(
            "--csv",
            help="Write a CSV table of predictions, one row per image.",
            panel=OUTPUT,
            brief="Table of all predictions.",
        ),
    ] = None
    html: Annotated[Path | None, HTML] = None


class Optim(Section):
    """The update rule; the learning rate and its schedule are apart (`Schedule`, ``lr``/``lrs``)."""

    name: Literal["momentum", "adam"] = "momentum"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: NonNegative = 0.0
    decay_unit: Literal["schedule", "lr", "gradient"] = "lr"
    decay_mask: Literal["kernels", "not_1d", "all"] = "kernels"
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _decay_fits(self) -> Optim:
        if self.decay_unit == "gradient" and self.state_dtype == "bfloat16":
            raise ValueError("decay_unit (gradient): belongs to torch's optimizers; leave state_dtype at float32")
        return self


class Schedule(Section):
    """The length of a training and its learning-rate schedule, in optimizer steps."""

    steps: Annotated[
        Positive,
        flag(
            "--steps",
            help="Optimizer steps per training; fewer than the config's scale the warm-up down.",
            panel=TRAIN,
            brief="Number of optimizer steps.",
        ),
    ]
    warmup: NonNegativeInt = 0
    decay: Literal["cosine", "linear", "polynomial", "rsqrt", "stair"] = "cosine"
    decay_from: NonNegativeInt | None = None
    end: NonNegative = 0.0
    start: Annotated[float, Field(ge=0, le=1)] = 0.0
    power: Annotated[float, Field(gt=0)] = 1.0
    timescale: Positive = 10_000
    cooldown: NonNegativeInt = 0
    stairs: tuple[tuple[int, float], ...] = ()

    @model_validator(mode="after")
    def _phases_fit(self) -> Schedule:
        if self.decay_from is not None and self.decay_from >= self.steps:
            raise ValueError(f"decay_from ({self.decay_from}) must be below steps ({self.steps})")
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup ({self.warmup}) must be below steps ({self.steps}): "
                f"add --set schedule.warmup={self.steps // 12}"
            )
        if self.warmup + self.cooldown > self.steps:
            raise ValueError(
                f"warmup ({self.warmup}) and cooldown ({self.cooldown}) must fit into steps ({self.steps}): "
                f"add --set schedule.cooldown={(self.steps - self.warmup) // 2}"
            )
        return self


class Runtime(Section):
    """Options of the machine: none may change a result beyond floating-point rounding."""

    device: Annotated[str, flag("--device", help="Device: auto, cpu, cuda or cuda:N.", panel=RUNTIME)] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        flag(
            "--precision",
            help="Compute precision; bf16 uses autocast, auto is bf16 where it is faster: on GPUs and some CPUs.",
            panel=RUNTIME,
        ),
    ] = "auto"
    compile: Annotated[
        bool, flag("--compile/--no-compile", help="Compile the training step with torch.compile.", panel=RUNTIME)
    ] = False
    shard: Annotated[
        bool,
        flag(
            "--shard/--no-shard",
            help="Shard weights, gradients and optimizer state over torchrun's processes (FSDP2).",
            panel=RUNTIME,
        ),
    ] = False
    micro_batch_size: Annotated[
        Positive | Literal["auto"],
        MICRO_BATCH_SIZE,
    ] = "auto"
    workers: Workers = "auto"
    checkpoint_every: Positive = 500
    report_to: Annotated[
        Literal["none", "tensorboard", "wandb"],
        flag("--report-to", help="Also log to tensorboard or wandb.", panel=OUTPUT),
    ] = "none"


class Config(Section):
    """Base class of the configs of all tasks."""

    about: About

    @property
    def demo(self) -> bool:
        """Return whether the data are the built-in scenes."""
        raise NotImplementedError

    def in_paper(self) -> Mapping[str, Any] | None:
        """Return the paper's values that depend on the architecture, by dotted key; None where it has none for it."""
        return {}
