"""Help on one screen: ``--help`` shows the options that people use, with one line each, ``--help-all`` all of them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

# A command with at most so many options shows all of them.
MOST_SHOWN = 12
_ALL = "dpn_cli.help_all"


class Brief(NamedTuple):
    """Marks an option that ``--help`` shows, with its one line, in the `Annotated` of a parameter."""

    text: str


class OneScreenCommand(TyperCommand):
    """A command whose ``--help`` has the options with a `Brief` alone; its callback has them in ``briefs``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, all of it after ``--help-all``."""
        briefs = getattr(self.callback, "briefs", {})
        if not briefs or ctx.meta.get(_ALL):
            super().format_help(ctx, formatter)
            return
        with _shortened(self.params, briefs):
            super().format_help(ctx, formatter)


@contextmanager
def _shortened(parameters: Sequence[Any], briefs: Mapping[str, str]) -> Generator[None, None, None]:
    """Give parameters their brief texts inside the block, and hide options without one."""
    saved = [(parameter, parameter.help, getattr(parameter, "hidden", False)) for parameter in parameters]
    for parameter in parameters:
        parameter.help = briefs.get(parameter.name, parameter.help)
        parameter.hidden = parameter.param_type_name == "option" and parameter.name not in briefs
    try:
        yield
    finally:
        for parameter, text, hidden in saved:
            parameter.help, parameter.hidden = text, hidden


def show_all(ctx: typer.Context, value: bool) -> None:
    """Print the whole help, and end."""
    if value:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
