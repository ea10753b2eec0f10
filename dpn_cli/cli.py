"""The command line: what is called how. Torch loads with the task, not with the help."""

from __future__ import annotations

from typing import Annotated

import typer

from dpn_cli import __version__
from dpn_cli.commands import checkpoint, data, evaluate, highres, lit, pretrain, recipes, segment, vtab

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune Dual PatchNorm Vision Transformers (arXiv 2302.01327) and their rivals.",
    epilog="Example: dpn finetune vtab --arch B/32",
)
finetune = typer.Typer(
    no_args_is_help=True,
    help="Fine-tune the whole network on labelled images.",
    epilog="Example: dpn finetune vtab --data demo --compare none,dpn",
)
finetune.command(epilog="Example: dpn finetune vtab --arch B/32 --checkpoint B-32-dpn.npz --data vtab-1k")(vtab.vtab)
finetune.command(
    epilog="Example: dpn finetune highres --checkpoint B-32.npz --data photos --val-fraction 0.2 --epochs 8"
)(highres.highres)
app.add_typer(finetune, name="finetune")
app.add_typer(lit.app, name="lit")
app.command(epilog="Example: dpn pretrain imagenet --arch B/32 --data imagenet")(pretrain.pretrain)
app.add_typer(pretrain.plan, name="plan")
app.add_typer(evaluate.app, name="eval")
app.command(epilog="Example: dpn predict runs/highres/B-32-dpn photo.jpg")(evaluate.predict)
app.command(epilog="Example: dpn export runs/highres/B-32-dpn --to onnx -o export")(evaluate.export)
app.add_typer(segment.app, name="segment")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")


def main() -> None:
    """Run the command line; the entry point of ``dpn``."""
    app()


def _version(asked: bool) -> None:
    if asked:
        print(f"dpn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
