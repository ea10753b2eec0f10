"""One HTML page with everything inside it: no script, no network, light or dark as the reader's system is.

Names and paths come from elsewhere: Jinja2 escapes every text. Imports no matplotlib.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpn_cli.report.content import Chart, Gallery, Legend, PageSection, Part, Table, TextBlock
from dpn_cli.report.tables import format_cell, is_number, on_the_right
from dpn_cli.run.console import printable


def render(title: str, sections: Sequence[PageSection], svgs: Mapping[str, Markup]) -> str:
    """Return a page; `svgs` holds every chart by its name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_join_lines,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests |= {
        "chart": lambda part: isinstance(part, Chart),
        "table": lambda part: isinstance(part, Table),
        "gallery": lambda part: isinstance(part, Gallery),
        "legend": lambda part: isinstance(part, Legend),
        "text": lambda part: isinstance(part, TextBlock),
        "numeric": is_number,
    }
    environment.filters |= {
        "shown": format_cell,
        "on_the_right": on_the_right,
        "data_uri": _data_uri,
        "anchor": anchor,
        "gathered": _group_charts,
        "breakable": _breakable,
    }
    return environment.get_template("page.html").render(title=title, sections=sections, svgs=svgs) + "\n"


def anchor(title: str) -> str:
    """Return a title as an id: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _group_charts(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts of a section in order, neighbouring charts together."""
    groups: list[list[Part]] = []
    for chart, neighbours in groupby(parts, lambda part: isinstance(part, Chart)):
        members = list(neighbours)
        groups += [members] if chart else [[part] for part in members]
    return groups


def _breakable(line: str) -> Markup:
    """Return a line that breaks after the separators of a path, and before the suffix of a file."""
    parts = re.split(r"(?<=[/_-])|(?=\.[A-Za-z]{2,5}$)", printable(line))
    return Markup("<wbr>").join(parts)


def _join_lines(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(value)


def _data_uri(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{b64encode(data).decode()}"
