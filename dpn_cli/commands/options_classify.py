"""Options of `dpn finetune highres` and `dpn pretrain`, which train a classifier; segment has `--flip` too."""

from __future__ import annotations

from typing import Annotated

import typer

from dpn_cli import options

Flip = Annotated[
    bool | None,
    typer.Option(
        "--flip/--no-flip",
        help="Mirror every second training image; not for digits, letters or sides. \\[default: flip]",
        rich_help_panel=options.DATA,
        show_default=False,
    ),
]
EmaOption = Annotated[
    float | None,
    typer.Option(
        "--ema",
        help="Decay of the averaged weights that are evaluated and kept. \\[default: none]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
HighresSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Optimizer steps; fewer than the default shorten the warm-up as much. \\[default: 5000]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
Mixup = Annotated[
    float | None,
    typer.Option(
        "--mixup",
        help="Strength p of mixup, Beta(p, p); 0 for none. \\[default: 0]",
        rich_help_panel=options.TRAIN,
        show_default=False,
    ),
]
