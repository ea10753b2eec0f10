"""`dpn finetune highres`, from a settled recipe to a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.recipe.start import Place
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console
from dpn_cli.run.session import session
from dpn_cli.weights.origin import with_own_stem
from tasks.classify import common as command
from tasks.classify.classifier import WEIGHTS
from tasks.classify.highres_recipe import HighresRecipe
from tasks.classify.recipe import in_steps
from tasks.classify.train import train_classifier

DEMO_NOTE = (
    "This is the demo: generated scenes. Nothing here is an ImageNet number. "
    "For your own pictures: dpn finetune highres --data FOLDER --checkpoint WEIGHTS"
)


def run(recipe: HighresRecipe, place: Place, console: Console) -> dict[str, Any] | None:
    """Fine-tune and return the result; None on ranks that do not lead and after a dry run."""
    if recipe.demo:
        console.info(DEMO_NOTE)
    recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    with session(recipe, recipe.runtime, "classifier", place, default_folder(recipe), console) as begun:
        if place.dry_run:
            command.dry_run(begun, command.open_data(recipe), [recipe], place)
            return None
        result = begun.folder.result
        if result is None:
            data = command.open_data(begun.recipe)
            counted = in_steps(begun.recipe, len(data.train.labels), console.info)
            result = train_classifier(replace(begun, recipe=counted), data, "highres")
        console.info(f"weights: {begun.folder.path / WEIGHTS}, for --checkpoint of any command")
        return result if begun.world.leads else None


def default_folder(recipe: HighresRecipe) -> Path:
    """Return runs/highres/ARCH-STEM."""
    return command.default_folder(recipe, "highres_demo" if recipe.demo else "highres")


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(command.describe_training(result))
