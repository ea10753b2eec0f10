"""Tables as text: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpn_cli.report.content import Cell, Table
from dpn_cli.run.console import printable

_NUMBER = re.compile(r"[-−+]?\d+(\.\d+)?(e[-+]?\d+)?( (±|…) [-−+]?\d+(\.\d+)?)*( %)?")
# What Markdown would read as its own signs.
_SPECIAL = re.compile(r"[\\|`*_<>\[\]]")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "±": r"$\pm$",
    "…": r"\dots{}",
    "×": r"$\times$",
    "·": r"$\cdot$",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


def format_cell(cell: Cell, digits: int) -> str:
    """Return a cell as text on one line; an empty one for None."""
    if cell is None:
        return ""
    return f"{cell:.{digits}f}" if isinstance(cell, float) else printable(cell)


def is_number(cell: Cell) -> bool:
    """Return whether a cell stands on the right: a number, or text that begins like one."""
    return isinstance(cell, int | float) or bool(cell and _NUMBER.fullmatch(cell))


def as_markdown(table: Table) -> str:
    """Return a table as Markdown, with its title and note."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_SPECIAL.sub(r"\\\g<0>", cell) for cell in cells) + " |"

    rows = [[format_cell(cell, table.digits) for cell in row] for row in table.rows]
    rule = f"|{'|'.join('--:' if right else '---' for right in on_the_right(table))}|"
    note = f"\n\n{table.note}" if table.note else ""
    return "\n".join([f"**{table.title}**", "", line(table.columns), rule, *map(line, rows)]) + note + "\n"


def as_latex(table: Table) -> str:
    """Return a table as LaTeX; it needs the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return f"{' & '.join(map(latex, cells))} \\\\"

    rows = [line([format_cell(cell, table.digits) for cell in row]) for row in table.rows]
    for number in sorted(table.strong, reverse=True):
        if number and number - 1 not in table.strong:
            rows.insert(number, r"\midrule")
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{latex(' '.join([table.title, table.note]).strip())}}}",
            rf"\begin{{tabular}}{{{''.join('r' if right else 'l' for right in on_the_right(table))}}}",
            r"\toprule",
            line(table.columns),
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def latex(text: str) -> str:
    """Return text with what LaTeX would read as commands escaped."""
    return "".join(_LATEX.get(character, character) for character in printable(text))


def on_the_right(table: Table) -> list[bool]:
    """Return which columns hold numbers."""
    columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns)
    filled = [[cell for cell in column if cell not in (None, "", "-")] for column in columns]
    return [bool(cells) and all(map(is_number, cells)) for cells in filled]


def flatten(results: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    """Return results as rows under a header, one a result: a list in it fills columns that end in _1, _2, …

    Every result has the same keys, and so has every entry of a list; rows are filled up to the longest list.
    """
    rows: list[dict[str, Cell]] = [dict(_flat(result)) for result in results]
    columns = max((list(row) for row in rows), key=len, default=[])
    return [[*columns], *([row.get(column) for column in columns] for row in rows)]


def _flat(result: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    for key, value in result.items():
        if isinstance(value, list):
            for number, entry in enumerate(value, 1):
                yield from ((f"{name}_{number}", cell) for name, cell in entry.items())
        else:
            yield key, value


def as_csv(rows: Sequence[Sequence[Cell]]) -> str:
    """Return rows as CSV; numbers with all their digits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
