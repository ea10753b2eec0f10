"""The command line: commands and their names. Each is imported when it is used, torch when a task starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError

from dpn_cli import __version__
from dpn_cli.arch import did_you_mean, find_nearest
from dpn_cli.commands import INTERRUPTED
from dpn_cli.commands.lazy import LazyCommand, LazyGroup
from dpn_cli.config.validation_errors import refusal
from dpn_cli.run import process
from dpn_cli.run.console import show_error

COMMANDS = {
    "finetune": LazyCommand("finetune:app", "Fine-tune the whole network on labelled images."),
    "lit": LazyCommand(
        "lit:app",
        "Train a text tower against a frozen image tower (LiT, Table 4), then classify and search.",
    ),
    "segment": LazyCommand("segment:app", "Train and use semantic segmentation with a linear decoder on patch tokens."),
    "pretrain": LazyCommand(
        "trainers:TRAIN_COMMANDS",
        "Pre-train a backbone with any stem on ImageNet, SUN397 or your own images.",
    ),
    "distill": LazyCommand(
        "trainers:TRAIN_COMMANDS",
        "Distill a trained ViT into one with another stem, norm or size, using unlabelled images.",
    ),
    "plan": LazyCommand("plan:app", "Estimate the time, memory and disk of a training run."),
    "eval": LazyCommand(
        "evaluate:app",
        "Evaluate a run or checkpoint on labelled images.",
    ),
    "predict": LazyCommand(
        "evaluate:add_to",
        "Classify images with a trained run.",
    ),
    "export": LazyCommand(
        "evaluate:add_to",
        "Export a run's classifier with a model card, and verify its outputs.",
    ),
    "inspect": LazyCommand(
        "inspect:add_to",
        "Plot what one or two networks have learned: norms, filters, positions, attention, tokens.",
    ),
    "checkpoint": LazyCommand(
        "checkpoint:app", "Inspect and convert checkpoints, or retrofit a plain ViT with a DPN stem."
    ),
    "data": LazyCommand("data:app", "Check, prepare and pack data sets."),
    "configs": LazyCommand("configs:app", "List the shipped configs, or show one with its sources."),
    "report": LazyCommand("report:add_to", "Write a page with figures and tables about runs and evaluations."),
    "reproduce": LazyCommand(
        "reproduce:add_to",
        "List the paper's tables and figures with their cost, or reproduce one.",
    ),
    "runs": LazyCommand("runs:app", "List the runs in a folder, or show one."),
    "doctor": LazyCommand(
        "doctor:add_to",
        "Check this machine before a training: packages, GPUs, memory, disk, network, ranks.",
    ),
}


class _Root(LazyGroup):
    """The root command, which prints a mistake in the command line on one line."""

    lazy_commands = COMMANDS

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
            message, context = _format_usage_error(error), getattr(error, "ctx", None)
            if message:  # a command without arguments has printed its help instead
                show_error(message + (f"; see '{context.command_path} --help'" if context else ""))
            code = error.exit_code
        if standalone_mode:
            sys.exit(code or 0)
        return code


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise `typer.BadParameter` for an empty argument: an unset variable must not stand for a default."""
    for previous_word, word in zip(("dpn", *words), words, strict=False):
        option, equals, value = word.partition("=")
        location = option if option.startswith("--") and equals else previous_word
        if not word or (option.startswith("--") and equals and not value):
            raise typer.BadParameter(f"nothing after {location} (is a shell variable unset?)")


def _suggest(error: typer.TyperException) -> str | None:
    """Describe an unknown option or command with the one that may be meant, which has to be nearer than Typer asks."""
    if options := getattr(error, "possibilities", None):
        word = getattr(error, "option_name", "")
        close = find_nearest(word.lstrip("-"), [option.lstrip("-") for option in options])
        return f"No such option: {word}" + (f"; did you mean '--{close}'?" if close else "")
    unknown = re.match(r"No such command '(.*)'\. Did you mean ", error.format_message())
    commands = getattr(getattr(getattr(error, "ctx", None), "command", None), "commands", {})
    return f"No such command '{unknown[1]}'{did_you_mean(unknown[1], commands)}" if unknown else None


def _format_usage_error(error: typer.TyperException) -> str:
    """Describe a mistake in a command line; for a wrong value, with the values that are allowed."""
    parameter = getattr(error, "param", None)
    if parameter is None or not isinstance(error.__cause__, ValidationError):
        return _suggest(error) or error.format_message().strip().rstrip(".")
    value, bounds = error.__cause__.errors()[0]["input"], Field(ge=parameter.min, le=parameter.max)
    return f"{'/'.join(parameter.opts)}: {refusal(value, parameter.type_descriptor.annotation, [bounds])}"


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune Dual PatchNorm Vision Transformers (arXiv 2302.01327) and their rivals.",
    epilog="Example: dpn finetune vtab --arch B/32",
)


def main() -> None:
    """Run the command line."""
    process.prepare()
    with process.fast_exit():
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
