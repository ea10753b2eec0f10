"""The modules of tasks that commands load by name have the functions that the commands call."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import dpn_cli.commands
from dpn_cli.commands.train_command import TrainCommand
from dpn_cli.commands.trainers import MODULES, PAGES, TRAIN_COMMANDS


def attributes_used(path: Path) -> set[tuple[str, str]]:
    """Return (command, attribute) for each attribute that a file of commands reads of ``module_of(command)``."""
    used = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        modules: dict[str, str] = {}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Assign)
                and (command := command_of(node.value))
                and isinstance(node.targets[0], ast.Name)
            ):
                modules[node.targets[0].id] = command
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                name = node.value.id if isinstance(node.value, ast.Name) else ""
                if command := command_of(node.value) or modules.get(name):
                    used.add((command, node.attr))
    return used


def command_of(node: ast.expr) -> str | None:
    """Return the command of a call ``module_of("command")``; None for anything else."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "module_of"
    return node.args[0].value if called and isinstance(node.args[0], ast.Constant) else None  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize(
    ("command", "attribute"),
    sorted(set().union(*map(attributes_used, Path(dpn_cli.commands.__path__[0]).glob("*.py")))),
)
def test_commands_find_their_functions(command: str, attribute: str) -> None:
    assert hasattr(import_module(MODULES[command]), attribute)


@pytest.mark.parametrize("command", [name for name in MODULES if name.startswith("data check ")])
def test_data_checks_have_their_function(command: str) -> None:
    assert callable(import_module(MODULES[command]).check_data)


@pytest.mark.parametrize("module", sorted(set(PAGES.values())))
def test_pages_have_findings(module: str) -> None:
    assert callable(import_module(module).findings)


@pytest.mark.parametrize("training", TRAIN_COMMANDS.values(), ids=TRAIN_COMMANDS)
def test_trainings_can_run_and_show(training: TrainCommand) -> None:
    module = import_module(training.module)
    assert callable(module.run)
    assert callable(module.show)


def test_every_module_can_be_imported() -> None:
    assert all(import_module(module) for module in MODULES.values())
