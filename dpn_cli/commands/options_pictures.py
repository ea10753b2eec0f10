"""The options of every command that reads picture files."""

from __future__ import annotations

from typing import Annotated

import typer

from dpn_cli.options import DATA

Decode = Annotated[
    str | None,
    typer.Option(
        "--decode",
        help="Pixels of JPEGs: exact (the reference's) or pillow. \\[default: exact]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
RunsDecode = Annotated[
    str | None,
    typer.Option(
        "--decode",
        help="Pixels of JPEGs: exact (the reference's) or pillow. \\[default: the run's]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels",
        min=1,
        help="Most pixels of a picture. Larger JPEGs are read at a half, quarter or eighth of their size, other large "
        "pictures are refused. \\[default: 178956970]",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
