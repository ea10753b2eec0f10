"""`dpn finetune vtab`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole

from dpn_cli import options, recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.commands import options_pictures as pictures
from dpn_cli.commands.keys import recipe_flags
from dpn_cli.console import Console
from dpn_cli.errors import SweepError
from tasks.vtab import recipe as vtab_recipe
from tasks.vtab.table import task_names


def _complete_task(incomplete: str) -> list[str]:
    done, _, word = incomplete.rpartition(",")
    return [f"{done},{name}".lstrip(",") for name in task_names() if name.startswith(word)]


DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Folder with one folder per task (svhn/train800.txt, …), hf:OWNER/NAME, or demo. "
        "\\[default: $DPN_DATA_DIR/vtab-1k, ./vtab-1k, else demo]",
        rich_help_panel=options.DATA,
        show_default=False,
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        help="all, natural, specialized, structured, or task names, comma separated. \\[default: all]",
        autocompletion=_complete_task,
        rich_help_panel=options.DATA,
        show_default=False,
    ),
]
ProtocolOption = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="paper: score the runs on train800; vtab: train again on train800val200. \\[default: paper]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        "--compare",
        help="Run several stems under the same protocol, e.g. none,dpn, and print the paired difference.",
        rich_help_panel=options.MODEL,
        show_default=False,
    ),
]


def vtab(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: options.ImageSize = None,
    compare: CompareOption = None,
    data: DataOption = None,
    tasks: TasksOption = None,
    decode: pictures.Decode = None,
    max_pixels: pictures.MaxPixels = None,
    skip_bad_images: options.SkipBadImages = None,
    protocol: ProtocolOption = None,
    lrs: options.Lrs = None,
    seeds: options.Seeds = None,
    steps: options.Steps = None,
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
    """VTAB-1k: 19 tasks of 1000 images, three learning rates chosen on 200, three seeds (Table 3)."""
    flags = recipe.from_flags(recipe_flags(locals()))
    console = Console(quiet=quiet)
    with one_line_errors(verbose):
        plain = vtab_recipe.resolve(config, flags, recipe.from_settings(settings or []))
        built = recipe.build(vtab_recipe.VtabRecipe, plain, "recipe")
        if print_config:
            print(recipe.dump(built), end="")
            return
        built = vtab_recipe.settle(built)
        from tasks.vtab.command import start  # torch loads here

        result = start(built, output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console)
        _print_vtab(result, as_json)


def _print_vtab(result: dict[str, Any] | None, as_json: bool) -> None:
    """Print a result to stdout; raises `SweepError` after it when cells failed."""
    if result is None:
        return
    from tasks.vtab.report import print_result

    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result, RichConsole(highlight=False))
    failed = [line for part in result.get("compare", {}).get("stems", {"": result}).values() for line in part["failed"]]
    if failed:
        raise SweepError(
            f"{len(failed)} cells failed and are listed above; the others are kept: run the same command "
            "with --resume to try the failed ones again"
        )
