"""Options are made from config schemas: help says the defaults that ``--print-config`` shows, for every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main
import yaml
from pydantic import Field
from typer.testing import CliRunner

from dpn_cli.cli import app
from dpn_cli.commands.options import Variant, default_of, keys_of, parameter_of, with_signature
from dpn_cli.commands.train_command import TrainCommand
from dpn_cli.commands.trainers import ADE20K, FOLDER, HIGHRES, LIT, PRETRAIN, VTAB
from dpn_cli.config.option import TRAIN, flag
from dpn_cli.config.schema import Section
from support.cli import run_dpn

# A command line by the label that help gives its config; "" is the usual one.
COMMANDS: dict[str, tuple[TrainCommand, dict[str, str]]] = {
    "finetune vtab": (
        VTAB,
        {"": "--data x", "demo": "--data demo", "demo with --arch": "--data demo --arch B/32"},
    ),
    "finetune highres": (
        HIGHRES,
        {"": "--data imagenet", "demo": "--data demo", "own images": "--data x --checkpoint y"},
    ),
    "pretrain": (
        PRETRAIN,
        {
            "": "--data imagenet --arch L/16",
            "B/32": "--data imagenet --arch B/32",
            "S/32": "--data imagenet --arch S/32",
            "Ti/16": "--data imagenet --arch Ti/16",
            "deit": "imagenet --base-config deit --data x --arch B/32",
            "s16plus": "imagenet --base-config s16plus --data x --arch S/16",
            "imagenet21k": "imagenet21k --data x --arch L/16",
            "jft": "jft --data x --arch B/32",
            "sun397": "sun397 --data x --arch B/32",
            "cifar": "cifar10 --data x",
            "demo": "--data demo",
            "own images": "--data x --arch B/32",
        },
    ),
    "lit train": (LIT, {"": "--data x", "demo": "--data demo"}),
    "segment ade20k": (ADE20K, {"": "--data x", "demo": "--data demo"}),
    "segment folder": (FOLDER, {"": "--data x", "demo": "--data demo"}),
}
CASES = [(command, label) for command, (_, lines) in COMMANDS.items() for label in lines]


def _help(command: str) -> dict[str, str]:
    """The help of every option of a command, by its first name."""
    actual: Any = typer.main.get_command(app)
    for word in command.split():
        actual = actual.commands[word]
    return {parameter.opts[0]: parameter.help for parameter in actual.params if parameter.opts[0].startswith("--")}


def _said(text: str, label: str) -> str:
    """The default that help gives in the case of a label."""
    (default,) = re.findall(r"\\\[default: (.*)\]$", text)
    usual, *others = re.sub(r"^by --\w+: ", "", default.replace("\\[", "[")).split("; ")
    for other in others:
        labels, colon, value = other.partition(": ")
        if colon and label in labels.split(", "):
            return str(value)
    return str(usual)


def _value(printed: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        printed = printed[part]
    return printed


@pytest.mark.parametrize(("command", "label"), CASES)
def test_help_shows_the_defaults_of_print_config(
    command: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without data and weights to be found
    training, lines = COMMANDS[command]
    printed = yaml.safe_load(run_dpn(*command.split(), *lines[label].split(), "--print-config").stdout)
    told, given = _help(command), lines[label]
    for key in keys_of(training.schema):
        name, _, opposite = key.flag.names[0].partition("/")
        if key.name in training.without or name in given:
            continue
        message, value = _said(told[name], label), _value(printed, key.name)
        if message == "counted from the epochs":
            assert printed["epochs"] is not None
        elif value is None or value == []:
            assert message in key.flag.unset, (name, message)
        elif isinstance(value, bool):
            assert message == ((name if value else opposite or "no").removeprefix("--")), (name, message, value)
        elif isinstance(value, list):
            assert [yaml.safe_load(part) for part in message.split(",")] == pytest.approx(value), name
        else:
            assert message == value or float(message) == pytest.approx(value), (name, message, value)


def _all(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _all(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_option_with_a_value_shows_its_default_or_is_required() -> None:
    for name, command in _all(typer.main.get_command(app)):
        for parameter in command.params:
            switch = getattr(parameter, "is_flag", False)
            if parameter.param_type_name == "option" and not switch and parameter.name not in {"config", "set", "help"}:
                assert parameter.required or "[default: " in parameter.help, (name, parameter.name)


def test_one_option_has_one_name_everywhere() -> None:
    keys: dict[str, set[str]] = {}
    for training, _ in COMMANDS.values():
        for key in keys_of(training.schema):
            keys.setdefault(key.name, set()).add(key.flag.names[0])
    assert not {key: names for key, names in keys.items() if len(names) > 1}


# What reads images and does not train. Batches of `inspect` are as large as memory allows; packing has none.
READERS = (
    *("predict", "lit predict", "segment predict", "lit search", "eval score", "eval fewshot", "lit eval"),
    *("segment eval", "checkpoint retrofit", "inspect", "data pack"),
)


@pytest.mark.parametrize("command", READERS)
def test_commands_that_read_images_have_the_same_options(command: str) -> None:
    actual: Any = typer.main.get_command(app)
    for word in command.split():
        actual = actual.commands[word]
    names = {name for parameter in actual.params for name in parameter.opts}
    assert {"-q", "-j", "--decode", "--max-pixels"} <= names
    assert ("-b" in names) == (command not in {"inspect", "data pack"})
    assert ({"--csv", "--html"} <= names) == command.endswith("predict")


class _Trial(Section):
    rate: Annotated[Annotated[float, Field(gt=0)] | None, flag("--rate", "-r", help="A rate.", panel=TRAIN)] = 0.5
    fast: Annotated[bool, flag("--fast/--no-fast", help="Be fast.", panel=TRAIN)] = True


def test_an_option_is_one_field() -> None:
    observed: list[dict[str, Any]] = []
    small = typer.Typer()

    def command(**arguments: Any) -> None:
        observed.append(arguments)

    variants = [Variant("", {}), Variant("demo", {"rate": 0.25}), Variant("own", {"rate": None})]
    keys = list(keys_of(_Trial))
    defaults = [default_of(key, _Trial, variants) for key in keys]
    assert defaults == ["0.5; demo: 0.25; own: none", "fast"]
    parameters = [parameter_of(key, default) for key, default in zip(keys, defaults, strict=True)]
    small.command()(with_signature(command, parameters))
    for line in ([], ["-r", "0.125"], ["--no-fast"]):
        assert CliRunner().invoke(small, line).exit_code == 0
    none = {"rate": None, "fast": None}
    assert observed == [none, {**none, "rate": 0.125}, {**none, "fast": False}]
