"""The schema of the LiT config, and where data and weights come from when the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpn_cli.arch import SIZES, find_nearest
from dpn_cli.config.launch import SCRATCH_PIXELS, find_start
from dpn_cli.config.load import Logger, Plain, discard_message, find_last_value, merge, merge_layers, read_config
from dpn_cli.config.network import IMAGE_SIZE, BackboneConfig
from dpn_cli.config.option import DATA, MODEL, TRAIN, flag
from dpn_cli.config.schema import (
    BATCH_SIZE,
    DATA_SOURCE,
    MICRO_BATCH_SIZE,
    SEED,
    VAL_DATA,
    VAL_FRACTION,
    DataLocation,
    ImageColumn,
    NonNegativeInt,
    Pixels,
    Positive,
    Runtime,
    Section,
    Seed,
    UprightImageReading,
    refuse_unused,
)
from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.config.training import resolve_training_steps
from dpn_cli.errors import DpnError
from dpn_cli.sweep.grid import SweepConfig

# Pixels per side of the built-in scenes (dpn_cli.data.sources.synthetic.SCENE_SIZE, which imports too much for this
# module).
DEMO_PIXELS = 64

IMAGES = flag("--images", help="Folder that the file names are relative to.", panel=DATA, unset="the table's")
CAPTION_COLUMN = flag(
    "--caption-column",
    help="Column with the sentences.",
    panel=DATA,
    unset="caption, text, title or the like",
)
SKIP_BAD = flag(
    "--skip-bad-images",
    help="Leave unreadable images and pairs without text out and count them.",
    panel=DATA,
)
CACHE_DIR = flag("--cache-dir", help="Folder of all caches.", panel=DATA, unset="cache/lit in $DPN_HOME")


class CaptionData(UprightImageReading):
    """The location of the captioned images; `images` is the folder that their names are relative to."""

    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Captioned images: a .csv or .tsv (file, caption), COCO's captions .json, a folder with NAME.txt "
            "next to each image, wds:PATTERN, hf:OWNER/NAME[:CONFIGURATION], or demo.",
            unset="demo",
        ),
    ] = None
    val_source: Annotated[
        DataLocation | None, VAL_DATA.replace(help="Other captioned images to score retrieval on.")
    ] = None
    val_fraction: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        VAL_FRACTION.replace(help="Share held out without --val-data.", unset="0.01, 50 to 5000 images"),
    ] = None
    zeroshot: Annotated[
        DataLocation | None,
        flag(
            "--zeroshot-data",
            help="Labelled images, e.g. imagenet, to classify by prompts at the end, as 'lit eval' does (Table 4).",
            panel=DATA,
            brief="Labelled images to classify at the end.",
        ),
    ] = None
    images: Annotated[
        str | None,
        IMAGES,
    ] = None
    image_column: ImageColumn = None
    caption_column: Annotated[
        str | None,
        CAPTION_COLUMN,
    ] = None
    skip_bad_images: Annotated[
        bool,
        SKIP_BAD,
    ] = False


class Text(Section):
    """The text tower and what it reads; `size` is the image tower's unless given."""

    size: Annotated[
        str | None,
        flag(
            "--text-size",
            help=f"Text tower: {', '.join(SIZES)}.",
            panel=MODEL,
            unset="the image tower's",
            brief="Size of the text tower, e.g. B.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        flag(
            "--tokenizer",
            help="A SentencePiece .model file.",
            panel=MODEL,
            unset="open_clip's byte-pair encoding",
        ),
    ] = None
    clean: Literal["canonicalize", "lower", "whitespace"] = "canonicalize"
    context: Annotated[int, Field(ge=3)] = 16
    grad_checkpointing: bool = False


class Cache(Section):
    """The cache of the frozen tower's features: on or off, its folder, and its augmented views (0: the plain image)."""

    use: Annotated[bool, flag("--cache/--no-cache", help="Encode every image once, or at every visit.", panel=DATA)] = (
        True
    )
    folder: Annotated[
        str | None,
        CACHE_DIR,
    ] = None
    views: Annotated[
        NonNegativeInt,
        flag(
            "--views",
            help="Augmented views per image (random cut, mirrored); 0: the plain image.",
            panel=DATA,
        ),
    ] = 0


class TextRuntime(Runtime):
    """Runtime options of a training whose forward passes are over texts."""

    micro_batch_size: Annotated[
        Positive | Literal["auto"],
        MICRO_BATCH_SIZE.replace(help="Texts per forward pass, or auto; the loss is always that of the whole batch."),
    ] = "auto"


class ImageTower(BackboneConfig):
    """The frozen image tower."""

    image_size: Annotated[
        Pixels | None, IMAGE_SIZE.replace(unset="the tower's own; from scratch 224, the demo's 64")
    ] = None


class LitConfig(SweepConfig):
    """All that ``dpn lit train`` does."""

    backbone: ImageTower = ImageTower()
    data: CaptionData = CaptionData()
    text: Text = Text()
    cache: Cache = Cache()
    loss: Annotated[
        Literal["softmax", "siglip"], flag("--loss", help="softmax (CLIP's, LiT's) or siglip.", panel=TRAIN)
    ] = "softmax"
    shift: ShiftSection = ShiftSection()
    temperature: Annotated[float, Field(gt=0)] = 10.0
    bias: float = -10.0
    seed: Annotated[Seed, SEED.replace(help="Seed of the order, captions, views and text tower.")] = 0
    batch_size: Annotated[Positive, BATCH_SIZE.replace(help="Pairs per optimizer step over all ranks.")]
    runtime: TextRuntime = TextRuntime()

    @model_validator(mode="after")
    def _used(self) -> LitConfig:
        refuse_unused(self.backbone, "backbone", ("drop_path", "grad_checkpointing"), "the image tower is frozen")
        refuse_unused(self.optim, "optim", ("layer_decay",), "the text tower trains all layers at one rate")
        if self.shift.names and not self.data.zeroshot:
            raise ValueError("shift.names (--shifts): of zero-shot accuracy; name labelled images with --zeroshot-data")
        return self


def resolve(
    config_file: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], log: Logger = discard_message
) -> Plain:
    """Merge the layers of the config; without data it becomes the demo's. What a duration changes goes to `say`.

    Raises `DpnError` as `merge_layers` does.
    """
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    source = find_last_value("data", "source", file, command) or "demo"
    shipped = "lit_demo" if source == "demo" else "lit"
    return merge(merge_layers(read_config(shipped), file, command, shipped, log), {"data": {"source": source}})


def finalize(config: LitConfig, demo_checkpoint: str | None = None) -> LitConfig:
    """Return the config with its image tower decided; `demo_checkpoint` is the demo's, and None stays.

    Raises `DpnError` for an unknown text tower, an impossible image size, skipping without a cache, and real data
    without weights.
    """
    backbone, size = config.backbone, config.text.size
    if size is not None and size not in SIZES:
        close = find_nearest(size, SIZES)
        raise DpnError(
            f"--text-size {size!r}: choose one of {', '.join(SIZES)}" + (f"; did you mean {close!r}?" if close else "")
        )
    if config.data.skip_bad_images and not config.cache.use:
        raise DpnError(
            "--skip-bad-images with --no-cache: only the cache knows which images are readable before training"
        )
    demo = ("none" if backbone.arch else demo_checkpoint) if config.demo else None
    if config.demo and not (backbone.checkpoint or demo):
        return config  # the caller makes the demo's tower
    backbone = find_start(
        backbone,
        needs="LiT needs a trained image tower",
        example="vit_base_patch32_224.augreg_in21k",
        otherwise=demo,
        pixels=DEMO_PIXELS if config.demo else SCRATCH_PIXELS,
    )
    return config.model_copy(update={"backbone": backbone})


def resolve_steps(config: LitConfig, images: int, log: Logger = discard_message) -> LitConfig:
    """Return the config with its duration in steps: big_vision rounds epochs x images / batch, at least to one.

    Raises `DpnError` for a batch that is larger than the data set.
    """
    if config.batch_size > images:
        raise DpnError(
            f"--batch-size {config.batch_size}: larger than the {images} images to train on, so that an image would be "
            f"its own negative; use at most {images}"
        )
    if config.batch_size == 1 and config.loss == "softmax":
        raise DpnError("--batch-size 1: the softmax loss of a pair without others is zero; use at least 2")
    return resolve_training_steps(config, images / config.batch_size, log)
