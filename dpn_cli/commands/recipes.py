"""`dpn recipes`: the shipped recipes and what each stands for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console as RichConsole
from rich.table import Table

from dpn_cli import recipe
from dpn_cli.commands import one_line_errors
from dpn_cli.errors import DpnError
from tasks.highres.recipe import HighresRecipe
from tasks.lit.recipe import LitRecipe
from tasks.pretrain.recipe import PretrainRecipe
from tasks.segment.recipe import SegmentRecipe
from tasks.vtab.recipe import VtabRecipe

# The schema of each command's recipes; a recipe says its command in ``about.command``.
SCHEMAS: dict[str, type[recipe.Section]] = {
    "finetune vtab": VtabRecipe,
    "finetune highres": HighresRecipe,
    "lit train": LitRecipe,
    "pretrain": PretrainRecipe,
    "segment": SegmentRecipe,
}

app = typer.Typer(
    help="List the shipped recipes, or show one.", invoke_without_command=True, epilog="Example: dpn recipes show vtab"
)


def schema_of(plain: recipe.Plain, name: str) -> type[recipe.Section]:
    """Return the schema of a recipe. Raises `DpnError` when ``about.command`` is none of dpn's commands."""
    about = plain.get("about")
    command = str(about.get("command")) if isinstance(about, dict) else ""
    for words, schema in SCHEMAS.items():
        if f"{command} ".startswith(f"dpn {words} "):
            return schema
    known = ", ".join(f"'dpn {words} …'" for words in SCHEMAS)
    raise DpnError(f"{name}: about.command is {command!r}, which is no command with a recipe; write one of {known}")


@app.callback()
def _list_recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        table = Table("recipe", "paper", "table", "expected", box=None, padding=(0, 2, 0, 0))
        for name in recipe.shipped_recipes():
            about = recipe.read_recipe(name)["about"]
            table.add_row(name, about["paper"], about["table"], about["expected"])
        RichConsole(highlight=False).print(table)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in recipe.shipped_recipes() if name.startswith(incomplete)]


@app.command(epilog="Example: dpn recipes show vtab")
def show(
    name: Annotated[
        str, typer.Argument(help="Name of a shipped recipe, or a YAML file.", autocompletion=_complete_recipe)
    ],
) -> None:
    """Print a recipe with every key resolved."""
    with one_line_errors():
        plain = recipe.read_recipe(name)
        print(recipe.dump(recipe.build(schema_of(plain, name), plain, name)), end="")
