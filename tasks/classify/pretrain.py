"""`dpn pretrain`, from a finalized config to a result: one training, or the stages of a sweep."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import read_config
from dpn_cli.config.provenance import shipped_of
from dpn_cli.data.splits import ClassData
from dpn_cli.errors import NonFiniteError
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import barrier, from_leader
from dpn_cli.run.files import read_object, replace_json
from dpn_cli.run.run import Run, open_folder, open_run
from dpn_cli.weights.resolve_stem import resolve_stem
from tasks.classify.classifier import WEIGHTS, load_classifier
from tasks.classify.config import resolve_steps
from tasks.classify.data import open_data, open_tuning_splits
from tasks.classify.dry_run import dry_run
from tasks.classify.preflight import augment_by_images
from tasks.classify.pretrain_config import PretrainConfig, Stage, list_trials, trials
from tasks.classify.train import default_folder as task_folder
from tasks.classify.train import describe_training, evaluate, train

Json = dict[str, Any]
Training = tuple[Run[PretrainConfig], ClassData]
DEMO_NOTE = (
    "This is the demo: generated scenes. Nothing here is an ImageNet number. "
    "For images of your own: dpn pretrain --arch S/16 --data FOLDER"
)


def run(config: PretrainConfig, launch: LaunchOptions, console: Console) -> Json | None:
    """Train and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    config = config.model_copy(update={"backbone": resolve_stem(config.backbone, console)})
    with open_run(config, config.runtime, "classifier", launch, default_folder(config), console) as run:
        if launch.dry_run:
            data = _open_data(config)
            dry_run(run, data, list_trials(augment_by_images(config, data, console.info)), launch)
            return None
        result = run.folder.result
        if result is None:
            data = _open_data(run.config)
            run = replace(run, config=augment_by_images(run.config, data, console.info))
            if run.config.stages:
                sweep = _Sweep(run, data)
                for trial_config, split in sweep.trainings():
                    try:
                        train(trial_config, split, "pretrain")
                    except NonFiniteError as error:
                        sweep.note_failure(trial_config, error)
                result = sweep.result
            else:
                counted = resolve_steps(run.config, len(data.train.labels), console.info)
                result = train(replace(run, config=counted), data, "pretrain")
        weights = run.folder.path / result.get("weights", WEIGHTS)
        console.info(f"weights: {weights}, for --checkpoint of any command")
        return result if run.world.leads else None


def show(result: Json) -> None:
    """Print a result on stdout."""
    terminal.show(describe_pretraining(result))


def _open_data(config: PretrainConfig) -> ClassData:
    return open_tuning_splits(config) if config.stages else open_data(config)


def default_folder(config: PretrainConfig) -> Path:
    """Return runs/TASK/ARCH-STEM, with a TASK for each config, so that runs do not collide."""
    return task_folder(config, _task(config))


def _task(config: PretrainConfig) -> str:
    if config.demo:
        return "pretrain_demo"
    if config.stages:
        return "pretrain_sweep"
    shipped = shipped_of(config.about.table) or "pretrain_own"
    if shipped == "pretrain_cifar":  # of several data sets
        data_name = re.split("[/:]", (config.data.source or "").rstrip("/"))[-1]
        return f"pretrain_{data_name}" if config.epochs is None else f"pretrain_{data_name}_{config.epochs:g}ep"
    is_usual = shipped == "pretrain_own" or config.epochs in (None, read_config(shipped).get("epochs"))
    return shipped if is_usual else f"{shipped}_{config.epochs:g}ep"


class _Sweep:
    """Stages of trainings, each in a run folder of its own. A stage's choice is where the next one starts."""

    result: Json

    def __init__(self, run: Run[PretrainConfig], data: ClassData) -> None:
        self.run, self.config, self.data = run, run.config, data
        self.folder, self.world, self.console = run.folder, run.world, run.console

    def trainings(self) -> Generator[Training, None, None]:
        """Yield the unfinished trainings of all stages for the caller to run; afterwards `result` is set.

        The choice of each stage is scored once on the test split, which gives a row of Table 7.
        """
        config, stages = self.config, list[Json]()
        for number, stage in enumerate(self.config.stages[:-1], 1):
            config, row = yield from self._search(number, config, stage)
            stages.append(row)
        number = len(self.config.stages)
        ((name, final),) = trials(config, self.config.stages[-1])
        result = yield from self._trial(f"stage{number}/{name}", final, self.data, "1 of 1")
        if result["minival_top1"] is None:
            raise NonFiniteError(f"stage {number}: the loss is NaN or infinite; lower lr")
        self.result = {**result, "stages": stages, "weights": f"stage{number}/{name}/{WEIGHTS}"}
        if self.world.leads:
            self.folder.finish(self.result)

    def note_failure(self, training: Run[PretrainConfig], error: NonFiniteError) -> None:
        """Record that a training's loss became NaN or infinite: it has a result without a score."""
        self.console.warn(f"{training.folder.path.relative_to(self.folder.path)}: {error}")
        if self.world.leads:
            training.folder.finish({"task": "pretrain", "minival_top1": None, "error": str(error)})

    def _search(
        self, number: int, config: PretrainConfig, stage: Stage
    ) -> Generator[Training, None, tuple[PretrainConfig, Json]]:
        """Yield the trainings of a stage's grid; return the best config on validation, and the stage's scores.

        A search saves scores, not networks: only the best network is retained, until it is scored on the test split.
        """
        searching, runs = replace(self.data, val=self.data.minival), list(trials(config, stage))
        stage_folder = f"stage{number}"
        top1: dict[str, float | None] = {}
        best, score = "", -1.0
        for count, (name, trial_config) in enumerate(runs, 1):
            result = yield from self._trial(
                f"{stage_folder}/{name}", trial_config, searching, f"{count} of {len(runs)}"
            )
            top = top1[name] = result["minival_top1"]
            worse_name = name
            if top is not None and top > score:
                best, worse_name, score = name, best, top
            if worse_name:
                self._delete_network(f"{stage_folder}/{worse_name}")
        if not best:
            raise NonFiniteError(f"stage {number}: every run ended with a NaN or infinite loss; lower lr")
        best_config = dict(runs)[best]
        self.console.info(f"stage {number}: {best} is best, {score:.2f} % on the validation split")
        row = {
            "epochs": stage.epochs,
            "top1": top1,
            "chosen": best,
            "test_top1": self._test(stage_folder, best, best_config),
        }
        return best_config, row

    def _test(self, stage_folder: str, name: str, config: PretrainConfig) -> float | None:
        """Score a stage's choice on the test split, or return its score; None where its network is gone."""
        weights_file, score_file = self.folder.path / stage_folder / name, self.folder.path / stage_folder / "test.json"
        row: Json | None = from_leader(read_object(score_file))
        if row is None:
            if not from_leader((weights_file / WEIGHTS).is_file()):
                self.console.warn(
                    f"{weights_file / WEIGHTS}: no such file, so this run is not scored on the test split"
                )
                return None
            classifier = load_classifier(str(weights_file))
            classifier.model.to(self.world.device).eval()
            row = {"run": name, "top1": evaluate(classifier, self.data.val, config, self.world).top1}
            if self.world.leads:
                replace_json(score_file, row)
        self._delete_network(f"{stage_folder}/{name}")
        top1: float = row["top1"]
        return top1

    def _delete_network(self, stage_folder: str) -> None:
        """Delete a run's network, once no rank reads it any more."""
        barrier()
        if self.world.leads:
            (self.folder.path / stage_folder / WEIGHTS).unlink(missing_ok=True)

    def _trial(
        self, stage_folder: str, config: PretrainConfig, data: ClassData, shown_name: str
    ) -> Generator[Training, None, Json]:
        """Yield a training unless it is finished; return its result."""
        path = self.folder.path / stage_folder
        folder = open_folder(path, config, "classifier", self.world, self.console, resume=True, overwrite=False)
        if folder.result is None:
            self.console.info(f"{stage_folder} ({shown_name})")
            counted = resolve_steps(config, len(data.train.labels))
            yield replace(self.run, config=counted, folder=folder), data
        result = from_leader(folder.result)
        assert result is not None  # the caller has trained
        return result


def describe_pretraining(result: Json) -> str:
    """Return the result as text."""
    lines = []
    for number, stage in enumerate(result.get("stages", ()), 1):
        top1: dict[str, float | None] = stage["top1"]
        values = [value for value in top1.values() if value is not None]
        lines.append(
            f"stage {number}, {len(top1)} runs of {stage['epochs']:g} epochs: {stage['chosen']}, "
            f"{max(values):.2f} % on validation, {_percent(stage['test_top1'])} on test"
        )
    return "\n".join([*lines, describe_training(result)])


def _percent(value: float | None) -> str:
    return "no score" if value is None else f"{value:.2f} %"
