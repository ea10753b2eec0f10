"""Folder of a page: the HTML file, its figures and its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup

from dpn_cli.report.charts import draw
from dpn_cli.report.content import PAGE, Chart, PageSection, Table
from dpn_cli.report.html import render
from dpn_cli.report.tables import as_csv, as_latex, as_markdown
from dpn_cli.run.files import replace_file, replace_text

FIGURES = "figures"


def write_page(
    folder: Path, title: str, sections: Sequence[PageSection], check: Callable[[], object] = lambda: None
) -> Path:
    """Write a page with its tables and figures to a folder and return the page's path.

    ``report.html`` holds the page, ``figures`` every chart as PNG and its numbers as CSV, ``table.md`` and
    ``table.tex`` the tables that have a name. Figures of an earlier page there are deleted. `check` is called before
    every chart, and may raise. Raises `SaveError`.
    """
    _clear(folder)
    svgs: dict[str, Markup] = {}
    for chart in (part for section in sections for part in section.parts if isinstance(part, Chart)):
        assert chart.name not in svgs, f"two charts have the name {chart.name}"
        check()
        svg, png = draw(chart, chart.name)
        svgs[chart.name] = Markup(svg)
        replace_file(folder / FIGURES / f"{chart.name}.png", partial(Path.write_bytes, data=png))
        replace_text(folder / FIGURES / f"{chart.name}.csv", as_csv(chart.rows()))
    tables = [part for section in sections for part in section.parts if isinstance(part, Table) and part.name]
    replace_text(folder / "table.md", "\n".join(map(as_markdown, tables)))
    replace_text(folder / "table.tex", "\n".join(map(as_latex, tables)))
    replace_text(folder / PAGE, render(title, sections, svgs))
    return folder / PAGE


def _clear(folder: Path) -> None:
    if (folder / PAGE).is_file():
        for ending in ("png", "csv"):
            for path in (folder / FIGURES).glob(f"*.{ending}"):
                path.unlink()
