"""`dpn finetune`: VTAB-1k, and 384 px."""

from __future__ import annotations

import typer

from dpn_cli.commands import train, trainers

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn finetune vtab --data demo --compare none,dpn",
)
train.add_command(app, "vtab", trainers.VTAB)
train.add_command(app, "highres", trainers.HIGHRES)
