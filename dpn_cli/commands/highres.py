"""`dpn finetune highres`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dpn_cli import options, recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_classify as own
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import recipe_flags
from dpn_cli.console import Console, show
from tasks.highres import recipe as highres_recipe

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Folder with train/CLASS and val/CLASS (or CLASS, with --val-fraction), hf:OWNER/NAME\\[:CONFIGURATION], "
        "wds:PATTERN, or demo. \\[default: $DPN_DATA_DIR/imagenet, ./imagenet, else demo]",
        rich_help_panel=options.DATA,
        show_default=False,
    ),
]


def highres(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: options.ImageSize = None,
    drop_path: options.DropPath = None,
    freeze: options.Freeze = None,
    data: DataOption = None,
    val_data: options.ValData = None,
    val_fraction: options.ValFraction = None,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    decode: options.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    flip: own.Flip = None,
    skip_bad_images: options.SkipBadImages = None,
    lr: options.Lr = None,
    layer_decay: options.LayerDecay = None,
    loss: options.Loss = None,
    mixup: own.Mixup = None,
    ema: own.EmaOption = None,
    seed: options.Seed = None,
    steps: own.HighresSteps = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    precision: options.Precision = None,
    compile: options.Compile = None,
    micro_batch_size: options.MicroBatch = None,
    device: options.Device = None,
    workers: options.Workers = None,
    output_dir: options.OutputDir = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    config: options.Config = None,
    settings: options.Settings = None,
    print_config: options.PrintConfig = False,
    dry_run: options.DryRun = False,
    report_to: options.ReportTo = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """384 px fine-tuning of ImageNet-1k (Tables 1 and 2), or of any folder of labelled pictures."""
    flags = recipe.from_flags(recipe_flags(locals()))
    console = Console(quiet=quiet)
    with one_line_errors(verbose):
        plain = highres_recipe.resolve(config, flags, recipe.from_settings(settings or []), console.info)
        built = recipe.build(highres_recipe.HighresRecipe, plain, "recipe")
        if print_config:
            print(recipe.dump(built), end="")
            return
        built = highres_recipe.settle(built)
        from dpn_cli.supervised.command import describe  # torch loads here
        from tasks.highres.command import start

        result = start(built, output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console)
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe(result))
