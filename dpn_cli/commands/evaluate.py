"""`dpn eval`, `dpn eval fewshot`, `dpn predict` and `dpn export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table
from typer.core import TyperGroup

from dpn_cli import options
from dpn_cli.arch import whole
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import pictures_of, runtime_of
from dpn_cli.console import Console, cell, show
from dpn_cli.errors import DpnError
from dpn_cli.seeds import MOST_SEED

if TYPE_CHECKING:
    from tasks.evaluate.parts import Split


class _ScoreByDefault(TyperGroup):
    """``dpn eval RUN`` scores; only the name of another command leads elsewhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["score", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ScoreByDefault,
    no_args_is_help=True,
    help="Score a run or checkpoint on labelled images ('score' may be left out), or probe a checkpoint.",
    epilog="Example: dpn eval runs/highres/B-32-dpn --data photos",
)

Network = Annotated[str, typer.Argument(help="A run's folder, or a checkpoint with a head.")]
Run = Annotated[str, typer.Argument(help="A run's folder, or its weights.safetensors.")]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="Folder with val/CLASS or CLASS, hf:OWNER/NAME\\[:CONFIGURATION], wds:PATTERN, or demo.",
        rich_help_panel=options.DATA,
    ),
]


def _numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    numbers = tuple(whole(part.strip()) for part in text.split(","))
    good = tuple(number for number in numbers if number is not None and least <= number <= most)
    if len(set(good)) < len(numbers):
        raise DpnError(f"{option} {text!r}: write numbers from {least} to {most}, each once, with commas, e.g. 1,5,10")
    return good


@app.command(epilog="Example: dpn eval runs/highres/B-32-dpn --data photos -o report")
def score(
    network: Network,
    data: DataOption,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="train, val or all. \\[default: val, which of a run's own data are the images that it set apart]",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: options.SkipBadImages = None,
    real: Annotated[
        Path | None,
        typer.Option("--real", help="ImageNet-ReaL's real.json: score against it too.", rich_help_panel=options.DATA),
    ] = None,
    image_size: options.ImageSize = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images at a time.")] = 64,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", help="Folder for result.json and per_class.csv.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Top-1, top-5 and loss of a classifier, its classes one by one, and what it confuses."""
    with one_line_errors(verbose):
        if split not in (None, "train", "val", "all"):
            raise DpnError(f"--split {split}: choose train, val or all")
        runtime = runtime_of(device, precision, workers)
        size = options.parse_pair("--image-size", image_size)
        decoder, limit = pictures_of(decode, max_pixels)
        from dpn_cli.data.classified import Source
        from tasks.evaluate.classification import Asked, describe, evaluate

        source = Source(data, image_column=image_column, label_column=label_column)
        chosen = cast("Split | None", split)
        asked = Asked(
            network, source, chosen, size, real, batch_size, bool(skip_bad_images), output_dir, decoder, limit
        )
        _print(evaluate(asked, runtime, Console(quiet=quiet)), describe, as_json)


@app.command(epilog="Example: dpn eval fewshot B-32-dpn.npz --data imagenet --shots 1,5,10,25")
def fewshot(
    checkpoint: Annotated[str, typer.Argument(help="Weights of any format, a run's weights.safetensors, or none.")],
    data: DataOption,
    val_data: options.ValData = None,
    val_fraction: options.ValFraction = None,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: options.SkipBadImages = None,
    shots: Annotated[str, typer.Option("--shots", help="Images per class, comma separated.")] = "1,5,10,25",
    seeds: Annotated[str, typer.Option("--seeds", help="Draws of the images, comma separated.")] = "0,1,2",
    pool: Annotated[
        int, typer.Option("--pool", min=1, help="Training images to draw from, by the order of their names' hashes.")
    ] = 65_000,
    image_size: options.ImageSize = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images at a time.")] = 64,
    precision: options.Precision = None,
    device: options.Device = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """The paper's few-shot metric: ridge regression on the frozen representation of a few images per class."""
    with one_line_errors(verbose):
        if val_fraction is not None and not 0 < val_fraction < 1:
            raise DpnError(f"--val-fraction {val_fraction}: a number above 0 and below 1")
        chosen, draws = _numbers("--shots", shots, 1, 1_000_000), _numbers("--seeds", seeds, 0, MOST_SEED)
        runtime = runtime_of(device, precision, workers)
        size = options.parse_pair("--image-size", image_size)
        decoder, limit = pictures_of(decode, max_pixels)
        from dpn_cli.data.classified import Source
        from dpn_cli.data.reading import Reading
        from tasks.evaluate.fewshot import describe, fewshot

        result = fewshot(
            checkpoint,
            Source(data, val_data, val_fraction, image_column, label_column, Reading(decoder or "exact", limit)),
            chosen,
            draws,
            runtime,
            Console(quiet=quiet),
            image_size=size,
            pool=pool,
            batch_size=batch_size,
            skip_bad=bool(skip_bad_images),
        )
        _print(result, describe, as_json)


def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.")],
    top: Annotated[int, typer.Option("--top", "-k", min=1, help="Classes per picture.")] = 3,
    decode: pictures.RunsDecode = None,
    max_pixels: pictures.MaxPixels = None,
    precision: options.Precision = None,
    device: options.Device = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """The classes of pictures with their probabilities, prepared as the run's own images were."""
    with one_line_errors(verbose):
        runtime = runtime_of(device, precision, None)
        decoder, limit = pictures_of(decode, max_pixels)
        from tasks.evaluate.prediction import classify

        results = classify(run, images, top, runtime, decode=decoder, max_pixels=limit)
        if as_json:
            print(json.dumps(results, indent=2))
            return
        table = Table(Column("picture", overflow="fold"), "class", "probability", box=None, padding=(0, 2, 0, 0))
        for result in results:
            for place, guess in enumerate(result["classes"]):
                picture = "" if place else cell(result["image"])
                table.add_row(picture, cell(guess["name"]), f"{guess['probability']:.1%}")
        RichConsole(highlight=False, soft_wrap=True).print(table)


def export(
    run: Run,
    to: Annotated[str, typer.Option("--to", help="safetensors, pt2 (torch.export) or onnx.")] = "safetensors",
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for the network and its card.")] = Path(
        "export"
    ),
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a run's classifier for use elsewhere, with a model card, after comparing its outputs."""
    with one_line_errors(verbose):
        if to not in ("safetensors", "pt2", "onnx"):
            raise DpnError(f"--to {to!r}: choose safetensors, pt2 or onnx")
        from tasks.evaluate.export import FILES, export

        done = export(run, output_dir, next(kind for kind in FILES if kind == to))
        if as_json:
            print(json.dumps(done, indent=2))
        else:
            show(
                f"{done['path']}: on {done['images']} random images it gives the outputs of {run} "
                f"(largest difference {done['difference']:.1e}, relative); {done['card']} describes it"
            )


def _print(result: dict[str, Any] | None, describe: Any, as_json: bool) -> None:
    if result is not None:
        show(json.dumps(result, indent=2) if as_json else describe(result))
