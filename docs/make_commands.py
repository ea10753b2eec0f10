"""Write commands.md: every command and option of the program, from the program itself.

python docs/make_commands.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from dpn_cli.cli import app

PAGE = Path(__file__).with_name("commands.md")
HEADER = """# Commands

`--help` behind a command shows the options that people use, `--help-all` shows all of them, as this page does. It is
made from the program by `python docs/make_commands.py`.
"""


def walk(command: Any, words: tuple[str, ...] = ("dpn",)) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with its words."""
    names = getattr(command, "commands", None)
    if names is None or command.invoke_without_command:
        yield " ".join(words), command
    for name in names or ():
        # A group may have a command that it runs without a name.
        own = () if name == getattr(command, "default", None) else (name,)
        yield from walk(command.get_command(None, name), (*words, *own))


def cell(text: str) -> str:
    """Return a text in one line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def describe(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of a command: what it does, an example, and its parameters by panel."""
    yield f"\n## `{name}`\n"
    yield " ".join((command.help or "").split())
    if command.epilog:
        example = " ".join(command.epilog.split()).removeprefix("Example: ")
        yield f"\n```bash\n{example}\n```"
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if parameter.name in ("help", "help_all") or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name]
        panel = parameter.rich_help_panel or ("Options" if is_option else "Arguments")
        required = " Required." if parameter.required else ""
        words = ", ".join(f"`{word}`" for word in names)
        panels.setdefault(panel, []).append(f"| {words} | {cell(parameter.help or '')}{required} |")
    for panel, rows in panels.items():
        yield f"\n| {panel} | |\n|---|---|"
        yield from rows


def page() -> str:
    """Return the whole page."""
    command = typer.main.get_command(app)
    return HEADER + "\n".join(line for name, own in walk(command) for line in describe(name, own)) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
