"""`dpn configs`: the shipped configs and what each stands for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.load import Plain, build, read_config, shipped_configs
from dpn_cli.config.provenance import dump_with_sources, read_sources
from dpn_cli.config.schema import Config
from dpn_cli.errors import DpnError

app = typer.Typer(invoke_without_command=True, epilog="Example: dpn configs show vtab")


def schema_of(plain: Plain, name: str) -> type[Config]:
    """Return the schema of a config, whose ``about.command`` names its command. Raises `DpnError` for another one."""
    about = plain.get("about")
    command = str(about.get("command")) if isinstance(about, dict) else ""
    for words, training in TRAIN_COMMANDS.items():
        if f"{command} ".startswith(f"dpn {words} "):
            return training.schema
    known = ", ".join(f"'dpn {words} …'" for words in TRAIN_COMMANDS)
    raise DpnError(f"{name}: about.command is {command!r}, which has no config; write one of {known}")


@app.callback()
def _list_configs(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        name_column = Column("config", no_wrap=True)  # names are to be copied
        table = Table(name_column, "paper", "table", "expected", box=None, padding=(0, 2, 0, 0))
        for name in shipped_configs():
            about = read_config(name)["about"]
            table.add_row(name, about["paper"], about["table"], about["expected"])
        RichConsole(highlight=False).print(table)


def _complete_config(incomplete: str) -> list[str]:
    return [name for name in shipped_configs() if name.startswith(incomplete)]


@app.command(epilog="Example: dpn configs show vtab")
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a shipped config, or a YAML file.", autocompletion=_complete_config)
    ],
) -> None:
    """Print a config with every key resolved, and where each value comes from."""
    with one_line_errors({}):
        plain = read_config(name)
        schema = schema_of(plain, name)
        print(dump_with_sources(build(schema, plain, name), read_sources(name, schema), plain), end="")
