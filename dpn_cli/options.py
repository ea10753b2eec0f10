"""The options that every training command has, in one place: name, help with default and unit, panel, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpn_cli.arch import COMMON_ARCHS, MOST_PIXELS, SIZES, STEMS, whole
from dpn_cli.errors import DpnError

MODEL, DATA, TRAIN, RUNTIME, OUTPUT = "Model", "Data", "Training", "Runtime", "Output and recipe"


def parse_pair(option: str, text: str | None) -> tuple[int, int] | None:
    """Read ``N`` or ``HxW`` as (height, width). Raises `DpnError` for another form."""
    if text is None:
        return None
    sides = [whole(part) or 0 for part in text.lower().split("x")]
    if len(sides) > 2 or not all(0 < side <= MOST_PIXELS for side in sides):
        raise DpnError(f"{option} {text!r}: write N or HxW, e.g. 384 or 384x512, at most {MOST_PIXELS} a side")
    return sides[0], sides[-1]


def complete_arch(incomplete: str) -> list[str]:
    """Return the architectures that shell completion offers."""
    return [arch for arch in COMMON_ARCHS if arch.startswith(incomplete)]


def complete_stem(incomplete: str) -> list[tuple[str, str]]:
    """Return the stems that begin with what was typed, with what each one is."""
    return [(stem, text) for stem, text in STEMS.items() if stem.startswith(incomplete)]


Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        help=f"ViT as SIZE/PATCH: {', '.join(SIZES)} and a patch side in pixels. \\[default: the checkpoint's]",
        autocompletion=complete_arch,
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
StemOption = Annotated[
    str | None,
    typer.Option(
        "--stem",
        help=f"Patch stem: {', '.join(STEMS)}. \\[default: the checkpoint's; dpn from scratch]",
        autocompletion=complete_stem,
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Weights: a file of any format that 'dpn checkpoint inspect' reads, timm:NAME, "
        "hf-hub:OWNER/NAME, or 'none' for from scratch. \\[default: ARCH-STEM.safetensors in $DPN_HOME/weights]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Input size in pixels, N or HxW, a multiple of the patch. \\[default: 384 in highres, 512 in segment, 224 "
        "in vtab, else the checkpoint's own]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "-b",
        help="Images per optimizer step over all ranks. \\[default: 512]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", help="Optimizer steps per training. \\[default: 2500]", rich_help_panel=TRAIN, show_default=False
    ),
]
Lrs = Annotated[
    str | None,
    typer.Option(
        "--lrs",
        help="Peak learning rates to choose from, comma separated. \\[default: 3e-4,1e-3,3e-3]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        help="Number of seeds, or a list: 3 is 0,1,2. \\[default: 3]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="bf16 (autocast) or fp32. \\[default: bf16 on a GPU, fp32 on a CPU]",
        rich_help_panel=RUNTIME,
        show_default=False,
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the training step with torch.compile. \\[default: no]",
        rich_help_panel=RUNTIME,
        show_default=False,
    ),
]
MicroBatch = Annotated[
    str | None,
    typer.Option(
        "--micro-batch-size",
        help="Images per forward pass, or auto: as many as memory takes, halved when it runs out. \\[default: auto]",
        rich_help_panel=RUNTIME,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="auto, cpu, cuda or cuda:N. \\[default: auto]", rich_help_panel=RUNTIME, show_default=False
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-j",
        help="Processes that decode images, or auto. \\[default: auto]",
        rich_help_panel=RUNTIME,
        show_default=False,
    ),
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        "--report-to",
        help="Also write to tensorboard or wandb. \\[default: none]",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        "-o",
        help="Folder of the run. \\[default: runs/TASK/ARCH-STEM]",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on with the run in the output folder; start one if there is none.", rich_help_panel=OUTPUT
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the run in the output folder first.", rich_help_panel=OUTPUT)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all data, train two steps with save, resume and validation; print hours and disk. No result.",
        rich_help_panel=OUTPUT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        help="A shipped recipe's name or a YAML file, laid over the command's own recipe.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one recipe key, e.g. --set optim.clip_norm=0.5; may be repeated.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved recipe and stop.", rich_help_panel=OUTPUT)
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON instead of tables.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show where in the code an error was raised.", rich_help_panel=OUTPUT)
]
SkipBadImages = Annotated[
    bool | None,
    typer.Option(
        "--skip-bad-images",
        help="Leave unreadable images out and count them, instead of stopping.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
DropPath = Annotated[
    float | None,
    typer.Option(
        "--drop-path",
        help="Stochastic depth of the last block. \\[default: 0]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Freeze = Annotated[
    str | None,
    typer.Option(
        "--freeze",
        help="Parts not to train: stem, positions, blocks, blocks:0-5, norm, backbone. \\[default: none]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
ValData = Annotated[
    str | None,
    typer.Option(
        "--val-data",
        help="Validation images, where they are not inside --data. \\[default: --data's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
ValFraction = Annotated[
    float | None,
    typer.Option(
        "--val-fraction",
        help="Share of every class set apart to validate on. \\[default: none]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
ImageColumn = Annotated[
    str | None,
    typer.Option(
        "--image-column",
        help="Column of a hf: data set with the images. \\[default: the only one of its kind]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        "--label-column",
        help="Column with the class numbers. \\[default: the only one of its kind]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        "--decode",
        help="exact: the reference's pixels; fast: JPEGs shrunk while they are decoded; pillow: Pillow's pixels. "
        "\\[default: exact]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Lr = Annotated[
    float | None,
    typer.Option("--lr", help="Peak learning rate. \\[default: 0.03]", rich_help_panel=TRAIN, show_default=False),
]
LayerDecay = Annotated[
    float | None,
    typer.Option(
        "--layer-decay",
        help="Each layer's lr as a share of the next one's. \\[default: 1]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", help="sigmoid or softmax. \\[default: sigmoid]", rich_help_panel=TRAIN, show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Of order, crops and a head from scratch. \\[default: 0]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        "--epochs",
        help="Duration in passes over the training images, instead of --steps. \\[default: none]",
        rich_help_panel=TRAIN,
        show_default=False,
    ),
]
