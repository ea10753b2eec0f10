"""`dpn lit`: train a text tower against a frozen image tower, and use both."""

from __future__ import annotations

import json
from typing import Any

import typer

from dpn_cli import options, recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_lit as own
from dpn_cli.commands.keys import recipe_flags
from dpn_cli.commands.tower import demo_tower
from dpn_cli.console import Console
from tasks.lit import recipe as lit_recipe

app = typer.Typer(
    no_args_is_help=True,
    help="LiT: train a text tower against a frozen image tower (Table 4), then classify and search with both.",
    epilog="Example: dpn lit train --checkpoint B-32-dpn.npz --data pairs.csv",
)


def _resolve(given: dict[str, Any], config: str | None, settings: list[str] | None) -> lit_recipe.LitRecipe:
    plain = lit_recipe.resolve(config, recipe.from_flags(recipe_flags(given)), recipe.from_settings(settings or []))
    return recipe.build(lit_recipe.LitRecipe, plain, "recipe")


def _settle(built: lit_recipe.LitRecipe, console: Console) -> lit_recipe.LitRecipe:
    """Decide the image tower; the demo makes its own where none is named."""
    settled = lit_recipe.settle(built)
    if settled.backbone.checkpoint is not None:
        return settled
    return lit_recipe.settle(built, demo_tower(built.backbone.stem, console))


@app.command(epilog="Example: dpn lit train --checkpoint B-32-dpn.npz --data pairs.csv -b 4096 --steps 5000")
def train(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: options.ImageSize = None,
    text_size: own.TextSize = None,
    tokenizer: own.TokenizerOption = None,
    data: own.DataOption = None,
    val_data: own.ValData = None,
    val_fraction: own.ValFraction = None,
    images: own.Images = None,
    image_column: options.ImageColumn = None,
    caption_column: own.CaptionColumn = None,
    skip_bad_images: own.SkipBad = None,
    cache: own.CacheOption = None,
    cache_dir: own.CacheDir = None,
    views: own.Views = None,
    loss: own.Loss = None,
    lr: own.Lr = None,
    seed: own.Seed = None,
    steps: own.Steps = None,
    epochs: options.Epochs = None,
    batch_size: own.BatchSize = None,
    precision: options.Precision = None,
    compile: options.Compile = None,
    micro_batch_size: own.MicroBatch = None,
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
    """Train a text tower from scratch; images are encoded once, whatever the number of epochs."""
    given = dict(locals())
    console = Console(quiet=quiet)
    with one_line_errors(verbose):
        built = _resolve(given, config, settings)
        if print_config:
            print(recipe.dump(built), end="")
            return
        built = _settle(built, console)
        from tasks.lit.command import describe, start  # torch loads here

        result = start(built, output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console)
        if result is not None:
            print(json.dumps(result, indent=2) if as_json else describe(result))


@app.command(epilog="Example: dpn lit cache --checkpoint B-32-dpn.npz --data pairs.csv")
def cache(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: options.ImageSize = None,
    tokenizer: own.TokenizerOption = None,
    data: own.DataOption = None,
    val_data: own.ValData = None,
    val_fraction: own.ValFraction = None,
    images: own.Images = None,
    image_column: options.ImageColumn = None,
    caption_column: own.CaptionColumn = None,
    skip_bad_images: own.SkipBad = None,
    cache_dir: own.CacheDir = None,
    views: own.Views = None,
    seed: own.Seed = None,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    config: options.Config = None,
    settings: options.Settings = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Encode all images once and keep the features, as 'train' does by itself; goes on where it was stopped."""
    given = dict(locals())
    with one_line_errors(verbose):
        console = Console(quiet=quiet)
        built = _settle(_resolve(given, config, settings), console)
        from tasks.lit.command import describe_cache, fill_cache

        result = fill_cache(built, console)
        if result is not None:
            print(json.dumps(result, indent=2) if as_json else describe_cache(result))
