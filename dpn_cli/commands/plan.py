"""`dpn plan`: estimate the cost of a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import typer

from dpn_cli.commands import one_line_errors
from dpn_cli.commands.estimate import format_hours, print_costs
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import CONFIG_OPTIONS, JSON, VERBOSE, option, with_signature
from dpn_cli.commands.trainers import DISTILL, PRETRAIN, VTAB, module_of
from dpn_cli.config.cost import total_disk, total_hours
from dpn_cli.config.option import DATA, MODEL, RUNTIME
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console, gigabytes, show

KEYS = frozenset(
    (
        *("arch", "stem", "norm", "placement", "image_size", "data"),
        *("steps", "epochs", "batch_size", "precision", "device"),
    )
)
DISTILL_KEYS = KEYS - {"arch"} | {*("teacher", "student_arch", "start", "stem_share", "cache_teacher")}
PRETRAIN_KEYS = KEYS | {"shard", "micro_batch_size"}
VTAB_KEYS = (PRETRAIN_KEYS - {"epochs"}) | {*("checkpoint", "compare", "tasks", "protocol", "lrs", "seeds")}
TEACHER_ARCH = "B/32"

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn plan pretrain --arch B/16",
)


def pretrain(**arguments: Any) -> None:
    """Estimate steps, hours, memory and disk from FLOP counts and this device's measured speed."""
    with one_line_errors(arguments):
        count_data = arguments["data"] is not None
        console = Console()
        layers = PRETRAIN.layers({**arguments, "data": arguments["data"] or "imagenet"}, console.info)
        config = PRETRAIN.finalize(layers, console, True)
        task = module_of("plan pretrain")
        plan = task.estimate(config, arguments["images"], count_data=count_data, ranks=arguments["ranks"])
        _show(plan, task.describe_plan, arguments)


def distill(**arguments: Any) -> None:
    """Estimate steps, hours and disk from FLOP counts and this device's measured speed."""
    with one_line_errors(arguments):
        count_data, arch = arguments["data"] is not None, arguments["teacher_arch"]
        config = DISTILL.layers({**arguments, "data": arguments["data"] or "imagenet"}, Console().info)
        if config.teacher and arch:
            raise DpnError(f"--teacher-arch {arch}: the weights of --teacher {config.teacher} say it; leave one out")
        task, ranks = module_of("plan distill"), arguments["ranks"]
        plan = task.estimate(config, arch or TEACHER_ARCH, arguments["images"], count_data=count_data, ranks=ranks)
        _show(plan, task.describe_plan, arguments)


def vtab(**arguments: Any) -> None:
    """Estimate memory, hours and disk of a sweep from FLOP counts and this device's measured speed."""
    with one_line_errors(arguments):
        config = VTAB.layers({**arguments, "data": arguments["data"] or "vtab-1k"}, Console().info)
        task = module_of("plan vtab")
        costs, device = task.estimate(config, arguments["ranks"])
        totals = {"hours": total_hours(costs), "disk": total_disk(costs)}
        if arguments["json"]:
            facts = {"task": "plan vtab", "device": device, "ranks": arguments["ranks"]}
            show(json.dumps({**facts, "networks": [cost.to_dict() for cost in costs], **totals}, indent=2))
            return
        print_costs(costs)
        show(
            f"{format_hours(totals['hours'])} hours on {arguments['ranks']} x {device} at half of its matrix-product "
            "rate, "
            f"which was measured; at most {gigabytes(totals['disk'])} on the disk; reading the images is left out"
        )


def _show(result: dict[str, Any], describe: Callable[[dict[str, Any]], str], arguments: dict[str, Any]) -> None:
    show(json.dumps(result, indent=2) if arguments["json"] else describe(result))


OPTIONS = (
    option(
        "images",
        int | None,
        None,
        "--images",
        min=1,
        help="Images to train on (minival and held-out ones are not among them), where the data are not here. "
        "\\[default: those of --data, else ImageNet-1k's]",
        panel=DATA,
        brief="Number of training images.",
    ),
    option(
        "ranks",
        int,
        1,
        "--ranks",
        min=1,
        help="Number of devices like this one. \\[default: 1]",
        panel=RUNTIME,
        brief="Number of devices like this one.",
    ),
)
app.command("pretrain", cls=OneScreenCommand, epilog="Example: dpn plan pretrain --arch B/16 --images 1268355")(
    with_signature(
        pretrain, [*PRETRAIN.extra, *PRETRAIN.parameters(PRETRAIN_KEYS), *OPTIONS, *CONFIG_OPTIONS, JSON, VERBOSE]
    )
)
app.command("vtab", cls=OneScreenCommand, epilog="Example: dpn plan vtab --arch B/32 --compare none,dpn")(
    with_signature(vtab, [*VTAB.parameters(VTAB_KEYS), OPTIONS[1], *CONFIG_OPTIONS, JSON, VERBOSE])
)
TEACHER = option(
    "teacher_arch",
    str | None,
    None,
    "--teacher-arch",
    help="The teacher, SIZE/PATCH with a plain stem and 1000 classes, where its weights are not here. "
    f"\\[default: --teacher's, else {TEACHER_ARCH}]",
    panel=MODEL,
    brief="Teacher as SIZE/PATCH, without --teacher.",
)
app.command("distill", cls=OneScreenCommand, epilog="Example: dpn plan distill --teacher-arch B/32 --images 10000000")(
    with_signature(distill, [TEACHER, *DISTILL.parameters(DISTILL_KEYS), *OPTIONS, *CONFIG_OPTIONS, JSON, VERBOSE])
)
