"""One HTML page with everything inside it: no script, no network, light or dark as the reader's system is.

Names and paths come from elsewhere: Jinja2 escapes every text.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpn_cli.report.charts import draw
from dpn_cli.report.content import PAGE, Chart, Gallery, Part, Section, Table, Text
from dpn_cli.report.tables import as_csv, as_latex, as_markdown, is_number, on_the_right, shown
from dpn_cli.run.console import printable
from dpn_cli.run.files import replace_file, replace_text

FIGURES = "figures"


def write_page(
    folder: Path, title: str, sections: Sequence[Section], check: Callable[[], object] = lambda: None
) -> Path:
    """Write a page with its tables and figures to a folder and return the page's path.

    ``report.html`` holds the page, ``figures`` every chart as PNG and its numbers as CSV, ``table.md`` and
    ``table.tex`` the tables that have a name. Figures of an earlier page there are deleted. `check` is called before
    every chart, and may raise. Raises `SaveError`.
    """
    _clear(folder)
    svgs: dict[str, Markup] = {}
    for chart in (part for section in sections for part in section.parts if isinstance(part, Chart)):
        assert chart.name not in svgs, f"two charts are called {chart.name}"
        check()
        svg, png = draw(chart, chart.name)
        svgs[chart.name] = Markup(svg)
        replace_file(folder / FIGURES / f"{chart.name}.png", partial(Path.write_bytes, data=png))
        replace_text(folder / FIGURES / f"{chart.name}.csv", as_csv(chart.rows()))
    named = [part for section in sections for part in section.parts if isinstance(part, Table) and part.name]
    replace_text(folder / "table.md", "\n".join(map(as_markdown, named)))
    replace_text(folder / "table.tex", "\n".join(map(as_latex, named)))
    replace_text(folder / PAGE, render(title, sections, svgs))
    return folder / PAGE


def _clear(folder: Path) -> None:
    if (folder / PAGE).is_file():
        for ending in ("png", "csv"):
            for path in (folder / FIGURES).glob(f"*.{ending}"):
                path.unlink()


def render(title: str, sections: Sequence[Section], svgs: dict[str, Markup]) -> str:
    """Return a page; `svgs` holds every chart by its name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests |= {
        "chart": lambda part: isinstance(part, Chart),
        "table": lambda part: isinstance(part, Table),
        "gallery": lambda part: isinstance(part, Gallery),
        "text": lambda part: isinstance(part, Text),
        "numeric": is_number,
    }
    environment.filters |= {
        "shown": shown,
        "on_the_right": on_the_right,
        "data_uri": _data_uri,
        "anchor": anchor,
        "gathered": _gathered,
    }
    return environment.get_template("page.html").render(title=title, sections=sections, svgs=svgs) + "\n"


def anchor(title: str) -> str:
    """Return a title as an id: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _gathered(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts of a section in order, neighbouring charts together."""
    groups: list[list[Part]] = []
    for chart, neighbours in groupby(parts, lambda part: isinstance(part, Chart)):
        members = list(neighbours)
        groups += [members] if chart else [[part] for part in members]
    return groups


def _one_line(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(value)


def _data_uri(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{b64encode(data).decode()}"
