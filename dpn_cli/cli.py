"""The command line: commands and their names. Torch is imported when a task starts, not for help."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError
from typer.core import TyperGroup

from dpn_cli import __version__
from dpn_cli.arch import did_you_mean, nearest
from dpn_cli.commands import (
    INTERRUPTED,
    checkpoint,
    data,
    doctor,
    evaluate,
    inspect,
    lit,
    plan,
    recipes,
    report,
    runs,
    segment,
    tasks,
    training,
)
from dpn_cli.commands.reproduce import command as reproduce
from dpn_cli.recipe.allowed import refusal
from dpn_cli.run import process
from dpn_cli.run.console import show_error


class _OneLine(TyperGroup):
    """The root command, which prints a mistake in the command line on one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            _refuse_empty(sys.argv[1:] if args is None else args)
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            if code == INTERRUPTED:  # before a command began its work, or after it: Typer says nothing of a Ctrl-C
                show_error("interrupted")
        except typer.TyperException as error:
            if not standalone_mode:
                raise
            message, context = _told(error), getattr(error, "ctx", None)
            if message:  # a command without arguments has printed its help instead
                show_error(message + (f"; see '{context.command_path} --help'" if context else ""))
            code = error.exit_code
        if standalone_mode:
            sys.exit(code or 0)
        return code


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise `typer.BadParameter` for an empty argument: an unset variable must not stand for a default."""
    for before, word in zip(("dpn", *words), words, strict=False):
        option, equals, value = word.partition("=")
        where = option if option.startswith("--") and equals else before
        if not word or (option.startswith("--") and equals and not value):
            raise typer.BadParameter(f"nothing after {where} (is a shell variable unset?)")


def _nearer(error: typer.TyperException) -> str | None:
    """Describe an unknown option or command with the one that may be meant, which has to be nearer than Typer asks."""
    if options := getattr(error, "possibilities", None):
        word = getattr(error, "option_name", "")
        close = nearest(word.lstrip("-"), [option.lstrip("-") for option in options])
        return f"No such option: {word}" + (f"; did you mean '--{close}'?" if close else "")
    unknown = re.match(r"No such command '(.*)'\. Did you mean ", error.format_message())
    commands = getattr(getattr(getattr(error, "ctx", None), "command", None), "commands", {})
    return f"No such command '{unknown[1]}'{did_you_mean(unknown[1], commands)}" if unknown else None


def _told(error: typer.TyperException) -> str:
    """Describe a mistake in a command line; for a wrong value, with the values that are allowed."""
    parameter = getattr(error, "param", None)
    if parameter is None or not isinstance(error.__cause__, ValidationError):
        return _nearer(error) or error.format_message().strip().rstrip(".")
    value, bounds = error.__cause__.errors()[0]["input"], Field(ge=parameter.min, le=parameter.max)
    return f"{'/'.join(parameter.opts)}: {refusal(value, parameter.type_descriptor.annotation, [bounds])}"


app = typer.Typer(
    cls=_OneLine,
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
training.add(finetune, "vtab", tasks.VTAB)
training.add(finetune, "highres", tasks.HIGHRES)
app.add_typer(finetune, name="finetune")
app.add_typer(lit.app, name="lit")
training.add(app, "pretrain", tasks.PRETRAIN)
training.add(app, "distill", tasks.DISTILL)
app.add_typer(plan.app, name="plan")
app.add_typer(evaluate.app, name="eval")
evaluate.add_to(app)
inspect.add_to(app)
app.add_typer(segment.app, name="segment")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
report.add_to(app)
reproduce.add_to(app)
app.add_typer(runs.app, name="runs")
doctor.add_to(app)


def main() -> None:
    """Run the command line; the entry point of ``dpn``."""
    process.prepare()
    with process.leaving():
        app()


def _version(show: bool) -> None:
    if show:
        print(f"dpn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
