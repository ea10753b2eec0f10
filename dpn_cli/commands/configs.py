"""`dpn configs`: the shipped configs and what each stands for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.trainers import schema_of
from dpn_cli.config.load import build, read_config, shipped_configs
from dpn_cli.config.provenance import dump_with_sources, read_sources

app = typer.Typer(invoke_without_command=True, epilog="Example: dpn configs show vtab")


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
