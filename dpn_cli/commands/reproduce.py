"""`dpn reproduce`: lists the paper's tables and figures with their cost, runs their trials and shows the numbers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.arch import did_you_mean
from dpn_cli.commands import one_line_errors
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import PRINTING, SET, option, switch, with_signature
from dpn_cli.commands.train import PROCESS_OPTIONS, process_options
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.option import DATA, MODEL, OUTPUT, TRAIN
from dpn_cli.config.paths import find_weights
from dpn_cli.errors import DataError, DpnError, SweepError
from dpn_cli.report.tables import format_cell
from dpn_cli.reproduce.experiment import Experiment, Locations, PaperTrial, parse_locations
from dpn_cli.reproduce.paper import EXPERIMENTS
from dpn_cli.reproduce.trainings import DATA_SETS, SCENES, SmallTrainings, Trainings, select_real_data
from dpn_cli.run.console import Console, cell, count_noun, show
from dpn_cli.run.files import replace_json

if TYPE_CHECKING:
    from dpn_cli.reproduce.page import PaperComparison
    from dpn_cli.reproduce.run import UnfinishedTrials

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
        locations = _locations(experiments, arguments)
        if arguments["plan"]:
            trials = _trials(experiments, locations)
            lines = [
                shlex.join(["dpn", *trial.line(locations)]) for trial in trials if not locations.is_finished(trial)
            ]
            show(json.dumps(lines, indent=2) if arguments["json"] else "\n".join(lines) or "nothing is left to train")
        elif not names:
            from dpn_cli.reproduce.plan import describe_experiments, print_list  # torch loads here

            rows = describe_experiments(experiments, locations)
            show(json.dumps(rows, indent=2)) if arguments["json"] else print_list(rows, locations, make)
        else:
            _reproduce(
                experiments,
                locations,
                make,
                console,
                launch=LaunchOptions(**process_options(arguments)),
                as_json=arguments["json"],
            )


def _experiment(name: str, make: Trainings, seeds: int | None) -> Experiment:
    if name not in EXPERIMENTS:
        raise DpnError(f"{name!r}: choose one of {', '.join(EXPERIMENTS)}{did_you_mean(name, EXPERIMENTS)}")
    build, default_seeds = EXPERIMENTS[name]
    return build(make, range(min(default_seeds, 3) if seeds is None and make.small else seeds or default_seeds))


def _trials(experiments: Sequence[Experiment], locations: Locations) -> list[PaperTrial]:
    """Return the trials of experiments, each once, without those whose networks are here."""
    trials = {trial.name: trial for experiment in experiments for trial in experiment.trials(locations.weights)}
    return list(trials.values())


def _locations(experiments: Sequence[Experiment], arguments: Mapping[str, Any]) -> Locations:
    out = arguments["output_dir"] or (SMALL_OUT if arguments["small"] else OUT)
    data = parse_locations(arguments["data"] or (), "--data", tuple(DATA_SETS), "imagenet=/data/imagenet")
    groups = {group: trial for experiment in experiments for group, trial in experiment.networks().items()}
    weights = {}
    for group, trial in groups.items():
        arch, stem = trial.network or (None, "")
        if not arguments["small"] and (checkpoints := find_weights(arch, [stem])):
            weights[group] = checkpoints
    weights |= parse_locations(arguments["weights"] or (), "--weights", tuple(groups), "imagenet/B-32-dpn=B-32-dpn.npz")
    settings = tuple(word for setting in arguments["set"] or () for word in ("--set", setting))
    return Locations(out, {**select_real_data(), **data, SCENES: str(out / SCENES)}, weights, settings)


def _reproduce(
    experiments: Sequence[Experiment],
    locations: Locations,
    make: Trainings,
    console: Console,
    *,
    launch: LaunchOptions,
    as_json: bool,
) -> None:
    from dpn_cli.reproduce.page import compare
    from dpn_cli.reproduce.run import run  # torch loads here
    from dpn_cli.run import signals
    from dpn_cli.run.distributed import join
    from dpn_cli.run.files import make_folder

    make_folder(locations.out)
    with signals.listen("run the same command again to go on"), join("auto") as world:
        unfinished = run(_trials(experiments, locations), locations, world, console, launch)
        if not world.leads:
            return
    one_rank, results = world.size == 1, []
    for experiment in experiments:
        compared = compare(experiment, locations)
        pages = _write(experiment, compared, locations, make, console, one_rank=one_rank)
        result = {
            "experiment": experiment.name,
            "title": experiment.title,
            "unit": experiment.unit,
            "small": make.small,
            "numbers": [comparison.to_dict() for comparison in compared],
            "pages": [str(page) for page in pages],
        }
        if pages:
            replace_json(locations.out / experiment.name / "result.json", result)
        results.append(result)
        if not as_json:
            _print(experiment, compared, make, pages)
    if as_json:
        show(json.dumps({"experiments": results, "failed": unfinished.failed, "waiting": unfinished.waiting}, indent=2))
    _raise_unfinished(unfinished)


def _write(
    experiment: Experiment,
    compared: Sequence[PaperComparison],
    locations: Locations,
    make: Trainings,
    console: Console,
    *,
    one_rank: bool,
) -> list[Path]:
    """Write the pages of an experiment, as far as its trainings are finished, and return their paths.

    Networks are inspected only where there is `one_rank`: the others have left.
    """
    from dpn_cli.commands.inspect import InspectOptions, inspect
    from dpn_cli.commands.report import ReportOptions, report
    from dpn_cli.reproduce.page import heading, write

    folder = locations.out / experiment.name
    title, pages = heading(experiment, make.small), list[Path]()
    if any(comparison.our_summary for comparison in compared):
        pages.append(write(folder, experiment, compared, make.small))
    for drawing in experiment.drawings:
        page_folder = folder / drawing.name
        trials = drawing.ready(locations)
        if drawing.page_kind == "report" and trials:
            options = ReportOptions(runs=[locations.out / trial.name for trial in trials], output_dir=page_folder)
            page = report(options, console, title=title)
            pages.append(Path(page["page"]))
        elif trials and not one_rank:
            console.info(f"{experiment.name}: run the same command again in one process for its page")
        elif trials:
            options_of_page = InspectOptions(checkpoint=locations.weights_of(trials[0]), output_dir=page_folder)
            page = inspect(options_of_page, console, title)
            pages.append(page_folder / page["page"])
    return pages


def _print(experiment: Experiment, compared: Sequence[PaperComparison], make: Trainings, pages: Sequence[Path]) -> None:
    from dpn_cli.reproduce.page import NOTE, heading, table_of

    console = RichConsole(highlight=False)
    if compared:
        content = table_of(experiment, compared, make.small)
        texts, numbers = content.columns[:2], content.columns[2:]
        columns = [Column(name, overflow="fold") for name in texts]
        columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
        table = Table(*columns, box=box.SIMPLE_HEAD, title=cell(content.title), title_justify="left")
        for row in content.rows:
            table.add_row(*(cell(format_cell(value, content.digits) or "-") for value in row))
        console.print(table)
        console.print(NOTE)
    else:
        console.print(cell(heading(experiment, make.small)))
    for page in pages:
        console.print(cell(f"{page}: open it in a browser"), soft_wrap=True)


def _raise_unfinished(unfinished: UnfinishedTrials) -> None:
    """Raise `SweepError` for trainings that failed, `DataError` for those that wait for something missing."""
    if unfinished.failed:
        lines = "; ".join(f"{name}: {reason}" for name, reason in unfinished.failed.items())
        raise SweepError(
            f"{count_noun(len(unfinished.failed), 'training')} failed ({lines}); run the same command to try again"
        )
    if unfinished.waiting:
        reasons = "; ".join(dict.fromkeys(unfinished.waiting.values()))
        raise DataError(
            f"{count_noun(len(unfinished.waiting), 'training')} not begun ({reasons}); "
            "'dpn reproduce' says what is looked for"
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
        brief="Where a data set is; repeatable.",
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
        brief="A network that needs no pre-training; repeatable.",
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
        brief="Trainings of each network.",
    ),
    SET,
    *PROCESS_OPTIONS,
    switch(
        "small",
        "--small",
        help="Everything at the size of the demo, in minutes: not the paper's numbers.",
        brief="Everything at the size of the demo.",
    ),
    switch(
        "plan",
        "--plan",
        help="Print the commands of the trainings that are not done, and stop.",
        brief="Print the commands of what is left, and stop.",
    ),
    option(
        "output_dir",
        Path | None,
        None,
        "--output-dir",
        "-o",
        help=f"Folder of all trainings and pages. \\[default: {OUT}; with --small {SMALL_OUT}]",
        panel=OUTPUT,
        brief="Folder of all trainings and pages.",
    ),
)


def add_to(root: typer.Typer) -> None:
    """Add ``reproduce`` to the root of all commands."""
    from inspect import Parameter

    names = Parameter("names", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, NAMES])
    root.command("reproduce", cls=OneScreenCommand, epilog="Example: dpn reproduce table6 --small")(
        with_signature(reproduce, [names, *OPTIONS, *PRINTING])
    )
