"""`dpn recipes`: the shipped recipes and what each stands for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.tasks import TRAININGS
from dpn_cli.errors import DpnError
from dpn_cli.recipe.reading import Plain, build, read_recipe, shipped_recipes
from dpn_cli.recipe.schema import Recipe
from dpn_cli.recipe.sources import dump_with_sources, read_sources

app = typer.Typer(invoke_without_command=True, epilog="Example: dpn recipes show vtab")


def schema_of(plain: Plain, name: str) -> type[Recipe]:
    """Return the schema of a recipe, whose ``about.command`` names its command. Raises `DpnError` for another one."""
    about = plain.get("about")
    command = str(about.get("command")) if isinstance(about, dict) else ""
    for words, training in TRAININGS.items():
        if f"{command} ".startswith(f"dpn {words} "):
            return training.schema
    known = ", ".join(f"'dpn {words} …'" for words in TRAININGS)
    raise DpnError(f"{name}: about.command is {command!r}, which has no recipe; write one of {known}")


@app.callback()
def _list_recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        name_column = Column("recipe", no_wrap=True)  # names are to be copied
        table = Table(name_column, "paper", "table", "expected", box=None, padding=(0, 2, 0, 0))
        for name in shipped_recipes():
            about = read_recipe(name)["about"]
            table.add_row(name, about["paper"], about["table"], about["expected"])
        RichConsole(highlight=False).print(table)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


@app.command(epilog="Example: dpn recipes show vtab")
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a shipped recipe, or a YAML file.", autocompletion=_complete_recipe)
    ],
) -> None:
    """Print a recipe with every key resolved, and where each value comes from."""
    with one_line_errors({}):
        plain = read_recipe(name)
        schema = schema_of(plain, name)
        print(dump_with_sources(build(schema, plain, name), read_sources(name, schema), plain), end="")
