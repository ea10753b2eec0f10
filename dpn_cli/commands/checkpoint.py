"""`dpn checkpoint`: what a weight file holds, the same network in another file, a DPN start from a plain ViT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli import options
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import pictures_of
from dpn_cli.console import cell, printable, show
from dpn_cli.errors import DpnError
from dpn_cli.seeds import MOST_SEED

if TYPE_CHECKING:
    from dpn_cli.checkpoints import Checkpoint

app = typer.Typer(
    no_args_is_help=True,
    help="Look into weight files, convert them, or turn a plain ViT into a DPN start.",
    epilog="Example: dpn checkpoint inspect B_32.npz",
)

FACTS = "Facts that the file does not say"
Source = Annotated[
    str, typer.Argument(help="A weight file, a saved model's folder, timm:NAME or hf-hub:OWNER/NAME\\[/FILE].")
]
Target = Annotated[Path, typer.Argument(help="The .safetensors file to write.")]
Eps = Annotated[float | None, typer.Option("--eps", help="Epsilon of the norms.", rich_help_panel=FACTS)]
ActOption = Annotated[
    str | None, typer.Option("--act", help="gelu (erf), gelu_tanh or quick_gelu.", rich_help_panel=FACTS)
]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.", rich_help_panel=FACTS)]
Grid = Annotated[
    str | None,
    typer.Option("--grid", help="Rows and columns of patches, RxC, when they are no square.", rich_help_panel=FACTS),
]
Mean = Annotated[
    str | None, typer.Option("--mean", help="Mean of the inputs, R,G,B on pixels in 0..1.", rich_help_panel=FACTS)
]
Std = Annotated[str | None, typer.Option("--std", help="Their standard deviation, R,G,B.", rich_help_panel=FACTS)]
OverwriteFile = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file when it exists.", rich_help_panel=options.OUTPUT)
]


@app.command("inspect", epilog="Example: dpn checkpoint inspect B_32.npz --image-size 384")
def inspect_command(
    source: Source,
    image_size: options.ImageSize = None,
    eps: Eps = None,
    act: ActOption = None,
    heads: Heads = None,
    grid: Grid = None,
    mean: Mean = None,
    std: Std = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Say what a weight file is, and what loading it would rename, resize, drop, add or assume."""
    with one_line_errors(verbose):
        size = options.parse_pair("--image-size", image_size)
        opened = _open(source, eps, act, heads, grid, mean, std)
        from dpn_cli.convert import inspect

        found = inspect(opened, size)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            _print_inspection(found)


@app.command(epilog="Example: dpn checkpoint convert B_32.npz B_32-384.safetensors --image-size 384")
def convert(
    source: Source,
    target: Target,
    image_size: options.ImageSize = None,
    to: Annotated[str, typer.Option("--to", help="Layout: dpn, or timm where the stem allows it.")] = "dpn",
    eps: Eps = None,
    act: ActOption = None,
    heads: Heads = None,
    grid: Grid = None,
    mean: Mean = None,
    std: Std = None,
    overwrite: OverwriteFile = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Write the same network as safetensors, described, and proven on random images before it is kept."""
    with one_line_errors(verbose):
        _check_target(target, overwrite)
        if to not in ("dpn", "timm"):
            raise DpnError(f"--to {to!r}: choose dpn or timm")
        size = options.parse_pair("--image-size", image_size)
        opened = _open(source, eps, act, heads, grid, mean, std)
        from dpn_cli.convert import convert

        done = convert(opened, target, image_size=size, to="timm" if to == "timm" else "dpn")
        if as_json:
            print(json.dumps(done, indent=2))
            return
        height, width = done["image_size"]
        show(
            f"{done['path']}: {done['layout']} layout, {done['parameters'] / 1e6:.2f} M parameters, {height}x{width} "
            f"pixels. Loaded again, it gives the outputs of {opened.source} on {done['images']} random images "
            f"(largest difference {done['difference']:.1e}, relative)."
        )
        _print_lists(done["report"])


@app.command(epilog="Example: dpn checkpoint retrofit B_32.npz B_32-dpn.safetensors --data photos")
def retrofit(
    source: Source,
    target: Target,
    data: Annotated[str, typer.Option("--data", help="Folder of images to fit the norms on, or demo.")],
    images: Annotated[
        int, typer.Option("--images", min=4, max=100_000, help="How many of them, drawn by --seed.")
    ] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Of the draw.")] = 0,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    image_size: options.ImageSize = None,
    eps: Eps = None,
    act: ActOption = None,
    heads: Heads = None,
    grid: Grid = None,
    mean: Mean = None,
    std: Std = None,
    overwrite: OverwriteFile = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Give a plain ViT a DPN stem whose tokens are as near as they can be: a start for training."""
    with one_line_errors(verbose):
        _check_target(target, overwrite)
        asked = options.parse_pair("--image-size", image_size)
        decoder, limit = pictures_of(decode, max_pixels)
        from dpn_cli.kinds import resolve

        opened = _open(resolve(source, "dpn checkpoint retrofit"), eps, act, heads, grid, mean, std)
        import torch

        from dpn_cli.data.images import find_images
        from dpn_cli.data.pixels import load
        from dpn_cli.data.reading import Reading
        from dpn_cli.inferred import config_of
        from dpn_cli.retrofit import retrofit

        size = asked or config_of(opened).image_size
        pixels = load(find_images(data, images, seed, Reading(decoder or "exact", limit)), size).images
        done = retrofit(opened, target, lambda: iter(torch.split(pixels, 32)), image_size=size)
        if as_json:
            print(json.dumps(done, indent=2))
            return
        show(
            f"{done['path']}: stem dpn, fitted on {done['patches']} patches of {len(pixels)} images "
            f"(mean contrast {done['contrast']:.3f}, mean brightness {done['brightness']:+.3f}).\n"
            f"Of the variance of the tokens of held-out images {done['survives']:.1%} survives "
            f"({done['survives_copied']:.1%} with norms of scale 1 and bias 0).\n"
            "This is a start for training, not an equal network: a norm on raw patches removes each patch's brightness "
            "and contrast, which the plain ViT uses."
        )


def _check_target(target: Path, overwrite: bool) -> None:
    if target.suffix != ".safetensors":
        raise DpnError(f"{target}: dpn writes .safetensors; use {target.with_suffix('.safetensors')}")
    if target.exists() and not overwrite:
        raise DpnError(f"{target}: exists; pass --overwrite to replace it, or another name")


def _open(
    source: str,
    eps: float | None,
    act: str | None,
    heads: int | None,
    grid: str | None,
    mean: str | None,
    std: str | None,
) -> Checkpoint:
    """Open a checkpoint with the facts that the user states. Raises `DpnError` for facts of another form."""
    parsed_grid = options.parse_pair("--grid", grid)
    parsed_mean, parsed_std = _rgb("--mean", mean), _rgb("--std", std)
    if eps is not None and not 0 <= eps < 1:
        raise DpnError(f"--eps {eps}: a small positive number, e.g. 1e-6")
    if heads is not None and heads < 1:
        raise DpnError(f"--heads {heads}: at least 1")
    from dpn_cli.checkpoints.layout import Act
    from dpn_cli.convert import Facts
    from dpn_cli.sources import open_checkpoint

    known = {name: name for name in get_args(Act)}
    if act is not None and act not in known:
        raise DpnError(f"--act {act!r}: choose one of {', '.join(known)}")
    facts = Facts(eps, known[act] if act else None, heads, parsed_grid, parsed_mean, parsed_std)
    return facts.apply(open_checkpoint(source))


def _rgb(option: str, text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise DpnError(f"{option} {text!r}: write three numbers, e.g. 0.485,0.456,0.406") from None
    return red, green, blue


def _print_inspection(found: dict[str, Any]) -> None:
    inputs = list(zip(found["mean"], found["std"], strict=True))
    low, high = ([round((edge - mean) / std, 3) for mean, std in inputs] for edge in (0, 1))
    same = len(set(low)) == len(set(high)) == 1
    size = f"{found['width']} wide, {found['depth']} blocks, MLP {found['mlp']}, {found['heads']} heads"
    attention = "" if found["attn_width"] == found["width"] else f", attention {found['attn_width']} wide"
    parts = [name for name in ("pre_logits", "pre_norm", "fc_norm") if found[name]]
    table = Table(Column(), Column(overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = {
        "file": found["source"],
        "format": found["format"],
        "kind": found["kind"],
        "sha256": found["digest"] or "-",
        "size": f"{found['arch'] or 'no standard size'} ({size}{attention})",
        "parameters": f"{found['parameters'] / 1e6:.2f} M",
        "stem": found["stem"],
        "patch, grid": f"{_by(found['patch'])} pixels, {_by(found['grid'])} patches, {found['posemb']} positions",
        "pool": found["pool"] + (f", with {', '.join(parts)}" if parts else ""),
        "head": f"{found['classes']} outputs" if found["classes"] else "none",
        "norms": f"eps {found['eps']:g}",
        "activation": found["act"],
        "inputs": f"{low[0]:g} to {high[0]:g}" if same else f"mean {found['mean']}, std {found['std']}",
        "loaded at": f"{_by(found['image_size'])} pixels",
    }
    for name, value in rows.items():
        table.add_row(name, cell(value))
    RichConsole(highlight=False, soft_wrap=True).print(table)
    _print_lists(found)


def _print_lists(report: dict[str, Any]) -> None:
    if report["renamed"]:
        first, *_, last = [f"{theirs} -> {ours}" for theirs, ours in report["renamed"].items()] * 2
        show(printable(f"renamed: {len(report['renamed'])} arrays, {first} ... {last}"))
    for name in ("resized", "dropped", "new", "assumed", "notes"):
        values = report[name]
        more = f" and {len(values) - 8} more (--json lists all)" if len(values) > 8 else ""
        if values:
            show(printable(f"{name}: {', '.join(values[:8])}{more}"))


def _by(pair: list[int]) -> str:
    return "x".join(map(str, pair))
