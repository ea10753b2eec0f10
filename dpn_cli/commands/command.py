"""The one body of all commands that do not train: options from a schema, one call, the result as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import (
    JSON,
    QUIET,
    VERBOSE,
    Variant,
    default_of,
    explicit_options,
    keys_of,
    option_names,
    parameter_of,
    with_signature,
)
from dpn_cli.config.load import build
from dpn_cli.config.schema import Section
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console, show

OptionsT = TypeVar("OptionsT", bound=Section)
Formatter = Callable[[Any], str | None]
# A result for ``--json``, or None on ranks that do not lead, and what prints it for a person; where there is a third,
# an error with which the command ends although there is a result.
Outcome = tuple[Any, Formatter] | tuple[Any, Formatter, DpnError | None]
# How a training runs, and of no use to anything else.
TRAINING_ONLY = frozenset({"runtime.compile", "runtime.shard", "runtime.micro_batch_size", "runtime.report_to"})


class DefaultGroup(TyperGroup):
    """A group of commands of which one needs no name: a first word that is no command is an argument of it."""

    default: str

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name before its arguments."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def register_command(
    app: typer.Typer,
    name: str,
    schema: type[OptionsT],
    example: str,
    *,
    without: frozenset[str] = frozenset(),
    quiet: bool = True,
) -> Callable[[Callable[[OptionsT, Console], Outcome]], None]:
    """Add a command to a Typer app whose options are the flags of `schema`, except the keys in `without`.

    The decorated function receives the validated options; its docstring is the command's help. What prints the result
    returns the text, or None when it has printed it.
    """
    keys = [key for key in keys_of(schema) if key.name not in without | TRAINING_ONLY]

    def add(function: Callable[[OptionsT, Console], Outcome]) -> None:
        def command(**arguments: Any) -> None:
            with one_line_errors(arguments):
                options = build(schema, explicit_options(keys, arguments), name, option_names(keys, arguments))
                console = Console(quiet=arguments.get("quiet", False))
                with console.capture_logs():
                    result, as_text, *problem = function(options, console)
                if result is None:
                    return
                text = json.dumps(result, indent=2) if arguments["json"] else as_text(result)
                if text is not None:
                    show(text)
                if problem and problem[0]:
                    raise problem[0]

        command.__doc__ = function.__doc__
        variants = [Variant("", {})]
        parameters = [parameter_of(key, default_of(key, schema, variants)) for key in keys]
        printing = [JSON, *([QUIET] if quiet else []), VERBOSE]
        app.command(name, cls=OneScreenCommand, epilog=f"Example: {example}")(
            with_signature(command, [*parameters, *printing])
        )

    return add
