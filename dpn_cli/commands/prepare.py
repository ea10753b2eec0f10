"""`dpn data prepare`: data sets written in the layout that the trainings read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from pydantic import BeforeValidator, Field

from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.commands.trainers import VTAB_TASKS_FLAG, module_of
from dpn_cli.config.option import DATA, OUTPUT, argument, flag
from dpn_cli.config.schema import Section, split_list
from dpn_cli.errors import DataError
from dpn_cli.run.console import Console, count_noun

app = typer.Typer(
    no_args_is_help=True,
    help="Convert data sets to the layout that dpn reads.",
    epilog="Example: dpn data prepare vtab --out vtab-1k",
)


class VtabOptions(Section):
    """Options of ``dpn data prepare vtab``."""

    out: Annotated[Path, flag("--out", "-o", help="Folder to write the tasks to.", panel=OUTPUT)]
    tasks: Annotated[tuple[str, ...], BeforeValidator(split_list), Field(min_length=1), VTAB_TASKS_FLAG] = ("all",)
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
            help="Folder of manually downloaded files.",
            panel=DATA,
            unset="downloads/manual in --tfds-dir",
        ),
    ] = None
    download: Annotated[
        bool, flag("--download/--no-download", help="Download missing data sets to --tfds-dir.", panel=DATA)
    ] = True
    verify: Annotated[
        bool,
        flag("--verify/--no-verify", help="Verify existing tasks and rewrite damaged ones.", panel=OUTPUT),
    ] = False


@register_command(app, "vtab", VtabOptions, "dpn data prepare vtab --out vtab-1k --tasks natural")
def _vtab(options: VtabOptions, console: Console) -> Outcome:
    """Prepare the 19 tasks of VTAB-1k from TensorFlow Datasets without loss; run again to continue."""
    task = module_of("data prepare vtab")
    result, problem = task.run(
        options.tasks,
        options.out,
        options.tfds_dir,
        options.manual_dir,
        download=options.download,
        verified=options.verify,
        console=console,
    )
    states = list(result["tasks"].values())

    def describe(_: object) -> str:
        ready = len(states) - states.count("left")
        next_step = f"\ncheck them with: dpn data check vtab --data {options.out}" if ready else ""
        return f"{count_noun(ready, 'task')} in {options.out}, {states.count('written')} of them written now{next_step}"

    return result, describe, problem


class ArchiveOptions(Section):
    """Options of the commands that unpack archives."""

    archives: Annotated[list[Path], argument("Downloaded archives of the data set.")]
    out: Annotated[Path, flag("--out", "-o", help="Folder to unpack into.", panel=OUTPUT)]
    partial: Annotated[
        bool, flag("--partial/--whole", help="Accept an incomplete data set with a warning.", panel=DATA)
    ] = False


class ArchiveModule(Protocol):
    """Module of a task that knows a data set's archives; it loads numpy."""

    def verify_folder(self, out: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
        """Return the counts of the unpacked folder, and a line for each missing thing."""

    def next_step(self, out: Path) -> str:
        """Return the command that reads the folder."""


def _unpack(options: ArchiveOptions, layout: Any, module: ArchiveModule, console: Console) -> Outcome:
    from dpn_cli.data import archives
    from dpn_cli.run import signals
    from dpn_cli.run.files import claim

    out = options.out.expanduser()
    paths = [path.expanduser() for path in options.archives]
    with signals.listen(signals.PARTS_KEPT), claim(out):
        files = archives.unpack(paths, layout, out, console)
        counts, missing = module.verify_folder(out, console)
    missing = [*archives.describe_missing(layout, out), *missing]
    for text in missing if options.partial else ():
        console.warn(text)
    result = {"task": f"data prepare {layout.name}", "out": str(out), "files": files, **counts, "short": missing}

    def describe(_: object) -> str:
        written, existing, left_out = (files[key] for key in ("written", "kept", "left_out"))
        return f"{out}: {written} files written, {existing} kept, {left_out} left out\n{module.next_step(out)}"

    problem = DataError(f"{'; '.join(missing)}; unpack the rest into the same folder, or accept this with --partial")
    return result, describe, problem if missing and not options.partial else None


@register_command(
    app, "ade20k", ArchiveOptions, "dpn data prepare ade20k ADEChallengeData2016.zip --out ADEChallengeData2016"
)
def _ade20k(options: ArchiveOptions, console: Console) -> Outcome:
    """Prepare ADE20K for 'dpn segment ade20k' from ADEChallengeData2016.zip; run again to continue."""
    task = module_of("data prepare ade20k")
    return _unpack(options, task.ADE20K, task, console)


@register_command(
    app,
    "coco",
    ArchiveOptions,
    "dpn data prepare coco train2017.zip val2017.zip annotations_trainval2017.zip --out coco",
)
def _coco(options: ArchiveOptions, console: Console) -> Outcome:
    """Prepare COCO captions for 'dpn lit train' from the 2017 archives; run again to continue."""
    task = module_of("data prepare coco")
    return _unpack(options, task.COCO, task, console)
