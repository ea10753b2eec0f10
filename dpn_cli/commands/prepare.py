"""`dpn data prepare`: data sets written in the layout that the trainings read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BeforeValidator, Field

from dpn_cli.commands.action import Outcome, action
from dpn_cli.recipe.flag import DATA, OUTPUT, flag
from dpn_cli.recipe.schema import Section, listed
from dpn_cli.run.console import Console, several
from tasks.vtab.recipe import TASKS_FLAG

app = typer.Typer(
    no_args_is_help=True,
    help="Write data sets in the layout that the trainings read.",
    epilog="Example: dpn data prepare vtab --out vtab-1k",
)


class VtabOptions(Section):
    """Options of ``dpn data prepare vtab``."""

    out: Annotated[Path, flag("--out", "-o", help="Folder for the tasks' folders.", panel=OUTPUT)]
    tasks: Annotated[tuple[str, ...], BeforeValidator(listed), Field(min_length=1), TASKS_FLAG] = ("all",)
    tfds_dir: Annotated[
        Path | None,
        flag(
            "--tfds-dir",
            help="Folder of TensorFlow Datasets.",
            panel=DATA,
            unset="$TFDS_DATA_DIR, else ~/tensorflow_datasets",
        ),
    ] = None
    manual_dir: Annotated[
        Path | None,
        flag(
            "--manual-dir",
            help="Folder of files fetched by hand.",
            panel=DATA,
            unset="downloads/manual in --tfds-dir",
        ),
    ] = None
    download: Annotated[
        bool, flag("--download/--no-download", help="Download what --tfds-dir does not hold.", panel=DATA)
    ] = True
    verify: Annotated[
        bool,
        flag("--verify/--no-verify", help="Read tasks that are there, and write damaged ones again.", panel=OUTPUT),
    ] = False


@action(app, "vtab", VtabOptions, "dpn data prepare vtab --out vtab-1k --tasks natural")
def _vtab(options: VtabOptions, console: Console) -> Outcome:
    """The 19 tasks of VTAB-1k from TensorFlow Datasets, without loss; run it again after a stop."""
    from tasks.vtab.prepare import command
    from tasks.vtab.prepare.builders import USUAL

    result, problem = command.run(
        options.tasks,
        options.out,
        options.tfds_dir or USUAL,
        options.manual_dir,
        download=options.download,
        verified=options.verify,
        console=console,
    )
    states = list(result["tasks"].values())

    def tell(_: object) -> str:
        ready = len(states) - states.count("left")
        return (
            f"{several(ready, 'task')} in {options.out}: {states.count('written')} written now\n"
            f"check it with: dpn data check vtab --data {options.out}"
        )

    return result, tell, problem
