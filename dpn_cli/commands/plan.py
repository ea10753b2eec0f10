"""`dpn plan`: what a training will cost."""

from __future__ import annotations

import json
from typing import Any

import typer

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.flags import with_signature
from dpn_cli.commands.tasks import PRETRAIN
from dpn_cli.commands.training import CONFIG_OPTIONS, JSON, VERBOSE, option
from dpn_cli.recipe.flag import DATA, RUNTIME
from dpn_cli.run.console import Console, show
from tasks.classify.pretrain_recipe import settle

KEYS = frozenset(("arch", "stem", "image_size", "data", "steps", "epochs", "batch_size", "precision", "device"))

app = typer.Typer(
    no_args_is_help=True,
    help="What a training will cost: steps, hours, disk.",
    epilog="Example: dpn plan pretrain --arch B/16",
)


def pretrain(**arguments: Any) -> None:
    """Steps, hours and disk of a pre-training, from FLOP counts and this device's matrix-product rate."""
    with one_line_errors(arguments):
        here = arguments["data"] is not None
        recipe = settle(PRETRAIN.layers({**arguments, "data": arguments["data"] or "imagenet"}, Console().info))
        from tasks.classify.plan import describe_plan, estimate

        result = estimate(recipe, arguments["images"], here=here, ranks=arguments["ranks"])
        show(json.dumps(result, indent=2) if arguments["json"] else describe_plan(result))


OPTIONS = (
    option(
        "images",
        int | None,
        None,
        "--images",
        min=1,
        help="Images to train on (minival is not among them), where the data are not here. "
        "\\[default: those of --data, else ImageNet-1k's]",
        panel=DATA,
    ),
    option("ranks", int, 1, "--ranks", min=1, help="Devices like this one. \\[default: 1]", panel=RUNTIME),
)
app.command("pretrain", epilog="Example: dpn plan pretrain --arch B/16 --images 1268355")(
    with_signature(pretrain, [*PRETRAIN.extra, *PRETRAIN.parameters(KEYS), *OPTIONS, *CONFIG_OPTIONS, JSON, VERBOSE])
)
