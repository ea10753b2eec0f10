"""From command-line options to recipe keys, and to how a command runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dpn_cli import recipe

# The recipe key of every option that is one, whatever the command.
RECIPE_KEYS = {
    "arch": "backbone.arch",
    "stem": "backbone.stem",
    "checkpoint": "backbone.checkpoint",
    "image_size": "backbone.image_size",
    "drop_path": "backbone.drop_path",
    "dropout": "backbone.dropout",
    "eval_fewshot": "fewshot",
    "data": "data.source",
    "val_data": "data.val_source",
    "val_fraction": "data.val_fraction",
    "tasks": "data.tasks",
    "image_column": "data.image_column",
    "label_column": "data.label_column",
    "decode": "data.decode",
    "flip": "data.flip",
    "max_pixels": "data.max_pixels",
    "skip_bad_images": "data.skip_bad_images",
    **{name: f"data.{name}" for name in ("fraction", "classes", "label_offset", "ignore_label", "mask_column")},
    "layer_decay": "optim.layer_decay",
    "images": "data.images",
    "caption_column": "data.caption_column",
    "text_size": "text.size",
    "tokenizer": "text.tokenizer",
    "cache": "cache.use",
    "cache_dir": "cache.folder",
    "views": "cache.views",
    "steps": "schedule.steps",
    **{name: name for name in ("compare", "protocol", "lr", "lrs", "seed", "seeds", "loss", "mixup", "ema", "freeze")},
    **{name: name for name in ("epochs", "batch_size")},
    **{
        name: f"runtime.{name}"
        for name in ("precision", "compile", "micro_batch_size", "device", "workers", "report_to")
    },
}


def recipe_flags(given: Mapping[str, object]) -> dict[str, object]:
    """Return by recipe key those of a command's arguments that are recipe keys."""
    return {RECIPE_KEYS[name]: value for name, value in given.items() if name in RECIPE_KEYS}


def runtime_of(device: str | None, precision: str | None, workers: str | None = None) -> recipe.Runtime:
    """Return how to run a command that has no recipe. Raises `DpnError` for a value that there is not."""
    given = {"device": device, "precision": precision, "workers": workers}
    return recipe.build(recipe.Runtime, {name: value for name, value in given.items() if value is not None}, "options")


def pictures_of(decode: str | None, max_pixels: int | None) -> tuple[Literal["exact", "pillow"] | None, int]:
    """Return how a command without a recipe reads pictures: the decoder that was asked for, and the limit.

    Raises `DpnError` for a value that there is not.
    """
    given = {"decode": decode, "max_pixels": max_pixels}
    built = recipe.build(
        recipe.Pictures, {name: value for name, value in given.items() if value is not None}, "options"
    )
    return (built.decode if decode else None), built.max_pixels
