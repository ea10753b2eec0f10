"""`dpn pretrain`, from a settled recipe to a result: one training, or the stages of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.classifier import WEIGHTS
from dpn_cli.console import Console
from dpn_cli.data.classified import ClassData, open_tuning_data
from dpn_cli.distributed import World, barrier
from dpn_cli.errors import NonFiniteError
from dpn_cli.run import open_folder
from dpn_cli.runstate import RunFolder
from dpn_cli.supervised import command
from dpn_cli.supervised.recipe import SupervisedRecipe, in_steps
from dpn_cli.supervised.train import train_classifier
from tasks.pretrain.recipe import PretrainRecipe, cells, differences, runs_of
from tasks.pretrain.table import PAPER

Json = dict[str, Any]
DEMO_NOTE = (
    "This is the demo: generated scenes and a tower of 220,000 weights. Nothing here is an ImageNet number. "
    "For images of your own: dpn pretrain --arch S/16 --data FOLDER"
)


def start(
    recipe: PretrainRecipe, output_dir: Path | None, *, resume: bool, overwrite: bool, dry_run: bool, console: Console
) -> Json | None:
    """Train and return the result; None on ranks that do not lead and after a dry run.

    Raises `DpnError` and its kin, each with the exit code of its cause.
    """
    if recipe.demo:
        console.info(DEMO_NOTE)
    differing = differences(recipe)
    if differing:
        console.info(f"differs from Appendix C, whose value follows in brackets: {'; '.join(differing)}")

    def train(data: ClassData, folder: RunFolder, world: World) -> Json:
        if recipe.stages:
            return _Sweep(recipe, data, folder, world, console).run()
        counted = in_steps(recipe, len(data.train.labels), console.info)
        return train_classifier(
            counted, data, "pretrain", folder, world, console, {"differs_from_appendix_c": differing}
        )

    return command.start(
        recipe,
        "pretrain",
        output_dir,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        console=console,
        folder=_folder(recipe),
        open_data=open_tuning if recipe.stages else command.open_data,
        train=train,
        runs=runs_of(recipe) if recipe.stages else (),
    )


def _folder(recipe: PretrainRecipe) -> str:
    """Return the folder below ``runs/``: one for each recipe, so that none stands in another's way."""
    if recipe.stages:
        return "pretrain_sweep"
    return "pretrain" if recipe.epochs is None or recipe.epochs == PAPER["epochs"] else f"pretrain_{recipe.epochs:g}ep"


def open_tuning(recipe: SupervisedRecipe) -> ClassData:
    """Open the three splits of a sweep: `minival` is the one to choose on, `val` the one to test on."""
    return open_tuning_data(command.source_of(recipe))


class _Sweep:
    """Stages of trainings, each a run folder of its own; what a stage chooses is carried on to the next."""

    def __init__(
        self, recipe: PretrainRecipe, data: ClassData, folder: RunFolder, world: World, console: Console
    ) -> None:
        self.recipe, self.data, self.folder, self.world, self.console = recipe, data, folder, world, console

    def run(self) -> Json:
        """Run all stages; only the last one, a single training, is scored on the test split."""
        searching = replace(self.data, val=self.data.minival)
        chosen, stages = self.recipe, list[Json]()
        for number, stage in enumerate(self.recipe.stages[:-1], 1):
            runs = list(cells(chosen, stage))
            results = [
                self._cell(f"stage{number}/{name}", cell, searching, f"{place} of {len(runs)}")
                for place, (name, cell) in enumerate(runs, 1)
            ]
            scores = [-1.0 if result["minival_top1"] is None else result["minival_top1"] for result in results]
            if max(scores) < 0:
                raise NonFiniteError(f"stage {number}: every run ended with a loss that is no number; lower lr")
            best = scores.index(max(scores))
            chosen = runs[best][1]
            stages.append(
                {
                    "epochs": stage.epochs,
                    "top1": {name: result["minival_top1"] for (name, _), result in zip(runs, results, strict=True)},
                    "chosen": runs[best][0],
                }
            )
            self.console.info(f"stage {number}: {runs[best][0]} is best, {scores[best]:.2f} % on the validation split")
        last = len(self.recipe.stages)
        ((name, final),) = cells(chosen, self.recipe.stages[-1])
        result = self._cell(f"stage{last}/{name}", final, self.data, "1 of 1")
        if result["minival_top1"] is None:
            raise NonFiniteError(f"stage {last}: the loss is no number; lower lr")
        weights = f"stage{last}/{name}/{WEIGHTS}"
        whole = {**result, "stages": stages, "weights": weights}
        if self.world.leads:
            self.folder.finish(whole)
        return whole

    def _cell(self, place: str, recipe: PretrainRecipe, data: ClassData, shown: str) -> Json:
        """Run one training or return its result, without a score when its loss became no number."""
        folder = open_folder(self.folder.path / place, recipe, self.world, resume=True, overwrite=False)
        if (result := folder.result) is not None:
            return result
        self.console.info(f"{place} ({shown})")
        try:
            counted = in_steps(recipe, len(data.train.labels))
            result = train_classifier(counted, data, "pretrain", folder, self.world, self.console)
        except NonFiniteError as error:
            self.console.warn(f"{place}: {error}")
            result = {"task": "pretrain", "minival_top1": None, "error": str(error)}
            if self.world.leads:
                folder.finish(result)
            return result
        if data.val is data.minival and self.world.leads:
            (folder.path / WEIGHTS).unlink()  # a search leaves its numbers, not a network per cell
        barrier()
        return result


def describe(result: Json) -> str:
    """Return the result as a few lines for a person."""
    lines = []
    for number, stage in enumerate(result.get("stages", ()), 1):
        top1: dict[str, float | None] = stage["top1"]
        values: Sequence[float] = [value for value in top1.values() if value is not None]
        lines.append(
            f"stage {number}, {len(top1)} runs of {stage['epochs']:g} epochs: {stage['chosen']}, "
            f"{max(values):.2f} % on validation"
        )
    return "\n".join([*lines, command.describe(result)])
