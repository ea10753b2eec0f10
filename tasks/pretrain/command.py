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
from tasks.pretrain.recipe import PretrainRecipe, cells, differences

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
    if differing := differences(recipe):
        console.info(f"differs from Appendix C, whose value follows in brackets: {'; '.join(differing)}")

    def train(data: ClassData, folder: RunFolder, world: World) -> Json:
        if recipe.stages:
            return _Sweep(recipe, data, folder, world, console).run()
        counted = in_steps(recipe, len(data.train.labels))
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
        open_data=_open_tuning if recipe.stages else command.open_data,
        train=train,
    )


def _open_tuning(recipe: SupervisedRecipe) -> ClassData:
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
            scores = [-1.0 if result is None else result["minival_top1"] for result in results]
            if max(scores) < 0:
                raise NonFiniteError(f"stage {number}: every run ended with a loss that is no number; lower lr")
            best = scores.index(max(scores))
            chosen = runs[best][1]
            stages.append(
                {
                    "epochs": stage.epochs,
                    "top1": {
                        name: None if result is None else result["minival_top1"]
                        for (name, _), result in zip(runs, results, strict=True)
                    },
                    "chosen": runs[best][0],
                }
            )
            self.console.info(f"stage {number}: {runs[best][0]} is best, {scores[best]:.2f} % on the validation split")
        last = len(self.recipe.stages)
        ((name, final),) = cells(chosen, self.recipe.stages[-1])
        result = self._cell(f"stage{last}/{name}", final, self.data, "1 of 1")
        if result is None:
            raise NonFiniteError(f"stage {last}: the loss is no number; lower lr")
        weights = f"stage{last}/{name}/{WEIGHTS}"
        whole = {**result, "stages": stages, "weights": weights}
        if self.world.leads:
            self.folder.finish(whole)
        return whole

    def _cell(self, place: str, recipe: PretrainRecipe, data: ClassData, shown: str) -> Json | None:
        """Run one training or return its result; None when its loss became no number."""
        folder = open_folder(self.folder.path / place, recipe, self.world, resume=True, overwrite=False)
        if (result := folder.result) is not None:
            return result
        self.console.info(f"{place} ({shown})")
        try:
            counted = in_steps(recipe, len(data.train.labels))
            result = train_classifier(counted, data, "pretrain", folder, self.world, self.console)
        except NonFiniteError as error:
            self.console.warn(f"{place}: {error}")
            return None
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
