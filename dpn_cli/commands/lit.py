"""`dpn lit`: train a text tower against a frozen image tower, and use both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from dpn_cli import options, recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_lit as own
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import pictures_of, recipe_flags, runtime_of
from dpn_cli.commands.tower import demo_tower
from dpn_cli.console import Console, printable, show
from dpn_cli.errors import DpnError
from tasks.lit import recipe as lit_recipe

app = typer.Typer(
    no_args_is_help=True,
    help="LiT: train a text tower against a frozen image tower (Table 4), then classify and search with both.",
    epilog="Example: dpn lit train --checkpoint B-32-dpn.npz --data pairs.csv",
)


def _resolve(
    given: dict[str, Any], config: str | None, settings: list[str] | None, console: Console
) -> lit_recipe.LitRecipe:
    flags, asked = recipe.from_flags(recipe_flags(given)), recipe.from_settings(settings or [])
    plain = lit_recipe.resolve(config, flags, asked, console.info)
    return recipe.build(lit_recipe.LitRecipe, plain, "recipe")


def _settle(built: lit_recipe.LitRecipe, console: Console) -> lit_recipe.LitRecipe:
    """Decide the image tower; the demo makes its own where none is named."""
    settled = lit_recipe.settle(built)
    if settled.backbone.checkpoint is not None:
        return settled
    return lit_recipe.settle(built, demo_tower(built.backbone.stem or "dpn", console))


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
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
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
        built = _resolve(given, config, settings, console)
        if print_config:
            print(recipe.dump(built), end="")
            return
        built = _settle(built, console)
        from tasks.lit.command import describe, start  # torch loads here

        result = start(built, output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console)
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe(result))


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
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: own.SkipBad = None,
    cache_dir: own.CacheDir = None,
    views: own.Views = None,
    seed: own.Seed = None,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    resume: own.CacheResume = False,
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
        built = _settle(_resolve(given, config, settings, console), console)
        from tasks.lit.command import describe_cache, fill_cache

        result = fill_cache(built, console)
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe_cache(result))


@app.command("eval", epilog="Example: dpn lit eval runs/lit/B-32-dpn --data imagenet --prompts clip_best")
def evaluate(
    run: own.Run,
    data: own.EvalData,
    split: own.Split = None,
    retrieval: own.Retrieval = False,
    prompts: own.Prompts = None,
    class_names: own.ClassNames = None,
    tokenizer: own.RunTokenizer = None,
    images: own.Images = None,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    caption_column: own.CaptionColumn = None,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: own.SkipBad = None,
    force: own.Force = False,
    cache_dir: own.CacheDir = None,
    batch_size: own.AtOnce = 64,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    output_dir: own.ResultDir = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Zero-shot accuracy on labelled images, or recall at 1, 5 and 10 on captioned ones."""
    with one_line_errors(verbose):
        if split not in (None, "train", "val", "test", "all"):
            raise DpnError(f"--split {split}: choose train, val, test or all")
        runtime = runtime_of(device, precision, workers)
        decoder, limit = pictures_of(decode, max_pixels)
        from tasks.lit.data import Source
        from tasks.lit.evaluate import Asked, describe
        from tasks.lit.evaluate import evaluate as score

        source = Source(
            data,
            images=images,
            image_column=image_column,
            caption_column=caption_column,
            skip_bad=bool(skip_bad_images),
        )
        captioned = retrieval or data.endswith((".csv", ".tsv", ".json"))
        asked = Asked(
            run, source, captioned, split, label_column, prompts, class_names, tokenizer, batch_size, force, cache_dir,
            output_dir, decoder, limit,
        )  # fmt: skip
        result = score(asked, runtime, Console(quiet=quiet))
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe(result))


@app.command(epilog='Example: dpn lit predict runs/lit/B-32-dpn photo.jpg --labels "a cat,a dog"')
def predict(
    run: own.Run,
    images: own.Pictures,
    labels: own.Labels,
    prompts: own.PredictPrompts = "plain",
    top: own.Top = 3,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: own.SkipBad = None,
    precision: options.Precision = None,
    device: options.Device = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Which of some labels fits a picture best."""
    with one_line_errors(verbose):
        runtime = runtime_of(device, precision)
        decoder, limit = pictures_of(decode, max_pixels)
        from tasks.lit.use import label

        results = label(
            run, images, labels.split(","), prompts, top, runtime, bool(skip_bad_images), Console(quiet=False),
            decode=decoder, max_pixels=limit,
        )  # fmt: skip
        if as_json:
            print(json.dumps(results, indent=2))
            return
        for result in results:
            show(printable(result["image"]))
            for found in result["labels"]:
                show(f"  {found['probability']:6.1%}  cosine {found['cosine']:+.3f}  {printable(found['label'])}")


@app.command(epilog='Example: dpn lit search runs/lit/B-32-dpn --images photos --query "a dog on a beach"')
def search(
    run: own.Run,
    images: own.SearchFolder,
    query: own.Query,
    top: own.Top = 10,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: own.SkipBad = None,
    cache_dir: own.CacheDir = None,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """The pictures of a folder that are nearest to a sentence; each is encoded once, for all queries to come."""
    with one_line_errors(verbose):
        runtime = runtime_of(device, precision, workers)
        decoder, limit = pictures_of(decode, max_pixels)
        from tasks.lit.use import search as find

        found = find(
            run, images, query, top, runtime, cache_dir, bool(skip_bad_images), Console(quiet=quiet),
            decode=decoder, max_pixels=limit,
        )  # fmt: skip
        if as_json:
            print(json.dumps(found, indent=2))
            return
        for place in found:
            show(f"{place['cosine']:.3f}  {printable(place['image'])}")


@app.command(epilog="Example: dpn lit export runs/lit/B-32-dpn -o export")
def export(
    run: own.Run,
    output_dir: own.ExportDir = Path("export"),
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Write both towers and the tokenizer as safetensors and JSON, with a model card, after comparing features."""
    with one_line_errors(verbose):
        from tasks.lit.use import export as write

        done = write(run, output_dir)
        if as_json:
            print(json.dumps(done, indent=2))
        else:
            show(f"{done['path']}: gives the features of {run}; {done['config']} and README.md describe it")
