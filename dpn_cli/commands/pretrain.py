"""`dpn pretrain` and `dpn plan pretrain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from dpn_cli import options, recipe
from dpn_cli.arch import SIZES, STEMS
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_classify as own
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import recipe_flags
from dpn_cli.console import Console, show
from dpn_cli.errors import DpnError
from tasks.pretrain import recipe as pretrain_recipe
from tasks.pretrain.table import APPENDIX_C, LEVELS

plan = typer.Typer(
    no_args_is_help=True,
    help="What a training will cost: steps, hours, disk.",
    epilog="Example: dpn plan pretrain --arch B/16",
)

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[imagenet|sun397]",
        help="imagenet is Appendix C, for any labelled images; sun397 Appendix F's three stages. \\[default: imagenet]",
        show_default=False,
    ),
]
# Nothing is loaded, so no checkpoint says what the network is.
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        help=f"ViT as SIZE/PATCH: {', '.join(SIZES)} and a patch side in pixels. "
        "\\[default: none; the demo's is nano/8]",
        autocompletion=options.complete_arch,
        rich_help_panel=options.MODEL,
        show_default=False,
    ),
]
Stem = Annotated[
    str | None,
    typer.Option(
        "--stem",
        help=f"Patch stem: {', '.join(STEMS)}. \\[default: dpn]",
        autocompletion=options.complete_stem,
        rich_help_panel=options.MODEL,
        show_default=False,
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        help="Input size in pixels, N or HxW, a multiple of the patch. \\[default: 224; the demo's is 64]",
        rich_help_panel=options.MODEL,
        show_default=False,
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", help="The same as the argument. \\[default: imagenet]", rich_help_panel=options.OUTPUT),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="short: 90 epochs with big_vision's lighter recipe, 0.3 of the work; says what differs. \\[default: none]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
Augment = Annotated[
    str | None,
    typer.Option(
        "--augment",
        help=f"Level of RandAugment and mixup: {', '.join(LEVELS)}. \\[default: Appendix C's for "
        f"{', '.join(APPENDIX_C)}]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
Dropout = Annotated[
    float | None,
    typer.Option(
        "--dropout",
        min=0.0,
        max=0.99,
        help="Dropout rate. \\[default: Appendix C's]",
        rich_help_panel=options.MODEL,
        show_default=False,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        help="Optimizer steps, instead of --epochs; fewer than the recipe's shorten the warm-up as much. "
        "\\[default: the recipe's epochs]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
EvalFewshot = Annotated[
    int | None,
    typer.Option(
        "--eval-fewshot",
        min=1,
        help="Images per class of a linear probe at every evaluation; 25 in the paper. \\[default: none]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Folder with train/CLASS and val/CLASS (or CLASS, with --val-fraction), a packed folder (dpn data pack), "
        "hf:OWNER/NAME\\[:CONFIGURATION], wds:PATTERN, or demo. \\[default: $DPN_DATA_DIR/imagenet, ./imagenet, "
        "else demo]",
        rich_help_panel=options.DATA,
        show_default=False,
    ),
]


def _built(
    name: str | None,
    recipe_name: str | None,
    preset: str | None,
    augment: str | None,
    config: str | None,
    flags: Mapping[str, Any],
    settings: list[str] | None,
    console: Console,
) -> pretrain_recipe.PretrainRecipe:
    """Merge options into a recipe. Raises `DpnError`."""
    if name and recipe_name and name != recipe_name:
        raise DpnError(f"'{name}' and --recipe {recipe_name}: give one of them")
    if preset not in (None, "short"):
        raise DpnError(f"--preset {preset!r}: there is one, short")
    which: Literal["short"] | None = "short" if preset else None
    asked = recipe.from_settings(settings or [])
    plain = pretrain_recipe.resolve(
        name or recipe_name or "imagenet", which, augment, config, flags, asked, console.info
    )
    return recipe.build(pretrain_recipe.PretrainRecipe, plain, "recipe")


def pretrain(
    name: Name = None,
    arch: Arch = None,
    stem: Stem = None,
    image_size: ImageSize = None,
    dropout: Dropout = None,
    drop_path: options.DropPath = None,
    data: DataOption = None,
    val_data: options.ValData = None,
    val_fraction: options.ValFraction = None,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    decode: options.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    flip: own.Flip = None,
    skip_bad_images: options.SkipBadImages = None,
    preset: Preset = None,
    augment: Augment = None,
    mixup: own.Mixup = None,
    lr: options.Lr = None,
    loss: options.Loss = None,
    ema: own.EmaOption = None,
    seed: options.Seed = None,
    steps: Steps = None,
    epochs: options.Epochs = None,
    eval_fewshot: EvalFewshot = None,
    batch_size: options.BatchSize = None,
    precision: options.Precision = None,
    compile: options.Compile = None,
    micro_batch_size: options.MicroBatch = None,
    device: options.Device = None,
    workers: options.Workers = None,
    output_dir: options.OutputDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    recipe_name: RecipeName = None,
    config: options.Config = None,
    settings: options.Settings = None,
    print_config: options.PrintConfig = False,
    dry_run: options.DryRun = False,
    report_to: options.ReportTo = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Make a backbone: ImageNet-1k from scratch with any stem (Tables 1 and 6), or SUN397 (Table 7)."""
    flags = recipe.from_flags(recipe_flags(locals()))
    console = Console(quiet=quiet)
    with one_line_errors(verbose):
        built = _built(name, recipe_name, preset, augment, config, flags, settings, console)
        if print_config:
            print(recipe.dump(built), end="")
            return
        built = pretrain_recipe.settle(built)
        from tasks.pretrain.command import describe, start  # torch loads here

        result = start(built, output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console)
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe(result))


@plan.command("pretrain", epilog="Example: dpn plan pretrain --arch B/16 --images 1268355")
def plan_pretrain(
    name: Name = None,
    arch: Arch = None,
    stem: Stem = None,
    image_size: ImageSize = None,
    data: DataOption = None,
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            min=1,
            help="Images to train on (minival is none of them), where the data are not here. "
            "\\[default: those of --data, else ImageNet-1k's]",
            rich_help_panel=options.DATA,
            show_default=False,
        ),
    ] = None,
    preset: Preset = None,
    augment: Augment = None,
    steps: Steps = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    precision: options.Precision = None,
    device: options.Device = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Devices like this one.")] = 1,
    recipe_name: RecipeName = None,
    config: options.Config = None,
    settings: options.Settings = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Steps, hours and disk of a pre-training, from FLOP counts and this device's matrix-product rate."""
    given = {name: value for name, value in locals().items() if name != "data"}
    with one_line_errors(verbose):
        flags = recipe.from_flags({**recipe_flags(given), "data.source": data or "imagenet"})
        asked = _built(name, recipe_name, preset, augment, config, flags, settings, Console())
        built = pretrain_recipe.settle(asked)
        from tasks.pretrain.plan import describe, estimate  # torch loads here

        result = estimate(built, images, here=data is not None, ranks=ranks)
        show(json.dumps(result, indent=2) if as_json else describe(result))
