"""Fenced code blocks of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)


# Languages of blocks that a reader types into a shell; a block of another one shows output, code or a file.
SHELL = {"", "bash", "sh", "shell", "console"}


def read_code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    for actual in FENCE.finditer(text):
        yield actual["language"], actual["body"]


def split_command(line: str) -> list[str]:
    """Split a line of a shell into words."""
    return shlex.split(line.removeprefix("time "), comments=True)
