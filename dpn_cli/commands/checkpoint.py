"""`dpn checkpoint`: what a weight file holds, the same network in another file, a DPN start from a plain ViT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BeforeValidator, Field
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.arch import Act, Stem
from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.config.network import IMAGE_SIZE, STEM
from dpn_cli.config.option import DATA, FACTS, HELP, OUTPUT, argument, flag
from dpn_cli.config.schema import (
    ForwardBatchSize,
    ImageReading,
    Pixels,
    Positive,
    Section,
    Seed,
    Side,
    Workers,
    height_by_width,
)
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console, cell, printable, show

if TYPE_CHECKING:
    from dpn_cli.weights.formats import Checkpoint

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn checkpoint inspect B_32.npz",
)


def _rgb(value: object) -> object:
    """Accept ``"0.5,0.5,0.5"``."""
    return value.split(",") if isinstance(value, str) else value


Rgb = Annotated[
    tuple[float, float, float],
    BeforeValidator(_rgb),
    Field(description="three numbers with commas, e.g. 0.485,0.456,0.406"),
]


Grid = Annotated[
    Side | tuple[Side, Side],
    BeforeValidator(height_by_width),
    Field(description="rows x columns of patches, e.g. 14x7"),
]


class FileFacts(Section):
    """Facts about a weight file that the user states."""

    eps: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        flag("--eps", help="Epsilon of the norms.", panel=FACTS, unset="the file's"),
    ] = None
    act: Annotated[
        Act | None, flag("--act", help="Activation function; gelu is exact (erf).", panel=FACTS, unset="the file's")
    ] = None
    heads: Annotated[Positive | None, flag("--heads", help="Attention heads.", panel=FACTS, unset="the file's")] = None
    grid: Annotated[
        Grid | None,
        flag(
            "--grid",
            help="Patch grid, RxC, if it is not square.",
            panel=FACTS,
            unset="the file's",
        ),
    ] = None
    mean: Annotated[
        Rgb | None,
        flag("--mean", help="Mean of the inputs, R,G,B, for pixels in 0..1.", panel=FACTS, unset="the file's"),
    ] = None
    std: Annotated[
        Rgb | None, flag("--std", help="Standard deviation of the inputs, R,G,B.", panel=FACTS, unset="the file's")
    ] = None


class FileInspectOptions(Section):
    """Options of ``dpn checkpoint inspect``."""

    source: Annotated[str, argument("A weight file, a saved model's folder, timm:NAME or hf-hub:OWNER/NAME[/FILE].")]
    image_size: Annotated[Pixels | None, IMAGE_SIZE.replace(unset="the file's own")] = None
    facts: FileFacts = FileFacts()


class WriteOptions(FileInspectOptions):
    """Options of the commands that write a weight file."""

    target: Annotated[Path, argument("The .safetensors file to write.")]
    overwrite: Annotated[bool, flag("--overwrite", help="Replace an existing file.", panel=OUTPUT, brief=HELP)] = False


class ConvertOptions(WriteOptions):
    """Options of ``dpn checkpoint convert``."""

    to: Annotated[
        Literal["dpn", "timm"],
        flag(
            "--to",
            help="Layout to write: dpn, or timm if the stem and norms allow it.",
            panel=OUTPUT,
            brief="Layout to write: dpn or timm.",
        ),
    ] = "dpn"


class FoldOptions(Section):
    """Options of ``dpn checkpoint fold``."""

    source: Annotated[str, argument("A finished run's folder, or a weight file.")]
    target: Annotated[Path, argument("The .safetensors file to write.")]
    overwrite: Annotated[bool, flag("--overwrite", help="Replace an existing file.", panel=OUTPUT, brief=HELP)] = False
    facts: FileFacts = FileFacts()


class RetrofitOptions(WriteOptions):
    """Options of ``dpn checkpoint retrofit``."""

    stem: Annotated[Stem, STEM.replace(help="Stem to fit: pre, post, post_posemb, dpn or rms.")] = "dpn"
    data: Annotated[
        str,
        flag(
            "--data",
            help="Folder of images to fit the norms on, or demo.",
            panel=DATA,
            brief=HELP,
        ),
    ]
    images: Annotated[
        Annotated[int, Field(ge=4, le=100_000)],
        flag("--images", help="Number of images to sample.", panel=DATA),
    ] = 512
    seed: Annotated[Seed, flag("--seed", help="Seed of the sample.", panel=DATA)] = 0
    reading: ImageReading = ImageReading()
    batch_size: ForwardBatchSize = 32
    workers: Workers = "auto"


@register_command(app, "inspect", FileInspectOptions, "dpn checkpoint inspect B_32.npz --image-size 384", quiet=False)
def _inspect(options: FileInspectOptions, console: Console) -> Outcome:
    """Describe a weight file, and list what loading it would rename, resize, drop, add or assume.

    To plot what the network has learned, use 'dpn inspect'.
    """
    from dpn_cli.weights.convert import inspect

    return inspect(_open(options.source, options.facts), _pair(options.image_size)), _print_inspection


@register_command(
    app,
    "convert",
    ConvertOptions,
    "dpn checkpoint convert B_32.npz B_32-384.safetensors --image-size 384",
    quiet=False,
)
def _convert(options: ConvertOptions, console: Console) -> Outcome:
    """Convert a checkpoint to safetensors, and verify its outputs on random images."""
    _check_target(options.target, options.overwrite)
    from dpn_cli.weights.convert import convert

    checkpoint = _open(options.source, options.facts)
    result = convert(checkpoint, options.target, image_size=_pair(options.image_size), to=options.to)
    return result, lambda result: _print_conversion(result, checkpoint.source)


def _print_conversion(result: dict[str, Any], source: str) -> None:
    height, width = result["image_size"]
    show(
        f"{result['path']}: {result['layout']} layout, {result['parameters'] / 1e6:.2f} M parameters, {height}x{width} "
        f"pixels. Loaded again, it gives the outputs of {source} on {result['images']} random images "
        f"(largest difference {result['difference']:.1e}, relative)."
    )
    _print_lists(result["report"])


@register_command(app, "fold", FoldOptions, "dpn checkpoint fold runs/bn bn-folded.safetensors", quiet=False)
def _fold(options: FoldOptions, console: Console) -> Outcome:
    """Fold batch norms into the adjacent layers: a plain, faster ViT with the same outputs."""
    _check_target(options.target, options.overwrite)
    from dpn_cli.run.artifact_kinds import resolve
    from dpn_cli.weights.fold import fold_file

    source = _open(resolve(options.source, "dpn checkpoint fold"), options.facts)
    return (
        fold_file(source, options.target),
        lambda result: (
            f"{result['path']}: {len(result['folded'])} norms were folded; {result['before']} became "
            f"{result['after']}. Reloaded, it gives the outputs of {source.source} on {result['images']} random images "
            f"(largest difference {result['difference']:.1e}, relative)."
        ),
    )


@register_command(
    app,
    "retrofit",
    RetrofitOptions,
    "dpn checkpoint retrofit B_32.npz B_32-dpn.safetensors --data photos",
)
def _retrofit(options: RetrofitOptions, console: Console) -> Outcome:
    """Give a plain ViT a DPN stem that approximates its tokens, as a start for training."""
    _check_target(options.target, options.overwrite)
    from dpn_cli.run.artifact_kinds import resolve

    checkpoint = _open(resolve(options.source, "dpn checkpoint retrofit"), options.facts)
    import torch

    from dpn_cli.data.decode import ReadOptions
    from dpn_cli.data.image_source import find_images
    from dpn_cli.data.pixels import load
    from dpn_cli.run import signals
    from dpn_cli.weights.infer_config import infer_config
    from dpn_cli.weights.retrofit import retrofit

    size = _pair(options.image_size) or infer_config(checkpoint).image_size
    reading = ReadOptions(options.reading.decode, options.reading.max_pixels)
    split = find_images(options.data, options.images, options.seed, reading)
    with signals.listen(signals.NO_RESULT), console.counting("retrofit", len(split.labels)) as counted:
        pixels = load(split, size, workers=options.workers, on_progress=counted).images
    images = torch.split(pixels, options.batch_size)
    result = retrofit(checkpoint, options.target, lambda: iter(images), stem=options.stem, image_size=size)
    return (
        result,
        lambda result: (
            f"{result['path']}: stem {options.stem}, fitted on {result['patches']} patches of {len(pixels)} images "
            f"(mean contrast {result['contrast']:.3f}, mean brightness {result['brightness']:+.3f}).\n"
            f"Of the variance of the tokens of held-out images {result['survives']:.1%} survives "
            f"({result['survives_copied']:.1%} with norms of scale 1 and bias 0).\n"
            "This is a start for training, not an equal network"
            + (
                ": a norm on raw patches removes each patch's brightness and contrast, which the plain ViT uses."
                if options.stem in ("pre", "dpn")
                else "."
            )
            + " 'dpn distill' trains it to be nearer."
        ),
    )


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _check_target(target: Path, overwrite: bool) -> None:
    if target.suffix != ".safetensors":
        raise DpnError(f"{target}: dpn writes .safetensors; use {target.with_suffix('.safetensors')}")
    if target.exists() and not overwrite:
        raise DpnError(f"{target}: exists; pass --overwrite to replace it, or another name")


def _open(source: str, facts: FileFacts) -> Checkpoint:
    """Open a checkpoint with the facts that the user states. Raises `DpnError` for facts that cannot be."""
    from dpn_cli.weights.convert import Facts
    from dpn_cli.weights.locate import open_checkpoint

    explicit_facts = Facts(facts.eps, facts.act, facts.heads, _pair(facts.grid), facts.mean, facts.std)
    return explicit_facts.apply(open_checkpoint(source))


def _print_inspection(facts: dict[str, Any]) -> None:
    inputs = list(zip(facts["mean"], facts["std"], strict=True))
    low, high = ([round((edge - mean) / std, 3) for mean, std in inputs] for edge in (0, 1))
    is_shared = len(set(low)) == len(set(high)) == 1
    size = f"{facts['width']} wide, {facts['depth']} blocks, MLP {facts['mlp']}, {facts['heads']} heads"
    attention = "" if facts["attn_width"] == facts["width"] else f", attention {facts['attn_width']} wide"
    parts = [name for name in ("pre_logits", "pre_norm", "fc_norm") if facts[name]]
    parts += ["a class token next to it"] if facts["mean_beside_class_token"] else []
    parts += ["a distillation token"] if facts["distillation_token"] else []
    parts += [f"{facts['registers']} registers"] if facts["registers"] else []
    layers = [name for name, key in (("SwiGLU", "swiglu"), ("LayerScale", "layer_scale")) if facts[key]]
    table = Table(Column(), Column(overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = {
        "file": facts["source"],
        "format": facts["format"],
        "kind": facts["kind"],
        "sha256": facts["digest"] or "-",
        "size": f"{facts['arch'] or 'no standard size'} ({size}{attention})",
        "parameters": f"{facts['parameters'] / 1e6:.2f} M",
        "stem": facts["stem"],
        "patch, grid": f"{_format_pair(facts['patch'])} pixels, {_format_pair(facts['grid'])} patches, "
        f"{facts['posemb']} positions",
        "pool": facts["pool"] + (f", with {', '.join(parts)}" if parts else ""),
        "head": f"{facts['classes']} outputs" if facts["classes"] else "none",
        "norms": f"{_norms(facts)}, eps {facts['eps']:g}",
        "activation": ", ".join([*layers] if facts["swiglu"] else [facts["act"], *layers]),
        "inputs": f"{low[0]:g} to {high[0]:g}" if is_shared else f"mean {facts['mean']}, std {facts['std']}",
        "loaded at": f"{_format_pair(facts['image_size'])} pixels",
    }
    for name, value in rows.items():
        table.add_row(name, cell(value))
    RichConsole(highlight=False, soft_wrap=True).print(table)
    _print_lists(facts)


def _print_lists(report: dict[str, Any]) -> None:
    if report["renamed"]:
        first, *_, last = [f"{file_name} -> {new_name}" for file_name, new_name in report["renamed"].items()] * 2
        show(printable(f"renamed: {len(report['renamed'])} arrays, {first} ... {last}"))
    for name in ("resized", "dropped", "new", "assumed", "notes"):
        values = report[name]
        remainder = f" and {len(values) - 8} more (--json lists all)" if len(values) > 8 else ""
        if values:
            show(printable(f"{name}: {', '.join(values[:8])}{remainder}"))


def _norms(facts: dict[str, Any]) -> str:
    options = [f"{name} {value}" for name, value in facts["norm_options"].items()]
    return ", ".join([facts["norm"], f"placement {facts['placement']}", *options])


def _format_pair(pair: list[int]) -> str:
    return "x".join(map(str, pair))
