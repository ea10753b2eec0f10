"""The options of the commands that use a classifier. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dpn_cli.recipe.flag import DATA, MODEL, OUTPUT, argument, flag
from dpn_cli.recipe.network import IMAGE_SIZE
from dpn_cli.recipe.schema import (
    PICTURES,
    VAL_DATA,
    VAL_FRACTION,
    AtOnce,
    ImageColumn,
    LabelColumn,
    Pictures,
    Pixels,
    Positive,
    RunPictures,
    Runtime,
    Section,
    Seed,
    SkipBadImages,
    Written,
    listed,
)
from tasks.classify.recipe import Share

RUN = argument("A run's folder, or its weights.safetensors.")
LABELLED = flag(
    "--data",
    help="Folder with val/CLASS or CLASS, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, or demo.",
    panel=DATA,
)
OWN_SIZE = IMAGE_SIZE.but(unset="the checkpoint's own")


class Scoring(Section):
    """Options of ``dpn eval``."""

    network: Annotated[str, argument("A run's folder, or a checkpoint with a head.")]
    source: Annotated[str, LABELLED]
    split: Annotated[
        Literal["train", "val", "all"] | None,
        flag(
            "--split",
            help="Part of the data.",
            panel=DATA,
            unset="val, which of a run's own data are the images that it set apart",
        ),
    ] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    pictures: RunPictures = RunPictures()
    skip_bad_images: SkipBadImages = False
    real: Annotated[
        Path | None, flag("--real", help="ImageNet-ReaL's real.json: score against it too.", panel=DATA)
    ] = None
    image_size: Annotated[Pixels | None, OWN_SIZE] = None
    batch_size: AtOnce = 64
    runtime: Runtime = Runtime()
    output_dir: Annotated[
        Path | None,
        flag(
            "--output-dir",
            "-o",
            help="Folder for the scores, every answer, and what 'dpn report' shows of them.",
            panel=OUTPUT,
        ),
    ] = None


class Probing(Section):
    """Options of ``dpn eval fewshot``."""

    checkpoint: Annotated[str, argument("Weights of any format, a run's weights.safetensors, or none.")]
    source: Annotated[str, LABELLED]
    val_source: Annotated[str | None, VAL_DATA] = None
    val_fraction: Annotated[Share | None, VAL_FRACTION] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    pictures: Pictures = Pictures()
    skip_bad_images: SkipBadImages = False
    shots: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...],
        BeforeValidator(listed),
        Field(min_length=1, description="numbers from 1 to 1000000, each once, with commas, e.g. 1,5,10"),
        flag("--shots", help="Images per class, comma separated.", panel=DATA),
    ] = (1, 5, 10, 25)
    seeds: Annotated[
        tuple[Seed, ...],
        BeforeValidator(listed),
        Field(min_length=1, description="numbers from 0 to 4294967295, each once, with commas, e.g. 0,1,2"),
        flag("--seeds", help="Draws of the images, comma separated.", panel=DATA),
    ] = (0, 1, 2)
    pool: Annotated[
        Positive,
        flag("--pool", help="Training images to draw from, by the order of their names' hashes.", panel=DATA),
    ] = 65_000
    image_size: Annotated[Pixels | None, OWN_SIZE] = None
    batch_size: AtOnce = 64
    runtime: Runtime = Runtime()


class Prediction(Section):
    """Options of ``dpn predict``."""

    run: Annotated[str, RUN]
    images: Annotated[list[Path], PICTURES]
    top: Annotated[Positive, flag("--top", "-k", help="Classes per picture.", panel=OUTPUT)] = 3
    pictures: RunPictures = RunPictures()
    skip_bad_images: SkipBadImages = False
    batch_size: AtOnce = 64
    written: Written = Written()
    runtime: Runtime = Runtime()


class Export(Section):
    """Options of ``dpn export``."""

    run: Annotated[str, RUN]
    to: Annotated[
        Literal["safetensors", "pt2", "onnx"],
        flag("--to", help="Format; pt2 is torch.export's.", panel=MODEL),
    ] = "safetensors"
    output_dir: Annotated[
        Path, flag("--output-dir", "-o", help="Folder for the network and its card.", panel=OUTPUT)
    ] = Path("export")
