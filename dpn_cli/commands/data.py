"""`dpn data`: prepare a data set, pack one, or check one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BeforeValidator, Field

from dpn_cli.arch import MOST_PIXELS
from dpn_cli.commands import datacheck, prepare
from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.config.option import DATA, HELP, OUTPUT, RUNTIME, flag
from dpn_cli.config.schema import (
    VAL_DATA,
    DataLocation,
    ImageColumn,
    ImageReading,
    LabelColumn,
    Section,
    Side,
    SkipBadImages,
)
from dpn_cli.config.urls import EXTRAS
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console, count_noun

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn data pack --data imagenet --out imagenet-320 --size 320",
)
app.add_typer(datacheck.app, name="check")
app.add_typer(prepare.app, name="prepare")


def _shorter_side(value: object) -> object:
    """Accept ``"keep"`` for None."""
    return None if value == "keep" else value


class PackCommandOptions(Section):
    """Options of ``dpn data pack``."""

    source: Annotated[
        DataLocation,
        flag(
            "--data",
            help="Folder with train/CLASS and val/CLASS (or CLASS), hf:OWNER/NAME[:CONFIGURATION], or wds:PATTERN.",
            panel=DATA,
            brief="Folder, hf:OWNER/NAME or wds:PATTERN.",
        ),
    ]
    out: Annotated[
        Path,
        flag("--out", "-o", help="Folder to write the pack to.", panel=OUTPUT, brief=HELP),
    ]
    size: Annotated[
        Side | None,
        BeforeValidator(_shorter_side),
        Field(description=f"a number of pixels up to {MOST_PIXELS}, or keep"),
        flag(
            "--size",
            help="Resize the shorter side to at most this many pixels, or keep.",
            panel=DATA,
            brief="Longest shorter side in pixels, or keep.",
        ),
    ] = 320
    encode: Annotated[
        Literal["jpeg", "ppm"],
        flag(
            "--encode",
            help="Image format; ppm is uncompressed, several times larger and needs no decoding.",
            panel=DATA,
            brief="jpeg or ppm.",
        ),
    ] = "jpeg"
    quality: Annotated[
        Annotated[int, Field(ge=1, le=100)], flag("--quality", help="JPEG quality of resized images.", panel=DATA)
    ] = 90
    val_source: Annotated[DataLocation | None, VAL_DATA] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    reading: ImageReading = ImageReading()
    skip_bad_images: SkipBadImages = False
    workers: Annotated[
        Annotated[int, Field(ge=1, le=1024)],
        flag("--workers", "-j", help="Processes.", panel=RUNTIME, brief="Number of processes."),
    ] = 2


@register_command(app, "pack", PackCommandOptions, "dpn data pack --data imagenet --out imagenet-320 --size 320")
def _pack(options: PackCommandOptions, console: Console) -> Outcome:
    """Pack images into shards for fast reading; run again to continue or repair."""
    from dpn_cli.data.decode import ReadOptions
    from dpn_cli.data.image_source import ImageSource, check_classes, find_splits, open_split
    from dpn_cli.data.sources import pack_writer
    from dpn_cli.data.splits import hash_order
    from dpn_cli.run import signals
    from dpn_cli.run.files import claim, real_path

    data, out = options.source, options.out
    reading = ReadOptions(options.reading.decode, options.reading.max_pixels)
    source = ImageSource(
        data,
        options.val_source,
        image_column=options.image_column,
        label_column=options.label_column,
        reading=reading,
    )
    if out.parts[:1] in {(f"{scheme}:",) for scheme in EXTRAS}:
        raise DpnError(f"--out {out}: a URL; pack into a folder, and copy that with the store's own program")
    for name, location in (("--data", data), ("--val-data", options.val_source)):
        if location and real_path(out).is_relative_to(real_path(location)):
            raise DpnError(f"--out {out}: inside {name} {location}, where its shards would be taken for images")
    splits = {name: open_split(source, name, unlabelled=True) for name in find_splits(source)}
    for name in [name for name, (split, _) in splits.items() if min(split.labels) < 0]:
        console.warn(f"{name} has no labels and is left out")
        del splits[name]
    for name in splits:
        check_classes(source, splits["train"][1], splits[name][1])
    with signals.listen(signals.PARTS_KEPT), claim(out):
        manifest = pack_writer.pack(
            {name: (split, hash_order(split)) for name, (split, _) in splits.items()},
            splits["train"][1],
            out,
            pack_writer.PackOptions(options.size, options.encode, options.quality),
            workers=options.workers,
            skip_bad=options.skip_bad_images,
            progress=console.info,
        )
    return _summary(manifest), lambda result: _describe_pack(out, result)


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
    fields = ("images", "left_out", "bytes")
    return {
        name: {"shards": len(shards), **{field: sum(shard[field] for shard in shards.values()) for field in fields}}
        for name, shards in manifest["splits"].items()
    }


def _describe_pack(out: Path, result: dict[str, Any]) -> str:
    lines = [
        f"{name}: {split['images']} images in {count_noun(split['shards'], 'shard')}, {split['bytes'] / 1e6:.1f} MB"
        + (f", {split['left_out']} unreadable ones left out" if split["left_out"] else "")
        for name, split in result.items()
    ]
    return "\n".join([*lines, f"read it with --data {out}"])
