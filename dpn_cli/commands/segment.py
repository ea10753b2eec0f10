"""`dpn segment ade20k`, `folder`, `eval` and `predict`."""

from __future__ import annotations

from typing import Any

import typer

from dpn_cli.commands import train
from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.commands.trainers import ADE20K, FOLDER, module_of, segment_options
from dpn_cli.run.console import Console, printable

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn segment ade20k --arch B/16 --checkpoint B-16-dpn.npz --data ADEChallengeData2016 "
    "--fraction 0.25",
)


train.add_command(app, "ade20k", ADE20K)
train.add_command(app, "folder", FOLDER)


@register_command(
    app,
    "eval",
    segment_options.SegmentEvalOptions,
    "dpn segment eval runs/segment_ade20k/B-16-dpn --multi-scale -o report",
)
def _evaluate(options: segment_options.SegmentEvalOptions, console: Console) -> Outcome:
    """Report the mIoU of a run on its validation images, per class with -o."""
    task = module_of("segment eval")
    return task.evaluate(options, console), task.describe_scores


@register_command(
    app,
    "predict",
    segment_options.SegmentPredictOptions,
    "dpn segment predict runs/segment_ade20k/B-16-dpn photos -o predictions",
)
def _predict(options: segment_options.SegmentPredictOptions, console: Console) -> Outcome:
    """Segment images: write label maps, coloured overlays and a legend as PNG files."""
    task = module_of("segment predict")

    predictions = task.predict(options, console)
    return predictions.results, _describe, predictions.problem(options.skip_bad_images)


def _describe(images: list[dict[str, Any]]) -> str:
    return "\n".join(map(_describe_image, images))


def _describe_image(result: dict[str, Any]) -> str:
    class_shares = ", ".join(f"{printable(entry['name'])} {entry['share']:.1%}" for entry in result["classes"][:6])
    remainder = f" and {len(result['classes']) - 6} more" if len(result["classes"]) > 6 else ""
    files = "  ".join(printable(result[name]) for name in ("labels", "overlay", "legend"))
    return f"{printable(result['image'])}: {class_shares}{remainder}\n  {files}"
