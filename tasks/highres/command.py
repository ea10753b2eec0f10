"""`dpn finetune highres`, from a settled recipe to a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpn_cli.console import Console
from dpn_cli.run import with_own_stem
from dpn_cli.supervised import command
from tasks.highres.recipe import HighresRecipe

DEMO_NOTE = (
    "This is the demo: generated scenes and a small network from scratch. Nothing here is an ImageNet number. "
    "For your own pictures: dpn finetune highres --data FOLDER --checkpoint WEIGHTS"
)


def start(
    recipe: HighresRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> dict[str, Any] | None:
    """Fine-tune and return the result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    if recipe.demo:
        console.info(DEMO_NOTE)
    recipe = recipe.model_copy(update={"backbone": with_own_stem(recipe.backbone, console)})
    return command.start(
        recipe, "highres", output_dir, resume=resume, overwrite=overwrite, dry_run=dry_run, console=console
    )
