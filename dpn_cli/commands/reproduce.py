"""`dpn reproduce`: what the tables and figures of the paper need and cost, their trainings, and ours beside theirs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.arch import did_you_mean
from dpn_cli.commands import one_line_errors
from dpn_cli.commands.options import PRINTING, SET, option, switch, with_signature
from dpn_cli.commands.train import PROCESS_OPTIONS, process_options
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.option import DATA, MODEL, OUTPUT, TRAIN
from dpn_cli.config.paths import find_weights
from dpn_cli.errors import DataError, DpnError, SweepError
from dpn_cli.report.tables import format_cell as printed
from dpn_cli.reproduce import figures, tables
from dpn_cli.reproduce.cells import Experiment, PaperTrial, Places, named_places
from dpn_cli.reproduce.trainings import DATA_SETS, SCENES, SmallTrainings, Trainings, data_here
from dpn_cli.run.console import Console, cell, count_noun, show
from dpn_cli.run.files import replace_json

if TYPE_CHECKING:
    from dpn_cli.reproduce.compare import PaperComparison
    from dpn_cli.reproduce.run import FailedRuns

Make = Callable[[Trainings, Sequence[int]], Experiment]
EXPERIMENTS: Mapping[str, tuple[Make, int]] = {
    "table1": (tables.table1, 3),
    "table2": (tables.table2, 3),
    "table3": (tables.table3, 3),
    "table4": (tables.table4, 3),
    "table5": (tables.table5, 10),
    "table6": (tables.table6, 3),
    "table7": (tables.table7, 1),
    "fig1": (figures.fig1, 3),
    "fig2": (figures.fig2, 1),
    "fig3": (figures.fig3, 1),
    "fig4": (figures.fig4, 1),
    "dtn-table": (figures.dtn_table, 1),
}
OUT, SMALL_OUT = Path("runs/paper"), Path("runs/paper_small")
Json = dict[str, Any]


def reproduce(**arguments: Any) -> None:
    """List the paper's tables and figures with their cost, or reproduce one.

    Trainings are those of the ordinary commands; tables share them, and a second call goes on where one was stopped.
    """
    with one_line_errors(arguments):
        console = Console(quiet=arguments["quiet"])
        names = arguments["names"] or []
        make = SmallTrainings() if arguments["small"] else Trainings()
        experiments = [_experiment(name, make, arguments["seeds"]) for name in names or EXPERIMENTS]
        places = _places(experiments, arguments)
        if arguments["plan"]:
            jobs = _jobs(experiments, places)
            lines = [shlex.join(["dpn", *job.line(places)]) for job in jobs if not places.done(job)]
            show(json.dumps(lines, indent=2) if arguments["json"] else "\n".join(lines) or "nothing is left to train")
        elif not names:
            from dpn_cli.reproduce.listing import describe_experiments, print_list  # torch loads here

            rows = describe_experiments(experiments, places)
            show(json.dumps(rows, indent=2)) if arguments["json"] else print_list(rows, places, make)
        else:
            _reproduce(
                experiments,
                places,
                make,
                console,
                how=LaunchOptions(**process_options(arguments)),
                as_json=arguments["json"],
            )


def _experiment(name: str, make: Trainings, seeds: int | None) -> Experiment:
    if name not in EXPERIMENTS:
        raise DpnError(f"{name!r}: choose one of {', '.join(EXPERIMENTS)}{did_you_mean(name, EXPERIMENTS)}")
    function, usual = EXPERIMENTS[name]
    return function(make, range(min(usual, 3) if seeds is None and make.small else seeds or usual))


def _jobs(experiments: Sequence[Experiment], places: Places) -> list[PaperTrial]:
    """Return the jobs of experiments, each once, without those whose networks are here."""
    jobs = {job.name: job for experiment in experiments for job in experiment.jobs(places.weights)}
    return list(jobs.values())


def _places(experiments: Sequence[Experiment], arguments: Mapping[str, Any]) -> Places:
    out = arguments["output_dir"] or (SMALL_OUT if arguments["small"] else OUT)
    data = named_places(arguments["data"] or (), "--data", tuple(DATA_SETS), "imagenet=/data/imagenet")
    groups = {group: job for experiment in experiments for group, job in experiment.networks().items()}
    weights = {}
    for group, job in groups.items():
        arch, stem = job.network or (None, "")
        if not arguments["small"] and (found := find_weights(arch, [stem])):
            weights[group] = found
    weights |= named_places(arguments["weights"] or (), "--weights", tuple(groups), "imagenet/B-32-dpn=B-32-dpn.npz")
    settings = tuple(word for setting in arguments["set"] or () for word in ("--set", setting))
    return Places(out, {**data_here(), **data, SCENES: str(out / SCENES)}, weights, settings)


def _reproduce(
    experiments: Sequence[Experiment],
    places: Places,
    make: Trainings,
    console: Console,
    *,
    how: LaunchOptions,
    as_json: bool,
) -> None:
    from dpn_cli.reproduce.compare import compare
    from dpn_cli.reproduce.run import run  # torch loads here
    from dpn_cli.run import signals
    from dpn_cli.run.distributed import join
    from dpn_cli.run.files import make_folder

    make_folder(places.out)
    with signals.listen("run the same command again to go on"), join("auto") as world:
        ran = run(_jobs(experiments, places), places, world, console, how)
        if not world.leads:
            return
    alone, results = world.size == 1, []
    for experiment in experiments:
        compared = compare(experiment, places)
        pages = _write(experiment, compared, places, make, console, alone=alone)
        result = {
            "experiment": experiment.name,
            "title": experiment.title,
            "unit": experiment.unit,
            "small": make.small,
            "numbers": [one.to_dict() for one in compared],
            "pages": [str(page) for page in pages],
        }
        if pages:
            replace_json(places.out / experiment.name / "result.json", result)
        results.append(result)
        if not as_json:
            _print(experiment, compared, make, pages)
    if as_json:
        show(json.dumps({"experiments": results, "failed": ran.failed, "waiting": ran.waiting}, indent=2))
    _conclude(ran)


def _write(
    experiment: Experiment,
    compared: Sequence[PaperComparison],
    places: Places,
    make: Trainings,
    console: Console,
    *,
    alone: bool,
) -> list[Path]:
    """Write the pages of an experiment, as far as its trainings are done, and return their paths.

    Networks are looked into only by a process that is `alone`: the other ranks have left.
    """
    from dpn_cli.commands.inspect import InspectOptions, inspect
    from dpn_cli.commands.report import ReportOptions, report
    from dpn_cli.reproduce.page import heading, write

    folder = places.out / experiment.name
    title, pages = heading(experiment, make.small), list[Path]()
    if any(one.ours for one in compared):
        pages.append(write(folder, experiment, compared, make.small))
    for drawing in experiment.drawings:
        page = folder / drawing.name
        done = drawing.ready(places)
        if drawing.by == "report" and done:
            shown = ReportOptions(runs=[places.out / job.name for job in done], output_dir=page)
            made = report(shown, console, title=title)
            pages.append(Path(made["page"]))
        elif done and not alone:
            console.info(f"{experiment.name}: run the same command again in one process for its page")
        elif done:
            made = inspect(InspectOptions(checkpoint=places.weights_of(done[0]), output_dir=page), console, title)
            pages.append(page / made["page"])
    return pages


def _print(experiment: Experiment, compared: Sequence[PaperComparison], make: Trainings, pages: Sequence[Path]) -> None:
    from dpn_cli.reproduce.page import NOTE, heading, table_of

    console = RichConsole(highlight=False)
    if compared:
        whole = table_of(experiment, compared, make.small)
        texts, numbers = whole.columns[:2], whole.columns[2:]
        columns = [Column(name, overflow="fold") for name in texts]
        columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
        table = Table(*columns, box=box.SIMPLE_HEAD, title=cell(whole.title), title_justify="left")
        for row in whole.rows:
            table.add_row(*(cell(printed(value, whole.digits) or "-") for value in row))
        console.print(table)
        console.print(NOTE)
    else:
        console.print(cell(heading(experiment, make.small)))
    for page in pages:
        console.print(cell(f"{page}: open it in a browser"), soft_wrap=True)


def _conclude(ran: FailedRuns) -> None:
    """Raise `SweepError` for trainings that failed, `DataError` for those that wait for something that is not here."""
    if ran.failed:
        lines = "; ".join(f"{name}: {reason}" for name, reason in ran.failed.items())
        raise SweepError(
            f"{count_noun(len(ran.failed), 'training')} failed ({lines}); run the same command to try again"
        )
    if ran.waiting:
        reasons = "; ".join(dict.fromkeys(ran.waiting.values()))
        raise DataError(
            f"{count_noun(len(ran.waiting), 'training')} not begun ({reasons}); 'dpn reproduce' says what is looked for"
        )


NAMES = typer.Argument(
    metavar=f"[{'|'.join(EXPERIMENTS)}]...",
    help="Tables and figures. \\[default: list all with what they need and cost]",
    show_default=False,
)
OPTIONS = (
    option(
        "data",
        list[str] | None,
        None,
        "--data",
        metavar="NAME=PLACE",
        help=f"Where a data set is: {', '.join(DATA_SETS)}; may be repeated. \\[default: $DPN_DATA_DIR/NAME, ./NAME]",
        panel=DATA,
    ),
    option(
        "weights",
        list[str] | None,
        None,
        "--weights",
        metavar="GROUP=FILE",
        help="A network that needs no pre-training, e.g. imagenet/B-32-dpn=B-32-dpn.npz; may be repeated. "
        "\\[default: of imagenet ARCH-STEM.safetensors in $DPN_HOME/weights]",
        panel=MODEL,
    ),
    option(
        "seeds",
        int | None,
        None,
        "--seeds",
        min=1,
        max=100,
        help="Trainings of each network. \\[default: the paper's number, 3 (Table 5: 10); with --small at most 3]",
        panel=TRAIN,
    ),
    SET,
    *PROCESS_OPTIONS,
    switch("small", "--small", help="Everything at the size of the demo, in minutes: not the paper's numbers."),
    switch("plan", "--plan", help="Print the commands of the trainings that are not done, and stop."),
    option(
        "output_dir",
        Path | None,
        None,
        "--output-dir",
        "-o",
        help=f"Folder of all trainings and pages. \\[default: {OUT}; with --small {SMALL_OUT}]",
        panel=OUTPUT,
    ),
)


def add_to(root: typer.Typer) -> None:
    """Add ``reproduce`` to the root of all commands."""
    from inspect import Parameter

    names = Parameter("names", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, NAMES])
    root.command("reproduce", epilog="Example: dpn reproduce table6 --small")(
        with_signature(reproduce, [names, *OPTIONS, *PRINTING])
    )
