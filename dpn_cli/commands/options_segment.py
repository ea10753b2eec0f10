"""The options of ``dpn segment`` that other commands do not have, or not with this default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpn_cli.options import DATA, MODEL, OUTPUT, TRAIN

CropSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Side of crops and windows in pixels, a multiple of the patch. \\[default: 512]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
DropPath = Annotated[
    float | None,
    typer.Option(
        "--drop-path",
        help="Stochastic depth of the last block. \\[default: 0.1]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
AdeData = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="ADEChallengeData2016's folder, hf:OWNER/NAME\\[:CONFIGURATION] with its masks, or demo. "
        "\\[default: $DPN_DATA_DIR/ADEChallengeData2016, ./ADEChallengeData2016, else demo]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
FolderData = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Folder with images/{training,validation} and annotations/{training,validation}, "
        "hf:OWNER/NAME\\[:CONFIGURATION], or demo. \\[default: none]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
FractionOption = Annotated[
    str | None,
    typer.Option(
        "--fraction",
        help="Share of the training images, e.g. 1/16 or 0.25; smaller shares lie in larger ones. \\[default: 1]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
ImageColumn = Annotated[
    str | None,
    typer.Option(
        "--image-column",
        help="Column of a hf: data set with the images. \\[default: image]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
MaskColumn = Annotated[
    str | None,
    typer.Option(
        "--mask-column",
        help="Column of a hf: data set with the masks. \\[default: annotation, mask or label]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="File with one class name per line. \\[default: classes.txt in --data]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
LabelOffset = Annotated[
    int | None,
    typer.Option(
        "--label-offset",
        help="Value of the first class in the masks. \\[default: 0]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
IgnoreLabel = Annotated[
    int | None,
    typer.Option(
        "--ignore-label",
        help="Value in the masks that neither loss nor score looks at. \\[default: 255]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Lr = Annotated[
    float | None,
    typer.Option("--lr", help="Peak learning rate. \\[default: 3e-5]", rich_help_panel=TRAIN, show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Of order, crops, distortions and the head. \\[default: 0]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
AdeSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Optimizer steps, whatever the fraction. \\[default: 161664]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
FolderSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Optimizer steps, instead of epochs. \\[default: none]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
AdeEpochs = Annotated[
    float | None,
    typer.Option(
        "--epochs",
        help="Passes over the training images that are left, instead of steps. \\[default: none]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
FolderEpochs = Annotated[
    float | None,
    typer.Option(
        "--epochs", help="Passes over the training images. \\[default: 128]", rich_help_panel=TRAIN, show_default=False
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "-b",
        help="Images per optimizer step over all ranks. \\[default: 16]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="slide: windows of the crop's size; whole: each image at once. \\[default: the run's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        help="native: the images' own size, enlarged to a window; resize: within the caps of the run's data.scale; "
        "both: native, with resize beside it unless there are many scales. \\[default: the run's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        "--stride",
        help="Pixels from window to window. \\[default: the run's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
MultiScale = Annotated[
    bool,
    typer.Option(
        "--multi-scale",
        help="Average the probabilities at 0.5, 0.75, 1, 1.25, 1.5 and 1.75 times the size, mirrored too.",
        rich_help_panel=DATA,
    ),
]
EvalData = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Data set in another place than the run's, of the same classes and values. \\[default: the run's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
ReportDir = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        "-o",
        help="Folder for result.json and per_class.csv. \\[default: none]",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
