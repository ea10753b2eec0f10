"""The command line: options to recipe to task. The only module that imports tasks; torch loads with the task."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole
from rich.table import Table

from dpn_cli import __version__, options, recipe
from dpn_cli.console import Console
from dpn_cli.errors import DpnError, SweepError
from tasks.vtab import recipe as vtab_recipe
from tasks.vtab.table import task_names

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune Dual PatchNorm Vision Transformers (arXiv 2302.01327) and their rivals.",
    epilog="Example: dpn finetune vtab --arch B/32",
)
finetune = typer.Typer(
    no_args_is_help=True,
    help="Fine-tune the whole network on labelled images.",
    epilog="Example: dpn finetune vtab --data demo --compare none,dpn",
)
recipes = typer.Typer(
    help="List the shipped recipes, or show one.", invoke_without_command=True, epilog="Example: dpn recipes show vtab"
)
app.add_typer(finetune, name="finetune")
app.add_typer(recipes, name="recipes")


def main() -> None:
    """Run the command line; the entry point of ``dpn``."""
    app()


@contextmanager
def _one_line_errors(debug: bool = False) -> Iterator[None]:
    """Print a `DpnError` as one line and exit with its code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except DpnError as error:
        if debug:
            traceback.print_exc()
        RichConsole(stderr=True, soft_wrap=True, highlight=False).print("[bold red]error:[/]", end=" ")
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted at once: the state since the last checkpoint is lost", file=sys.stderr)
        raise typer.Exit(130) from None


def _version(asked: bool) -> None:
    if asked:
        print(f"dpn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@recipes.callback()
def _list_recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        table = Table("recipe", "paper", "table", "expected", box=None, padding=(0, 2, 0, 0))
        for name in recipe.shipped_recipes():
            about = recipe.read_recipe(name)["about"]
            table.add_row(name, about["paper"], about["table"], about["expected"])
        RichConsole(highlight=False).print(table)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in recipe.shipped_recipes() if name.startswith(incomplete)]


@recipes.command(epilog="Example: dpn recipes show vtab")
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a shipped recipe, or a YAML file.", autocompletion=_complete_recipe)
    ],
) -> None:
    """Print a recipe with every key resolved."""
    with _one_line_errors():
        plain = recipe.read_recipe(name)
        print(recipe.dump(recipe.build(vtab_recipe.VtabRecipe, plain, name)), end="")


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


@finetune.command(epilog="Example: dpn finetune vtab --arch B/32 --checkpoint B-32-dpn.npz --data vtab-1k")
def vtab(
    arch: options.Arch = None,
    stem: options.StemOption = None,
    checkpoint: options.Checkpoint = None,
    image_size: options.ImageSize = None,
    compare: CompareOption = None,
    data: DataOption = None,
    tasks: TasksOption = None,
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
    flags = recipe.from_flags(
        {
            "backbone.arch": arch,
            "backbone.stem": stem,
            "backbone.checkpoint": checkpoint,
            "backbone.image_size": image_size,
            "compare": compare,
            "data.source": data,
            "data.tasks": tasks,
            "data.skip_bad_images": skip_bad_images,
            "protocol": protocol,
            "lrs": lrs,
            "seeds": seeds,
            "schedule.steps": steps,
            "batch_size": batch_size,
            "runtime.precision": precision,
            "runtime.compile": compile,
            "runtime.micro_batch_size": micro_batch_size,
            "runtime.device": device,
            "runtime.workers": workers,
            "runtime.report_to": report_to,
        }
    )
    console = Console(quiet=quiet)
    with _one_line_errors(verbose):
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
