"""`dpn inspect`: images of what a network has learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.config.network import IMAGE_SIZE
from dpn_cli.config.option import DATA, OUTPUT, argument, flag
from dpn_cli.config.schema import (
    DATA_SOURCE,
    DataLocation,
    ImageColumn,
    ImageReading,
    Pixels,
    Runtime,
    Section,
    SkipBadImages,
)
from dpn_cli.errors import DpnError
from dpn_cli.run.artifact_kinds import WEIGHTS
from dpn_cli.run.console import Console
from dpn_cli.run.files import open_report, replace_json

if TYPE_CHECKING:
    from dpn_cli.analysis.images import SampledImages
    from dpn_cli.weights.backbone import Backbone

IMAGES = 128  # as many as arXiv 2010.11929 takes for its attention distances
UNUSED = frozenset({"runtime.precision"})


class InspectOptions(Section):
    """Options of ``dpn inspect``."""

    checkpoint: Annotated[str, argument("A run's folder, or weights of any format.")]
    other: Annotated[str | None, argument("Second network to compare.")] = None
    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Images without labels to send through the network: a folder, a packed folder or "
            "its URL, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, or demo.",
            unset="what needs images is left out",
        ),
    ] = None
    images: Annotated[
        Annotated[int, Field(ge=1, le=10_000)],
        flag(
            "--images", help="Number of images, chosen by hash of their names.", panel=DATA, brief="Number of images."
        ),
    ] = IMAGES
    image_column: ImageColumn = None
    reading: ImageReading = ImageReading()
    skip_bad_images: SkipBadImages = False
    image_size: Annotated[Pixels | None, IMAGE_SIZE.replace(unset="the checkpoint's own")] = None
    runtime: Runtime = Runtime()
    output_dir: Annotated[
        Path,
        flag(
            "--output-dir",
            "-o",
            help="Folder to write the page, figures and result.json to.",
            panel=OUTPUT,
            brief="Folder of the page, figures and result.json.",
        ),
    ] = Path("inspect")


def inspect(options: InspectOptions, console: Console, title: str = "") -> dict[str, Any]:
    """Write a page about one network or two, its figures and ``result.json``; returns the result.

    Without a `title` the page is named after them.

    Raises `DataError` for weights and images that cannot be read, `DpnError` for an output folder that holds a run.
    """
    if options.source is None and options.images != IMAGES:
        raise DpnError(f"--images {options.images}: says how many of --data; pass --data, too")
    from dpn_cli.analysis.plots import sections_of
    from dpn_cli.analysis.summary import InspectionSummary, examine
    from dpn_cli.report.page import write_page  # matplotlib takes a second
    from dpn_cli.run import signals
    from dpn_cli.run.distributed import join, refuse_ranks

    checkpoints = [checkpoint for checkpoint in (options.checkpoint, options.other) if checkpoint is not None]
    networks: list[InspectionSummary] = []
    with signals.listen(signals.NO_RESULT), join(options.runtime.device) as world:
        refuse_ranks(world, "inspect")
        samples, names = _sampled_images(options), _names(checkpoints)
        models = [_open(checkpoint, options) for checkpoint in checkpoints]
        open_report(options.output_dir)
        for name, model in zip(names, models, strict=True):
            console.info(model.report.summary())
            model.to(world.device).eval()
            if samples is None:
                networks.append(examine(name, model, None))
            else:
                with console.counting(name, len(samples.split.labels)) as on_progress:
                    networks.append(examine(name, model, samples.batches(model, on_progress)))
            for line in networks[-1].left_out:
                console.info(f"{name}: {line}")
    page = write_page(options.output_dir, title or f"dpn inspect: {' and '.join(names)}", sections_of(networks))
    result = {
        "task": "inspect",
        "data": options.source,
        "decoder": samples.reading.versions() if samples else None,
        "networks": [summary.to_dict() for summary in networks],
        "page": page.name,
    }
    replace_json(options.output_dir / "result.json", result)
    return result


def _sampled_images(options: InspectOptions) -> SampledImages | None:
    from dpn_cli.analysis.images import SampledImages
    from dpn_cli.data.decode import ReadOptions, decoder_of
    from dpn_cli.data.image_source import ImageSource

    if options.source is None:
        return None
    reading = ReadOptions(decoder_of(options.reading.decode), options.reading.max_pixels)
    source = ImageSource(options.source, image_column=options.image_column, reading=reading)
    return SampledImages(source, options.images, options.runtime.workers, options.skip_bad_images)


def _open(checkpoint: str, options: InspectOptions) -> Backbone:
    from dpn_cli.run.artifact_kinds import resolve
    from dpn_cli.weights.backbone import load_backbone
    from dpn_cli.weights.locate import open_checkpoint

    return load_backbone(checkpoint=open_checkpoint(resolve(checkpoint, "dpn inspect")), image_size=options.image_size)


def _names(checkpoints: Sequence[str]) -> list[str]:
    """Return what networks are called on the page: the ends of their paths that tell them apart."""
    from dpn_cli.report.reading import unique_names

    paths = [path.parent if (path := Path(checkpoint)).name == WEIGHTS else path for checkpoint in checkpoints]
    if len(set(paths)) < len(paths):
        raise DpnError(f"{checkpoints[1]}: the same network twice; name another one, or leave it out")
    short = [path.with_suffix("") if path.is_file() else path for path in paths]
    return unique_names(short if len(set(short)) == len(short) else paths)


def add_to(root: typer.Typer) -> None:
    """Add ``inspect`` to the root of all commands."""
    register_command(
        root, "inspect", InspectOptions, "dpn inspect runs/highres/B-32-dpn --data photos -o inspect", without=UNUSED
    )(_inspect)


def _inspect(options: InspectOptions, console: Console) -> Outcome:
    """Plot what one or two networks have learned: norms, filters, positions, attention, tokens.

    To describe a weight file, use 'dpn checkpoint inspect'.
    """
    return inspect(options, console), lambda result: f"{options.output_dir / result['page']}: open it in a browser"
