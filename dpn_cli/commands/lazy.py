"""Commands that are imported when they are used: to list them needs none of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(NamedTuple):
    """A command or group: where in `dpn_cli.commands` it is, as ``module:name``, and its line in the help.

    The name is that of a Typer app, which gets its help from here, of a function that adds the command to one, or of
    the table of trainings; these have a help of their own, which begins with the line.
    """

    location: str
    help: str

    def load(self, name: str) -> Any:
        """Return the command."""
        module, attribute = self.location.split(":")
        command = getattr(import_module(f"dpn_cli.commands.{module}"), attribute)
        parent = typer.Typer(rich_markup_mode="rich", add_completion=False)
        parent.callback()(lambda: None)  # with a callback it is a group, however few commands it has
        if isinstance(command, typer.Typer):
            parent.add_typer(command, name=name, help=self.help)
        elif isinstance(command, Mapping):
            import_module("dpn_cli.commands.train").add_command(parent, name, command[name])
        else:
            command(parent)
        group: Any = typer.main.get_command(parent)
        return group.commands[name]


class Commands(UserDict[str, Any]):
    """Commands by name, each loaded at its first use."""

    def __init__(self, lazy_commands: Mapping[str, LazyCommand]) -> None:
        super().__init__(dict.fromkeys(lazy_commands))
        self.lazy_commands = lazy_commands

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = self.lazy_commands[name].load(name)
        return self.data[name]


class LazyGroup(TyperGroup):
    """A group of the commands in `lazy_commands`, which a subclass sets."""

    lazy_commands: Mapping[str, LazyCommand]
    _listed = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands(self.lazy_commands)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; while the help is written, one with its help line alone."""
        if self._listed:
            return TyperCommand(cmd_name, help=self.lazy_commands[cmd_name].help)
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self._listed = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listed = False
