"""Help on one screen: each ``--help`` has what people use, ``--help-all`` everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from dpn_cli.cli import app
from dpn_cli.commands.one_screen import MOST_SHOWN
from support.cli import run_dpn

SCREEN, WIDTH = 40, 100


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name in getattr(command, "commands", ()):
        yield from commands(command.get_command(None, name), (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def help_of(words: tuple[str, ...], option: str = "--help") -> str:
    result = run_dpn(*words, option)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", WIDTH)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_fits_a_screen(words: tuple[str, ...]) -> None:
    assert len(help_of(words).splitlines()) <= SCREEN


@pytest.mark.parametrize(
    "words", [words for words, command in COMMANDS.items() if hasattr(command.callback, "briefs")], ids=" ".join
)
def test_the_whole_help_has_every_option_and_the_first_screen_those_with_a_brief(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    briefs = command.callback.briefs
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert len(command.params) > MOST_SHOWN
    assert all(option.name == "help_all" or option.help for option in options)
    before = help_of(words)
    whole = help_of(words, "--help-all")
    assert help_of(words) == before  # the whole help changes nothing
    for option in options:
        name = option.opts[0]
        pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
        assert re.search(pattern, whole), name
        assert bool(re.search(rf"│ \*? *{re.escape(name)}(?![\w-])", before)) is (option.name in briefs), name
    for text in briefs.values():
        assert text in before  # on one line


def test_defaults_are_in_the_whole_help() -> None:
    assert "[default:" not in help_of(("pretrain",))
    assert "[default: the checkpoint's" in " ".join(help_of(("finetune", "highres"), "--help-all").split())
