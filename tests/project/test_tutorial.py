"""The tutorial does what it says: its code and commands run in their order and give about the figures on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.cli import run_dpn
from support.docs import SHELL, read_code_blocks, split_command
from support.programs import ROOT

PAGE = ROOT / "docs" / "tutorials" / "digits.md"
ACCURACY = re.compile(r"(?:validation|zero-shot): top-1 (\d+\.\d\d) %")
LABEL = re.compile(r"^ +(?:9\d|100)\.\d% .* (an \w+ number)$", re.MULTILINE)
FOUND = re.compile(r"digits/val/(\w+)/\d+\.png$", re.MULTILINE)
# Points by which another processor or another version of torch may miss a stated accuracy.
MARGIN = 4.0


def commands(body: str) -> Iterator[list[str]]:
    """Yield the words behind ``dpn`` in a shell block, which has only installations beside them."""
    for line in body.replace("\\\n", " ").splitlines():
        program, *words = split_command(line)
        assert program == "dpn" or (program, words[0]) == ("pip", "install"), line
        if program == "dpn":
            yield words


def outputs(text: str) -> Iterator[tuple[str, str]]:
    """Run the blocks of a page in their order; yield each output that it shows with the one that came out."""
    printed = ""
    for language, body in read_code_blocks(text):
        if language == "python":
            exec(compile(body, PAGE.name, "exec"), {})
        elif language in SHELL:
            for words in commands(body):
                result = run_dpn(*words)
                assert result.exit_code == 0, result.output
                printed += result.stdout
        else:
            yield body, printed
            printed = ""


@pytest.mark.slow
def test_the_tutorial_on_digits_gives_about_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)  # more would wait for each other where tests run side by side
    pairs = list(outputs(PAGE.read_text(encoding="utf-8")))
    (table, _), network, lit, named, (asked, answered) = pairs
    assert Path("captions.csv").read_text(encoding="utf-8").startswith(table)
    for shown, printed in (network, named):
        stated, reached = (float(ACCURACY.findall(text)[0]) for text in (shown, printed))
        assert reached > stated - MARGIN
    counts = re.compile(r"\d+ steps of \d+ on \d+ images with \d+ captions")
    assert counts.findall(lit[0]) == counts.findall(lit[1]) != []
    assert LABEL.findall(asked) == LABEL.findall(answered) == ["an odd number", "an even number"]
    assert FOUND.findall(asked) == FOUND.findall(answered) == ["five", "zero", "seven", "seven", "seven"]
