"""`dpn data pack`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dpn_cli import options
from dpn_cli.arch import MOST_PIXELS, whole
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import pictures_of
from dpn_cli.console import Console, show
from dpn_cli.errors import DpnError

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare data sets for fast reading.",
    epilog="Example: dpn data pack --data imagenet --out imagenet-320 --size 320",
)


@app.command(epilog="Example: dpn data pack --data imagenet --out imagenet-320 --size 320")
def pack(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Folder with train/CLASS and val/CLASS (or CLASS), hf:OWNER/NAME\\[:CONFIGURATION], or wds:PATTERN.",
            rich_help_panel=options.DATA,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pack.", rich_help_panel=options.OUTPUT)],
    size: Annotated[
        str, typer.Option("--size", help="Shorter side in pixels at most, or keep.", rich_help_panel=options.DATA)
    ] = "320",
    encode: Annotated[
        str,
        typer.Option(
            "--encode",
            help="jpeg, or ppm: uncompressed, several times the space, nothing to decode.",
            rich_help_panel=options.DATA,
        ),
    ] = "jpeg",
    quality: Annotated[
        int, typer.Option("--quality", min=1, max=100, help="Of JPEGs that are resized.", rich_help_panel=options.DATA)
    ] = 90,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: options.SkipBadImages = None,
    workers: Annotated[
        int, typer.Option("--workers", "-j", min=1, max=1024, help="Processes.", rich_help_panel=options.RUNTIME)
    ] = 2,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write images once into shards that read fast; run it again to go on after a stop, or to mend what is damaged."""
    with one_line_errors(verbose):
        pixels = None if size == "keep" else whole(size) or 0
        if pixels is not None and not 0 < pixels <= MOST_PIXELS:
            raise DpnError(f"--size {size!r}: a number of pixels up to {MOST_PIXELS}, or keep")
        if encode not in ("jpeg", "ppm"):
            raise DpnError(f"--encode {encode!r}: jpeg or ppm")
        how: Literal["jpeg", "ppm"] = "jpeg" if encode == "jpeg" else "ppm"
        decoder, limit = pictures_of(decode, max_pixels)
        from dpn_cli import stopping
        from dpn_cli.data.classified import Source, check_classes, hash_order, open_split, own_splits
        from dpn_cli.data.pack import Packing, pack
        from dpn_cli.data.reading import Reading
        from dpn_cli.files import claimed

        console = Console(quiet=quiet)
        reading = Reading(decoder or "exact", limit)
        source = Source(data, image_column=image_column, label_column=label_column, reading=reading)
        if out.expanduser().resolve().is_relative_to(Path(data).expanduser().resolve()):
            raise DpnError(f"--out {out}: inside --data {data}, where its shards would be taken for pictures")
        found = {name: open_split(source, name, unlabelled=True) for name in own_splits(source)}
        for name in [name for name, (split, _) in found.items() if min(split.labels) < 0]:
            console.warn(f"{name} has no labels and is left out")
            del found[name]
        for name in found:
            check_classes(source, found["train"][1], found[name][1])
        packing = Packing(pixels, how, quality)
        with stopping.listen(stopping.GOES_ON), claimed(out):
            manifest = pack(
                {name: (split, hash_order(split)) for name, (split, _) in found.items()},
                found["train"][1],
                out,
                packing,
                workers=workers,
                skip_bad=bool(skip_bad_images),
                progress=console.info,
            )
        result = _summary(manifest)
        show(json.dumps(result, indent=2) if as_json else _describe(out, result))


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
    fields = ("images", "left_out", "bytes")
    return {
        name: {"shards": len(shards), **{field: sum(shard[field] for shard in shards.values()) for field in fields}}
        for name, shards in manifest["splits"].items()
    }


def _describe(out: Path, result: dict[str, Any]) -> str:
    lines = [
        f"{name}: {split['images']} images in {split['shards']} shards, {split['bytes'] / 1e6:.1f} MB"
        + (f", {split['left_out']} unreadable ones left out" if split["left_out"] else "")
        for name, split in result.items()
    ]
    return "\n".join([*lines, f"read it with --data {out}"])
