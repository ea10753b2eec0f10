"""`dpn segment ade20k`, `folder`, `eval` and `predict`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dpn_cli import options, recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands import options_segment as own
from dpn_cli.commands.keys import pictures_of, recipe_flags, runtime_of
from dpn_cli.commands.options_classify import Flip
from dpn_cli.commands.tower import demo_tower
from dpn_cli.console import Console, printable, show
from tasks.segment import recipe as segment_recipe

# Segmenter's test scales (arXiv 2105.05633), each plain and mirrored.
MULTI_SCALE = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)

app = typer.Typer(
    no_args_is_help=True,
    help="Semantic segmentation: a linear decoder on patch tokens, the whole network trained.",
    epilog="Example: dpn segment ade20k --arch B/16 --checkpoint B-16-dpn.npz --data ADEChallengeData2016 "
    "--fraction 0.25",
)
Run = Annotated[str, typer.Argument(help="The folder of a segmentation run, or its weights.safetensors.")]


@app.command(
    epilog="Example: dpn segment ade20k --arch B/16 --checkpoint B-16-dpn.npz --data ADEChallengeData2016 "
    "--fraction 0.25"
)
def ade20k(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: own.CropSize = None,
    drop_path: own.DropPath = None,
    freeze: options.Freeze = None,
    data: own.AdeData = None,
    fraction: own.FractionOption = None,
    image_column: own.ImageColumn = None,
    mask_column: own.MaskColumn = None,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    flip: Flip = None,
    lr: own.Lr = None,
    seed: own.Seed = None,
    steps: own.AdeSteps = None,
    epochs: own.AdeEpochs = None,
    batch_size: own.BatchSize = None,
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
    """ADE20K with 150 classes, or a nested part of it (Table 5)."""
    _train("ade20k", locals())


@app.command(epilog="Example: dpn segment folder --arch B/16 --checkpoint B-16-dpn.npz --data DIR --epochs 20")
def folder(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: own.CropSize = None,
    drop_path: own.DropPath = None,
    freeze: options.Freeze = None,
    data: own.FolderData = None,
    classes: own.Classes = None,
    label_offset: own.LabelOffset = None,
    ignore_label: own.IgnoreLabel = None,
    fraction: own.FractionOption = None,
    image_column: own.ImageColumn = None,
    mask_column: own.MaskColumn = None,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    flip: Flip = None,
    lr: own.Lr = None,
    seed: own.Seed = None,
    steps: own.FolderSteps = None,
    epochs: own.FolderEpochs = None,
    batch_size: own.BatchSize = None,
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
    """Anyone's images with masks, in ADE20K's layout or from the hub."""
    _train("segment", locals())


def _settle(built: segment_recipe.SegmentRecipe, console: Console) -> segment_recipe.SegmentRecipe:
    """Decide the backbone; the demo makes its own where none is named."""
    settled = segment_recipe.settle(built)
    if settled.backbone.checkpoint is not None:
        return settled
    return segment_recipe.settle(built, demo_tower(built.backbone.stem or "dpn", console))


def _train(name: str, given: Mapping[str, Any]) -> None:
    """Train by the recipe `name` with a command's arguments, and print the result."""
    flags, console = recipe.from_flags(recipe_flags(given)), Console(quiet=given["quiet"])
    with one_line_errors(given["verbose"]):
        asked = recipe.from_settings(given["settings"] or [])
        plain = segment_recipe.resolve(name, given["config"], flags, asked, console.info)
        built = recipe.build(segment_recipe.SegmentRecipe, plain, "recipe")
        if given["print_config"]:
            print(recipe.dump(built), end="")
            return
        built = _settle(built, console)
        from tasks.segment.command import describe, start  # torch loads here

        keep = {key: given[key] for key in ("resume", "overwrite", "dry_run")}
        result = start(built, given["output_dir"], console=console, **keep)
        if result is not None:
            show(json.dumps(result, indent=2) if given["as_json"] else describe(result))


@app.command("eval", epilog="Example: dpn segment eval runs/segment_ade20k/B-16-dpn --multi-scale -o report")
def evaluate(
    run: Run,
    data: own.EvalData = None,
    mode: own.Mode = None,
    size: own.Size = None,
    stride: own.Stride = None,
    multi_scale: own.MultiScale = False,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    output_dir: own.ReportDir = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """The mIoU of a run on its validation images: per class with -o, in windows or whole, at one scale or many."""
    with one_line_errors(verbose):
        runtime = runtime_of(device, precision, workers)
        decoder, limit = pictures_of(decode, max_pixels)
        given = {"mode": mode, "size": size, "stride": stride}
        recipe.build(
            segment_recipe.Evaluation, {key: value for key, value in given.items() if value is not None}, "options"
        )
        from tasks.segment.command import describe_scores
        from tasks.segment.evaluation import Asked, evaluate

        scales = MULTI_SCALE if multi_scale else None
        asked = Asked(
            run, data, mode, size, stride, scales, multi_scale or None, output_dir, decoder, max_pixels and limit
        )
        result = evaluate(asked, runtime, Console(quiet=quiet))
        if result is not None:
            show(json.dumps(result, indent=2) if as_json else describe_scores(result))


@app.command(epilog="Example: dpn segment predict runs/segment_ade20k/B-16-dpn photo.jpg -o predictions")
def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for what is written.")] = Path(
        "predictions"
    ),
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    precision: options.Precision = None,
    device: options.Device = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Label maps of pictures: the classes' numbers, a coloured overlay and a legend, as PNG files."""
    with one_line_errors(verbose):
        runtime = runtime_of(device, precision, None)
        decoder, limit = pictures_of(decode, max_pixels)
        from tasks.segment.prediction import predict

        results = predict(run, images, output_dir, runtime, decode=decoder, max_pixels=limit)
        if as_json:
            print(json.dumps(results, indent=2))
            return
        for result in results:
            named = ", ".join(f"{printable(one['name'])} {one['share']:.1%}" for one in result["classes"][:6])
            more = f" and {len(result['classes']) - 6} more" if len(result["classes"]) > 6 else ""
            files = "  ".join(printable(result[name]) for name in ("labels", "overlay", "legend"))
            show(f"{printable(result['image'])}: {named}{more}\n  {files}")
