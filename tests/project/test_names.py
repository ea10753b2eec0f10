"""Names and English: no name twice, one word per thing, docstrings that begin with their subject, short help."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dpn_cli.cli import app
from support.programs import ROOT

MODULES = [path for package in ("dpn_cli", "tasks") for path in sorted((ROOT / package).rglob("*.py"))]
# Modules that play the same part in two rooms or two tasks.
SHARED = frozenset(
    {"__init__", "base", "cache", "command", "config", "data", "datacheck", "dry_run", "eval_splits", "evaluate"}
    | {"export"}
    | {"gradients", "hub", "loader", "loss", "losses", "options", "page", "page_samples", "pairs", "plan", "predict"}
    | {"preflight", "prepare", "run", "sweep", "tables", "train"}
)
# The field says: config, image, dry run, mutant, agreement, finalize, log.
FORBIDDEN = re.compile(r"recipe|picture|rehears|breakage|nearness|\b(settle|heard|spoken|print_cells)\b", re.IGNORECASE)
LONGEST_HELP = 20
# A line that has to say such a word ends in ``# names: REASON``.


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _helps(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every help text of a command and those below it, with the command line."""
    yield " ".join(words), command.help or ""
    for parameter in command.params:
        yield " ".join((*words, parameter.name)), getattr(parameter, "help", None) or ""
    for name in getattr(command, "commands", {}):
        below = command.get_command(None, name)
        yield from _helps(below, (*words, name))


def test_no_public_class_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_module_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for path in MODULES:
        places[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(path.relative_to(ROOT).with_suffix("").parts))
def test_texts_use_the_words_of_the_field(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert not [
        f"{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if FORBIDDEN.search(line) and "# names:" not in line
    ]
    question = re.compile(r"(What|Where|Which|How|Whether|Who|Why)\b")
    assert not [f"{number}: {text}" for number, text in _docstrings(path) if question.match(text)]


def test_sentences_of_help_are_short() -> None:
    long = []
    for place, text in _helps(typer.main.get_command(app)):
        plain = re.sub(r"\\?\[[^\]]*\]|\([^)]*\)|'[^']*'", "", text)
        for sentence in re.split(r"[.;:](?:\s|$)", plain):
            if len(sentence.split()) > LONGEST_HELP:
                long.append(f"{place}: {sentence.strip()}")
    assert not long, f"{len(long)} sentences of more than {LONGEST_HELP} words:\n" + "\n".join(long)
