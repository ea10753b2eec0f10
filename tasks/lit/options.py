"""The options of the commands that use a pair of towers. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from dpn_cli.config.inference import EvaluationOptions, ImageFileOptions
from dpn_cli.config.option import DATA, HELP, MODEL, OUTPUT, argument, flag
from dpn_cli.config.schema import (
    HTML,
    VAL_DATA,
    DataLocation,
    ForwardBatchSize,
    ImageColumn,
    LabelColumn,
    Positive,
    RunImageReading,
    Runtime,
    Section,
    SkipBadImages,
    split_list,
)
from dpn_cli.config.shift_options import ShiftOptions
from tasks.lit.config import CACHE_DIR, CAPTION_COLUMN, IMAGES, SKIP_BAD

RUN = argument("A run's folder, an export's, or its weights.safetensors.")
TOP = flag("--top", "-k", help="How many to print.", panel=OUTPUT)
SkipBad = Annotated[bool, SKIP_BAD]
CacheDir = Annotated[str | None, CACHE_DIR]


class LitEvalOptions(EvaluationOptions):
    """Options of ``dpn lit eval``."""

    run: Annotated[str, RUN]
    source: Annotated[
        DataLocation,
        flag(
            "--data",
            help="Labelled images (folder with val/CLASS or CLASS, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, demo), "
            "or captioned ones (.csv, .tsv, .json; with --retrieval the other kinds of 'lit train' too).",
            panel=DATA,
            brief="Labelled or captioned images.",
        ),
    ]
    val_source: Annotated[DataLocation | None, VAL_DATA] = None
    split: Annotated[
        Literal["train", "val", "test", "all"] | None,
        flag(
            "--split",
            help="Part of the data.",
            panel=DATA,
            unset="val, which of a run's own pairs are those that it held out",
            brief=HELP,
        ),
    ] = None
    zeroshot_data: Annotated[
        tuple[DataLocation, ...],
        BeforeValidator(split_list),
        flag(
            "--zeroshot-data",
            help="More labelled images to score, separated by commas; their classes are named as their folders are.",
            panel=DATA,
        ),
    ] = ()
    retrieval: Annotated[
        bool,
        flag(
            "--retrieval",
            help="Read --data as captioned images and score retrieval.",
            panel=DATA,
            brief="Score retrieval of captioned images.",
        ),
    ] = False
    prompts: Annotated[
        str | None,
        flag(
            "--prompts",
            help="clip_paper (81 templates), clip_best (8), plain, or a file, one a line.",
            panel=MODEL,
            unset="clip_paper",
            brief="Prompts: clip_paper, clip_best, plain, or a file.",
        ),
    ] = None
    class_names: Annotated[
        str | None,
        flag(
            "--class-names",
            help="imagenet, or a file with a name per class.",
            panel=DATA,
            unset="open_clip's for ImageNet's folders, else the folders' own",
            brief=HELP,
        ),
    ] = None
    images: Annotated[str | None, IMAGES] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    caption_column: Annotated[str | None, CAPTION_COLUMN] = None
    skip_bad_images: SkipBad = False
    shift: ShiftOptions = ShiftOptions()
    force: Annotated[bool, flag("--force", help="Print an accuracy that is not above chance.", panel=DATA)] = False
    cache_dir: CacheDir = None
    batch_size: ForwardBatchSize = 64

    @model_validator(mode="after")
    def _options_fit(self) -> LitEvalOptions:
        if self.val_source and self.split in ("test", "all"):
            raise ValueError(
                f"--split {self.split}: --val-data names the val images; leave one of them out, or pass {self.split} "
                "images as --data"
            )
        if self.zeroshot_data and self.captioned:
            raise ValueError("--zeroshot-data: of zero-shot accuracy alone; pass labelled images as --data")
        if self.shift.names and self.captioned:
            raise ValueError("--shifts: of zero-shot accuracy alone; pass labelled images as --data")
        return self

    @property
    def captioned(self) -> bool:
        """True where retrieval is scored, and not zero-shot classification."""
        return self.retrieval or self.source.endswith((".csv", ".tsv", ".json"))


class ZeroShotOptions(ImageFileOptions):
    """Options of ``dpn lit predict``."""

    run: Annotated[str, RUN]
    labels: Annotated[
        str,
        flag(
            "--labels",
            help="What the images may show, comma separated.",
            panel=MODEL,
            brief=HELP,
        ),
    ]
    prompts: Annotated[
        str,
        flag(
            "--prompts",
            help="As for eval: plain takes the labels as they are.",
            panel=MODEL,
            brief="Prompts: clip_paper, clip_best, plain, or a file.",
        ),
    ] = "plain"
    top: Annotated[Positive, TOP] = 3
    batch_size: ForwardBatchSize = 64


class SearchOptions(Section):
    """Options of ``dpn lit search``."""

    run: Annotated[str, RUN]
    images: Annotated[Path, flag("--images", help="Folder of images.", panel=DATA, brief=HELP)]
    query: Annotated[str, flag("--query", help="What to look for, a sentence.", panel=MODEL, brief=HELP)]
    top: Annotated[Positive, TOP] = 10
    reading: RunImageReading = RunImageReading()
    skip_bad_images: SkipBadImages = False
    cache_dir: CacheDir = None
    batch_size: ForwardBatchSize = 64
    html: Annotated[Path | None, HTML.replace(help="File for a page of the images that are found.")] = None
    runtime: Runtime = Runtime()


class LitExportOptions(Section):
    """Options of ``dpn lit export``."""

    run: Annotated[str, RUN]
    output_dir: Annotated[
        Path,
        flag(
            "--output-dir",
            "-o",
            help="Folder for towers, description and card.",
            panel=OUTPUT,
            brief="Folder for what is written.",
        ),
    ] = Path("export")
