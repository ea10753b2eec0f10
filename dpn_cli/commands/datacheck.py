"""`dpn data check`: decode all images of a training's data before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, cast

import typer

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import CONFIG_OPTIONS, PRINTING, keys_of, option, with_signature
from dpn_cli.commands.train_command import TrainCommand
from dpn_cli.commands.trainers import ADE20K, DISTILL, FOLDER, HIGHRES, LIT, PRETRAIN, TRAIN_COMMANDS, VTAB, module_of
from dpn_cli.config.option import DATA, RUNTIME
from dpn_cli.errors import CheckError
from dpn_cli.run.console import Console, count_noun, show

# Trainings whose data can be checked, with the data of the example in help.
CHECKS: dict[str, tuple[TrainCommand, str]] = {
    "vtab": (VTAB, "vtab-1k"),
    "highres": (HIGHRES, "photos --val-fraction 0.2"),
    "pretrain": (PRETRAIN, "imagenet"),
    "distill": (DISTILL, "photos"),
    "lit": (LIT, "pairs.csv"),
    "ade20k": (ADE20K, "ADEChallengeData2016"),
    "folder": (FOLDER, "DIR"),
}
# Options of a data check outside the data panel, and options of the panel that it does not have.
INCLUDED, EXCLUDED = (
    frozenset({"batch_size", "image_size", "workers"}),
    frozenset({"skip_bad_images", "flip", "jitter", "shifts", "severity", "shift_seed"}),
)
EXTRA = frozenset({"name", "base_config"})


class CheckModule(Protocol):
    """Module of a task that checks its data, and loads torch."""

    def check_data(self, config: Any, findings: Any, ranks: int) -> dict[str, Any]:
        """Add the problems of a config's data to `findings`; return the fingerprints that a result carries."""


app = typer.Typer(
    no_args_is_help=True,
    help="Decode every image of a data set, and list the problems by file name.",
    epilog="Example: dpn data check highres --data photos --val-fraction 0.2",
)


def _check(name: str, training: TrainCommand, arguments: Mapping[str, Any]) -> None:
    console = Console(quiet=arguments["quiet"])
    with one_line_errors(arguments), console.capture_logs():
        # Pre-training asks for a network, by which it augments; data are the same for all of them.
        network = {"arch": "B/32"} if training is PRETRAIN and arguments["data"] else {}
        config = training.layers({**arguments, **network}, console.info)
        from dpn_cli.data.findings import DataFindings, describe  # torch loads here
        from dpn_cli.run import signals

        findings = DataFindings(console, config.runtime.workers)
        with signals.listen(signals.NO_RESULT):
            task = cast(CheckModule, module_of(f"data check {name}"))
            fingerprint = task.check_data(config, findings, arguments["ranks"])
        result = findings.result(name, config.data.source, fingerprint)
        show(json.dumps(result, indent=2) if arguments["json"] else describe(result))
        if count := len(findings.problems):
            raise CheckError(f"{count_noun(count, 'problem')} with the data, as listed above")


RANKS = option(
    "ranks",
    int,
    1,
    "--ranks",
    min=1,
    max=2**16,
    help="Number of training ranks on this machine. \\[default: 1]",
    panel=RUNTIME,
    brief="Number of training ranks on this machine.",
)


def _add(name: str, training: TrainCommand, data: str) -> None:
    def command(**arguments: Any) -> None:
        _check(name, training, arguments)

    data_options = {key.parameter for key in keys_of(training.schema) if key.flag.panel == DATA}
    words = next(words for words, train_command in TRAIN_COMMANDS.items() if train_command is training)
    command.__doc__ = f"Check the data of 'dpn {words}' for unreadable, mislabelled and duplicate images."
    options = [
        *(parameter for parameter in training.extra if parameter.name in EXTRA),
        *training.parameters(frozenset(data_options | INCLUDED) - EXCLUDED),
    ]
    example = f"Example: dpn data check {name} --data {data}"
    app.command(name, cls=OneScreenCommand, epilog=example)(
        with_signature(command, [*options, RANKS, *CONFIG_OPTIONS, *PRINTING])
    )


for _name, (_training, _data) in CHECKS.items():
    _add(_name, _training, _data)
