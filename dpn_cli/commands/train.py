"""Run a training from the command line: resolve the config, print it or train, show the result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import typer

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.estimate import show_costs
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import CONFIG_OPTIONS, PRINTING, option, switch, with_signature
from dpn_cli.commands.report import write_final_page
from dpn_cli.commands.train_command import SupportsTrials, TrainCommand, TrainingModule
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import NO_PAGE, OVERWRITE, RESUME, LaunchOptions
from dpn_cli.config.load import dump, from_settings
from dpn_cli.config.option import RUNTIME
from dpn_cli.errors import DpnError, SweepError
from dpn_cli.run.console import Console, count_noun, show
from dpn_cli.sweep.grid import CompareConfig, SweepConfig


def add_command(app: typer.Typer, name: str, training: TrainCommand) -> None:
    """Add the command of a training to a Typer app."""

    def command(**arguments: Any) -> None:
        console = Console(quiet=arguments["quiet"])
        with one_line_errors(arguments), console.capture_logs():
            config = training.layers(arguments, console.info)
            if arguments["print_config"]:
                print(dump(config), end="")
                return
            training.check_locations(config)
            if isinstance(config, CompareConfig) and (warning := config.unused_checkpoint_warning()):
                console.warn(warning)
            options = _launch_options(config, arguments)
            config, trainer = load_trainer(training, config, console, dry_run=arguments["dry_run"])
            if arguments.get("list_trials"):
                for number, name in enumerate(cast(SupportsTrials, trainer).trial_names(config)):
                    print(f"{number}\t{name}")
                return
            explicit_keys = training.explicit_keys(arguments)
            folders, costs = list[Path](), list[Cost]()
            launch = LaunchOptions(
                arguments["output_dir"],
                **options,
                on_open=folders.append,
                on_cost=costs.append,
                explicit_keys=explicit_keys,
            )
            result = trainer.run(config, launch, console)
            show_costs(costs, folders[0], console, as_json=arguments["json"])
            if result is None:
                return
            if arguments["json"]:
                show(json.dumps(result, indent=2))
            else:
                trainer.show(result)
            if not arguments["no_report"]:
                write_final_page(folders[0], console)
            if problem := sweep_error(training.failures(result), "trainings"):
                raise problem

    command.__doc__ = training.help
    shared = SHARED_OPTIONS if issubclass(training.schema, CompareConfig) else ()
    parameters = [*training.extra, *training.parameters(), *shared, *OUTPUT_OPTIONS]
    app.command(name, cls=OneScreenCommand, epilog=f"Example: {training.example}")(with_signature(command, parameters))


def _launch_options(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `LaunchOptions`.

    Raises `DpnError` for several processes where there is only one training.
    """
    fields = {key: arguments[key] for key in ("resume", "overwrite", "dry_run")}
    if "jobs" not in arguments:
        return fields
    processes, trial = process_options(arguments), arguments["trial"]
    launch = LaunchOptions(**processes)
    starts = launch.processes if launch.engine == "local" else f"--engine {launch.engine}"
    is_given = {starts: launch.starts_processes, f"--trial {trial}": trial is not None}
    is_given["--list-trials"] = arguments["list_trials"]
    given_options = [option for option, is_explicit in is_given.items() if is_explicit]
    if given_options and not getattr(config, "is_sweep", True):
        raise DpnError(f"{given_options[0]}: this is one training; --compare and --seeds make several")
    if len(given_options) > 1:
        raise DpnError(f"{' '.join(given_options)}: each says who does the work; pass one of them")
    return fields | processes | {"trial": trial}


def process_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `LaunchOptions` that are `PROCESS_OPTIONS`. Raises `DpnError`."""
    resources = from_settings(arguments["resources"] or [], "--resources", "num_gpus=1")
    fields = {"jobs": arguments["jobs"], "engine": arguments["engine"], "resources": tuple(resources.items())}
    if (per_gpu := arguments["jobs_per_gpu"]) is None:
        return fields
    if per_gpu != "auto" and not re.fullmatch("[1-9][0-9]?", per_gpu):
        raise DpnError(f"--jobs-per-gpu {per_gpu}: a number from 1 to 99, or auto")
    fields["jobs_per_gpu"] = per_gpu if per_gpu == "auto" else int(per_gpu)
    from dpn_cli.sweep.engines.select import check_sharing  # torch loads here

    check_sharing(LaunchOptions(**fields))
    return fields


def sweep_error(failed: Sequence[str], noun: str) -> SweepError | None:
    """Return the error of a run with failed trials; None if none has failed."""
    if not failed:
        return None
    return SweepError(
        f"{count_noun(len(failed), noun.removesuffix('s'))} failed, as listed above; the others are kept: run the same "
        "command with --resume to try again what failed"
    )


def load_trainer(
    training: TrainCommand, config: Any, console: Console, *, dry_run: bool = False
) -> tuple[Any, TrainingModule]:
    """Return the final config and the module that trains by it; for a sweep the runner, which finalizes each config."""
    if isinstance(config, SweepConfig) and config.is_sweep:
        from dpn_cli.sweep.runner import SweepRunner, SweepTrainer  # torch loads here

        command = next(words for words, train_command in TRAIN_COMMANDS.items() if train_command is training)
        trainer = cast(SweepTrainer, import_module(training.module))
        return config, SweepRunner(command, trainer, training.finalize, training.scores)
    config = training.finalize(config, console, dry_run)
    return config, cast(TrainingModule, import_module(training.module))  # torch loads here, too


PROCESS_OPTIONS = (
    option(
        "jobs",
        int | None,
        None,
        "--jobs",
        min=1,
        max=1024,
        help="Number of concurrent trainings, each in a process; they share the cores and GPUs. \\[default: 1; with "
        "--jobs-per-gpu as many as the GPUs have room for]",
        panel=RUNTIME,
    ),
    option(
        "jobs_per_gpu",
        str | None,
        None,
        "--jobs-per-gpu",
        metavar="N|auto",
        help="Number of concurrent trainings per GPU, each with an equal part of its memory; auto runs as many as "
        "fit. \\[default: as --jobs needs]",
        panel=RUNTIME,
    ),
    option(
        "engine",
        Literal["local", "ray", "slurm"],
        "local",
        "--engine",
        help="Where to run the --jobs: on this machine, a Ray cluster or SLURM. \\[default: local]",
        panel=RUNTIME,
    ),
    option(
        "resources",
        list[str] | None,
        None,
        "--resources",
        metavar="KEY=VALUE",
        help="Resources of each job in the engine's terms, e.g. num_gpus=1 (Ray) or timeout_min=240 (submitit); "
        "repeatable. \\[default: num_gpus=1 where Ray has GPUs, timeout_min=1440]",
        panel=RUNTIME,
    ),
)
SHARED_OPTIONS = (
    *PROCESS_OPTIONS,
    option(
        "trial",
        int | None,
        None,
        "--trial",
        min=0,
        help="Run only the trial of this number, for a scheduler that runs the others. \\[default: all]",
        panel=RUNTIME,
    ),
    switch("list_trials", "--list-trials", help="Print the numbers and names of the trials, and stop."),
)
OUTPUT_OPTIONS = (
    option(
        "output_dir",
        Path | None,
        None,
        "--output-dir",
        "-o",
        help="Folder to write the run to. \\[default: in runs/TASK, named after the network]",
        brief="Folder of the run; by default in runs/TASK.",
    ),
    switch("resume", "--resume", help=RESUME, brief="Continue a stopped run."),
    switch("overwrite", "--overwrite", help=OVERWRITE),
    *CONFIG_OPTIONS,
    switch("print_config", "--print-config", help="Print the resolved config and stop."),
    switch(
        "dry_run",
        "--dry-run",
        help="Test the whole run in a few steps and estimate its memory, seconds per step, hours and disk; keep "
        "nothing.",
        brief="Measure memory, seconds per step and hours.",
    ),
    switch("no_report", "--no-report", help=NO_PAGE),
    *PRINTING,
)
