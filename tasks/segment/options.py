"""The options of the commands that use a segmenter. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dpn_cli.config.inference import EvaluationOptions, ImageFileOptions
from dpn_cli.config.option import DATA, HELP, OUTPUT, argument, flag
from dpn_cli.config.schema import FORWARD_BATCH_SIZE, DataLocation, Positive, Side
from dpn_cli.config.shift_options import ShiftOptions

# Segmenter's test scales (arXiv 2105.05633), each plain and mirrored.
MULTI_SCALE = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
Windows = Annotated[
    Positive | None, FORWARD_BATCH_SIZE.replace(help="Windows of an image at a time.", unset="the run's")
]
RUN = argument("The folder of a segmentation run, or its weights.safetensors.")


class SegmentEvalOptions(EvaluationOptions):
    """Options of ``dpn segment eval``; what is left out stays as the run has it."""

    run: Annotated[str, RUN]
    source: Annotated[
        DataLocation | None,
        flag(
            "--data",
            help="Data set at another location than the run's, of the same classes and values.",
            panel=DATA,
            unset="the run's",
            brief="Images with masks to score.",
        ),
    ] = None
    mode: Annotated[
        Literal["slide", "whole"] | None,
        flag(
            "--mode",
            help="slide: windows of the crop's size; whole: each image at once.",
            panel=DATA,
            unset="the run's",
        ),
    ] = None
    size: Annotated[
        Literal["native", "resize", "both"] | None,
        flag(
            "--size",
            help="native: the images' own size, enlarged to a window; resize: within the caps of the run's data.scale; "
            "both: native, with resize next to it unless there are many scales.",
            panel=DATA,
            unset="the run's",
        ),
    ] = None
    stride: Annotated[
        Side | None, flag("--stride", help="Pixels from window to window.", panel=DATA, unset="the run's")
    ] = None
    multi_scale: Annotated[
        bool,
        flag(
            "--multi-scale",
            help="Average the probabilities at 0.5, 0.75, 1, 1.25, 1.5 and 1.75 times the size, mirrored too.",
            panel=DATA,
        ),
    ] = False
    boundaries: Annotated[
        bool,
        flag(
            "--boundaries",
            help="Score outlines, too: boundary IoU (2 % of the diagonal) and boundary F (0.75 %).",
            panel=DATA,
        ),
    ] = False
    shift: ShiftOptions = ShiftOptions()
    batch_size: Windows = None


class SegmentPredictOptions(ImageFileOptions):
    """Options of ``dpn segment predict``."""

    run: Annotated[str, RUN]
    batch_size: Windows = None
    output_dir: Annotated[
        Path,
        flag("--output-dir", "-o", help="Folder for what is written.", panel=OUTPUT, brief=HELP),
    ] = Path("predictions")
