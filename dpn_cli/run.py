"""A run from its folder to its result: ranks, signals, and what is noted when it ends early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dpn_cli import stopping
from dpn_cli.backbone import LoadReport
from dpn_cli.console import Console
from dpn_cli.distributed import World, from_leader, join, lost_rank
from dpn_cli.errors import DpnError, StoppedError
from dpn_cli.files import claimed
from dpn_cli.inferred import config_of
from dpn_cli.kinds import Kind
from dpn_cli.recipe import Backbone, Section
from dpn_cli.runstate import Checkpoints, RunFolder
from dpn_cli.sources import open_checkpoint

Result = dict[str, Any]
RecipeT = TypeVar("RecipeT", bound=Section)
BackboneT = TypeVar("BackboneT", bound=Backbone)


def run_name(backbone: Backbone, stems: str | None = None) -> str:
    """Return ARCH-STEM, what a run's folder is called; the weights' name stands for an unsaid arch, and may end so."""
    stems = stems or backbone.stem
    arch = (backbone.arch or Path(backbone.checkpoint or "scratch").stem).replace("/", "-")
    return f"{arch.removesuffix(f'-{stems}')}-{stems}"


def with_own_stem(backbone: BackboneT, console: Console) -> BackboneT:
    """Return a recipe's backbone with the stem that it leaves out: its checkpoint's, or dpn from scratch.

    Says which network the checkpoint is. Raises as `open_checkpoint` and `config_of` do.
    """
    place = backbone.checkpoint or "none"
    if backbone.stem is not None:
        return backbone
    if place == "none" or "{stem}" in place:
        return backbone.model_copy(update={"stem": "dpn"})
    source = open_checkpoint(place)
    config = config_of(source, backbone.arch, backbone.pool, backbone.image_size)
    console.info(f"{source.source}: {config}; its stem is used, since --stem was left out")
    return backbone.model_copy(update={"stem": config.stem})


def describe_start(report: LoadReport, checkpoints: Checkpoints | None) -> str:
    """Say where the weights of a training come from: from the state that it saved, or how they were loaded."""
    if checkpoints and checkpoints.begun:
        millions = report.parameters / 1e6
        return f"{report.network}: from what this run saved in {checkpoints.path} ({millions:.2f} M parameters)"
    return report.summary()


def run_in_folder(
    recipe: RecipeT,
    device: str,
    path: Path,
    run: Callable[[RecipeT, RunFolder, World], Result],
    dry_run: Callable[[World], None] | None,
    *,
    kind: Kind,
    resume: bool,
    overwrite: bool,
    console: Console,
) -> Result | None:
    """Open the run folder `path` and call `run` in it with the recipe, or return the result that is there.

    None on ranks that do not lead, and after a dry run. Raises `DpnError` and its kin.
    """
    if resume and overwrite:
        raise DpnError("--resume --overwrite: the one continues the run that is there, the other deletes it; give one")
    with stopping.listen(), join(device) as world, ExitStack() as claims:
        if dry_run:
            dry_run(world)
            return None
        folder = open_folder(path, recipe, kind, world, console, resume=resume, overwrite=overwrite, claims=claims)
        result = folder.result
        if result is None:
            console.info(f"run folder {path}")
            try:
                with lost_rank():
                    result = run(as_begun(recipe, from_leader(folder.facts)), folder, world)
            except StoppedError:
                if world.leads:
                    folder.update(status="stopped")
                raise
            except DpnError as error:
                if world.leads:
                    folder.update(status="failed", error=str(error))
                raise
        return result if world.leads else None


def as_begun(recipe: RecipeT, facts: Mapping[str, Any]) -> RecipeT:
    """Return the recipe with the decoder that the run of the given run.json began with.

    ``exact`` was Pillow's decoder in runs that began before simplejpeg was among the versions.
    """
    data, versions = getattr(recipe, "data", None), facts.get("versions")
    if versions is None or "simplejpeg" in versions or getattr(data, "decode", None) != "exact":
        return recipe
    assert isinstance(data, Section)
    return recipe.model_copy(update={"data": data.model_copy(update={"decode": "pillow"})})


def open_folder(
    path: Path,
    recipe: Section,
    kind: Kind,
    world: World,
    console: Console,
    *,
    resume: bool,
    overwrite: bool,
    claims: ExitStack | None = None,
) -> RunFolder:
    """Open a run folder on rank 0 and tell all ranks how that went; no other process may use it until `claims` closes.

    Raises as `RunFolder.open` does, and `DpnError` for a folder in which another process is at work.
    """
    problem: DpnError | None = None
    if world.leads:
        try:
            if claims is not None:
                claims.enter_context(claimed(path))
            wanted = recipe.model_dump(mode="json")
            complete = partial(_completed, recipe, RunFolder(path).facts)
            RunFolder.open(path, wanted, kind, resume=resume, overwrite=overwrite, complete=complete, warn=console.warn)
        except DpnError as error:
            problem = error
    problem = from_leader(problem)
    if problem is not None:
        raise problem
    return RunFolder(path)


def _completed(recipe: Section, facts: Mapping[str, Any], saved: Any) -> Any:
    """Return a saved recipe in today's words: keys that it did not have at their defaults, and what ``exact`` was."""
    try:
        whole = type(recipe).model_validate(saved)
    except ValidationError:
        return saved  # what differs is listed key by key
    unchanged = as_begun(recipe, facts) is recipe
    return (as_begun(whole, facts) if unchanged else whole).model_dump(mode="json")
