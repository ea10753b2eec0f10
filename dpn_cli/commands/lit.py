"""`dpn lit`: train a text tower against a frozen image tower, and use both."""

from __future__ import annotations

import json
from typing import Any

import typer

from dpn_cli.commands import one_line_errors, train
from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.commands.one_screen import OneScreenCommand
from dpn_cli.commands.options import CONFIG_OPTIONS, PRINTING, with_signature
from dpn_cli.commands.trainers import LIT, lit_options, module_of
from dpn_cli.run.console import Console, printable, show

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dpn lit train --checkpoint B-32-dpn.npz --data pairs.csv",
)


train.add_command(app, "train", LIT)
CACHE_KEYS = frozenset(
    (
        *("arch", "stem", "checkpoint", "image_size", "tokenizer", "data", "val_data", "val_fraction", "images"),
        *("image_column", "caption_column", "decode", "max_pixels", "skip_bad_images", "cache_dir", "views", "seed"),
        *("precision", "device", "workers"),
    )
)


def cache(**arguments: Any) -> None:
    """Encode all images and cache the features, as 'train' does; continues after a stop."""
    with one_line_errors(arguments):
        console = Console(quiet=arguments["quiet"])
        config = LIT.finalize(LIT.layers(arguments, console.info), console, False)
        task = module_of("lit cache")

        result = task.fill_cache(config, console)
        if result is not None:
            show(json.dumps(result, indent=2) if arguments["json"] else task.describe_cache(result))


app.command(cls=OneScreenCommand, epilog="Example: dpn lit cache --checkpoint B-32-dpn.npz --data pairs.csv")(
    with_signature(cache, [*LIT.parameters(CACHE_KEYS), *CONFIG_OPTIONS, *PRINTING])
)


@register_command(
    app, "eval", lit_options.LitEvalOptions, "dpn lit eval runs/lit/B-32-dpn --data imagenet --prompts clip_best"
)
def _evaluate(options: lit_options.LitEvalOptions, console: Console) -> Outcome:
    """Report zero-shot accuracy on labelled images, or recall at 1, 5 and 10 on captioned images."""
    task = module_of("lit eval")

    return task.evaluate(options, console), task.describe_scores


@register_command(
    app,
    "predict",
    lit_options.ZeroShotOptions,
    'dpn lit predict runs/lit/B-32-dpn photos --labels "a cat,a dog" --csv labels.csv',
)
def _predict(options: lit_options.ZeroShotOptions, console: Console) -> Outcome:
    """Rank labels by how well they fit an image."""
    task = module_of("lit predict")

    predictions = task.predict(options, console)
    return predictions.results, _describe_labels, predictions.problem(options.skip_bad_images)


def _describe_labels(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        lines.append(printable(result["image"]))
        for guess in result["labels"]:
            lines.append(f"  {guess['probability']:6.1%}  cosine {guess['cosine']:+.3f}  {printable(guess['label'])}")
    return "\n".join(lines)


@register_command(
    app,
    "search",
    lit_options.SearchOptions,
    'dpn lit search runs/lit/B-32-dpn --images photos --query "a dog on a beach"',
)
def _search(options: lit_options.SearchOptions, console: Console) -> Outcome:
    """Find the images that best match a sentence; image features are cached."""
    task = module_of("lit search")

    matches = task.search(options, console)
    if matches is None:
        return None, str
    return matches.results, _describe_nearest, matches.problem(options.skip_bad_images)


def _describe_nearest(matches: list[dict[str, Any]]) -> str:
    return "\n".join(f"{match['cosine']:.3f}  {printable(match['image'])}" for match in matches)


@register_command(
    app, "export", lit_options.LitExportOptions, "dpn lit export runs/lit/B-32-dpn -o export", quiet=False
)
def _export(options: lit_options.LitExportOptions, console: Console) -> Outcome:
    """Export both towers and the tokenizer with a model card, and verify their features."""
    task = module_of("lit export")

    return (
        task.export(options.run, options.output_dir),
        lambda result: (
            f"{result['path']}: gives the features of {options.run}; {result['config']} and README.md describe it"
        ),
    )
