"""Names and English: no name twice, one word per thing, plain docstrings, short sentences in help and docs."""

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
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Modules that play the same part in two rooms or two tasks.
SHARED_MODULES = frozenset(
    {"__init__", "base", "cache", "command", "config", "data", "datacheck", "dry_run", "eval_splits", "evaluate"}
    | {"export", "gradients", "hub", "loader", "loss", "losses", "options", "page", "page_samples", "pairs", "plan"}
    | {"predict", "preflight", "prepare", "run", "search", "sweep", "tables", "train"}
)

# Words that stand for something that has another name here, in names and in texts.
REPLACED = {
    "answer": "prediction, or response",
    "beside": "next to, or compared with",
    "breakage": "mutant",
    "heard": "log, message",
    "look(s|ed|ing)? (at|into)": "inspect, check",
    "nearness": "agreement, similarity",
    "picture": "image",
    "recipe": "config",
    "rehears": "dry run",
    "said": "message",
    "settle": "finalize",
    "spoken": "log, format",
    "told": "message, log",
    "what became of": "outcome, status",
}
# A name is a noun, a verb with its object, or a predicate: none of these alone.
NO_NAMES = frozenset(
    {"again", "apart", "asked", "at_once", "began", "begun", "besides", "drawn", "given", "how", "looked", "seen"}
    | {"so_far", "taken", "together"}
)
# Public keys, which keep their names, with the reason.
ALLOWED_NAMES = {
    "mean_beside_class_token": "a key of `dpn checkpoint inspect --json`",
}
LONGEST_HELP = 20
LONGEST_SENTENCE = 25
# A line of code that has to hold such a word ends in ``# names: REASON``.
EXCEPTION = "# names:"


def _defined_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every function, class, parameter, variable and attribute of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


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


def _prose(path: Path) -> list[str]:
    """Return the sentences of a page, without code, tables, headings and link targets."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=#)", text)
    prose = [part for part in paragraphs if not part.lstrip().startswith(("|", "#", "!["))]
    words = [re.sub(r"`[^`]*`", "`code`", " ".join(part.split())) for part in prose]
    return [sentence for part in words for sentence in re.split(r"(?<=[.:;?!])\s+", part) if sentence]


def _replaced_words(text: str) -> list[str]:
    return [f"{word!r} is {use}" for word, use in REPLACED.items() if re.search(rf"\b{word}", text, re.IGNORECASE)]


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_module_names_are_unique() -> None:
    places = defaultdict(list)
    for path in MODULES:
        places[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED_MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_use_the_words_of_the_field(path: Path) -> None:
    invalid = []
    for line, name in _defined_names(path):
        plain = name.strip("_")
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", plain)]
        if plain in NO_NAMES:
            invalid.append(f"{line}: {name} is no noun and no verb")
        elif plain not in ALLOWED_NAMES and (replaced := [use for word in words for use in _replaced_words(word)]):
            invalid.append(f"{line}: {name}: {'; '.join(replaced)}")
    assert not invalid, "\n".join(invalid)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_use_the_words_of_the_field(path: Path) -> None:
    lines = path.read_text().splitlines()
    texts = ((number, line) for number, line in enumerate(lines, 1) if EXCEPTION not in line)
    allowed = re.compile("|".join(ALLOWED_NAMES))
    assert not [
        f"{number}: {line.strip()}: {words}"
        for number, line in texts
        if (words := _replaced_words(allowed.sub("", line)))
    ]
    question = re.compile(r"(What|Where|Which|How|Whether|Who|Why)\b")
    assert not [f"{number}: {text}" for number, text in _docstrings(path) if question.match(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field_in_short_sentences(path: Path) -> None:
    sentences = _prose(path)
    assert not [f"{sentence}: {words}" for sentence in sentences if (words := _replaced_words(sentence))]
    assert not [sentence for sentence in sentences if len(sentence.split()) > LONGEST_SENTENCE]


def test_sentences_of_help_are_short() -> None:
    long = []
    for place, text in _helps(typer.main.get_command(app)):
        assert not _replaced_words(text), place
        plain = re.sub(r"\\?\[[^\]]*\]|\([^)]*\)|'[^']*'", "", text)
        for sentence in re.split(r"[.;:](?:\s|$)", plain):
            if len(sentence.split()) > LONGEST_HELP:
                long.append(f"{place}: {sentence.strip()}")
    assert not long, f"{len(long)} sentences of more than {LONGEST_HELP} words:\n" + "\n".join(long)
