"""`dpn eval`, `dpn eval fewshot`, `dpn predict` and `dpn export`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console as RichConsole
from rich.table import Column, Table

from dpn_cli.commands.command import DefaultGroup, Outcome, register_command
from dpn_cli.commands.report import write_final_page
from dpn_cli.commands.train import sweep_error
from dpn_cli.commands.trainers import classify_options, module_of
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.run.console import Console, cell, show

DRAWS = "draws of the images"
# Images whose classes are listed on a terminal; of more, the number of each class is.
MOST_LISTED = 20


class _ScoreByDefault(DefaultGroup):
    default = "score"


app = typer.Typer(
    cls=_ScoreByDefault,
    no_args_is_help=True,
    epilog="Example: dpn eval runs/highres/B-32-dpn --data photos",
)


@register_command(app, "score", classify_options.EvalOptions, "dpn eval runs/highres/B-32-dpn --data photos -o report")
def _score(options: classify_options.EvalOptions, console: Console) -> Outcome:
    """Report top-1, top-5 and loss of a classifier, per-class scores and confusions (the default)."""
    task = module_of("eval")

    return task.evaluate(options, console), task.describe_scores


@register_command(
    app, "fewshot", classify_options.ProbeOptions, "dpn eval fewshot B-32-dpn.npz --data imagenet --shots 1,5,10,25"
)
def _fewshot(options: classify_options.ProbeOptions, console: Console) -> Outcome:
    """Score a frozen backbone with few-shot ridge regression, the paper's metric."""
    if options.compare or options.run.output_dir:
        return _probe_sweep(options, console)
    task = module_of("eval fewshot")

    return task.fewshot(options, console), task.describe_probe


def _probe_sweep(options: classify_options.ProbeOptions, console: Console) -> Outcome:
    from dpn_cli.sweep.pairs import print_tables

    folder, folders = options.run, list[Path]()
    launch = LaunchOptions(folder.output_dir, folder.resume, folder.overwrite, on_open=folders.append)
    result = module_of("eval fewshot --compare").probe_sweep(options, launch, console)
    if not folder.no_report:
        write_final_page(folders[0], console)
    return result, partial(print_tables, trials=DRAWS), sweep_error(result["failed"], DRAWS)


def add_to(root: typer.Typer) -> None:
    """Add ``predict`` and ``export`` to the root of all commands."""
    register_command(
        root,
        "predict",
        classify_options.PredictOptions,
        "dpn predict runs/highres/B-32-dpn photos --html predictions.html",
    )(_predict)
    register_command(
        root,
        "export",
        classify_options.ExportOptions,
        "dpn export runs/highres/B-32-dpn --to onnx -o export",
        quiet=False,
    )(_export)


def _predict(options: classify_options.PredictOptions, console: Console) -> Outcome:
    """Classify images with a trained run."""
    task = module_of("predict")

    predictions = task.predict(options, console)
    return predictions.results, _print_guesses, predictions.problem(options.skip_bad_images)


def _print_guesses(results: list[dict[str, Any]]) -> None:
    """Print the classes of every image; on a terminal, the number of images of each class where there are many."""
    if len(results) > MOST_LISTED and RichConsole().is_terminal:
        _print_counts(results)
        return
    table = Table(Column("image", overflow="fold"), "class", "probability", box=None, padding=(0, 2, 0, 0))
    for result in results:
        for rank, guess in enumerate(result["classes"]):
            image = "" if rank else cell(result["image"])
            table.add_row(image, cell(guess["name"]), f"{guess['probability']:.1%}")
    RichConsole(highlight=False, soft_wrap=True).print(table)


def _print_counts(results: list[dict[str, Any]]) -> None:
    counts = Counter(result["classes"][0]["name"] for result in results)
    table = Table(Column("class", overflow="fold"), Column("images", justify="right"), box=None, padding=(0, 2, 0, 0))
    for name, count in counts.most_common():
        table.add_row(cell(name), f"{count:,}")
    RichConsole(highlight=False, soft_wrap=True).print(table)
    show(f"{len(results):,} images; --csv or --html writes the classes of each, and so does a pipe")


def _export(options: classify_options.ExportOptions, console: Console) -> Outcome:
    """Export a run's classifier with a model card, and verify its outputs."""
    task = module_of("export")

    return (
        task.export(options.run, options.output_dir, options.to),
        lambda report: (
            f"{report['path']}: on {report['images']} random images it gives the outputs of {options.run} "
            f"(largest difference {report['difference']:.1e}, relative); {report['card']} describes it"
        ),
    )
