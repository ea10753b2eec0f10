"""All trainings of a network on one task: the choice of the learning rate, and the score on the test split."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from dpn_cli.data.decoded_cache import local_cache_dir
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError, OutOfMemoryError
from dpn_cli.run import distributed
from dpn_cli.run.baseline_warnings import class_floors, result_warning
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.files import claim, replace_json
from dpn_cli.run.gpu_share import is_shared
from dpn_cli.run.run import Run
from dpn_cli.run.signals import check_here
from dpn_cli.weights.backbone import export_backbone
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData
from tasks.vtab.tasks import Task
from tasks.vtab.train import Trainer
from tasks.vtab.trials import Json, Ledger, TaskOutcome, VtabTrial, choose_lr, read_json


def shared_pixels(run: Run[VtabConfig]) -> Path | None:
    """Return where the processes of this machine that run parts of a sweep keep what they decode."""
    return local_cache_dir(run.folder.path, str(run.folder.facts.get("started")))


class TaskSweep:
    """All trials of one task and network: train, choose the learning rate on val200, score on test.

    With `dispatched` other processes have run the trials: those that failed there are not tried again here.
    `needs_whole_gpu` is True when a trial ran out of memory on a share of a GPU: the learning rate is then not chosen,
    and a process with a whole GPU tries the trial again.
    """

    def __init__(
        self, run: Run[VtabConfig], network: str, task: Task, data: TaskData, *, dispatched: bool = False
    ) -> None:
        self.run, self.config, self.network, self.task, self.data = run, run.config, network, task, data
        self.folder, self.world, self.console = run.folder, run.world, run.console
        folder = run.folder
        self.path = folder.path / "trials" / run.config.folders[network] / task.name
        self.choice_path = self.path / "choice.json"
        self.ledger = Ledger(folder.path / "ledger.jsonl")
        self.outcome = TaskOutcome(task, network)
        self.dispatched = dispatched
        self.failures: dict[str, str] = {}
        self.needs_whole_gpu = False

    @cached_property
    def trainer(self) -> Trainer:
        """The network and the pixels, created for the first unfinished trial."""
        shared = shared_pixels(self.run) if self.run.one_trial else None
        return Trainer(self.config, self.network, self.task, self.data, self.world, self.console, shared)

    def iter_trials(self) -> Generator[VtabTrial, None, None]:
        """Yield the unfinished trials, which the caller trains; score the task afterwards."""
        outcome, seeds = self.outcome, self.config.seeds
        trials = [self._make_trial(lr, seed) for lr in self.config.lrs for seed in seeds]
        yield from self._iter_unfinished(trials)
        outcome.lr = None if self.needs_whole_gpu else self._choose_lr(trials)
        if outcome.lr is None:
            return
        self._discard(trials)
        if self.config.protocol == "vtab":
            trials = [self._make_trial(outcome.lr, seed, "train800val200") for seed in seeds]
            yield from self._iter_unfinished(trials)
        chosen = [trial for trial in trials if trial.lr == outcome.lr]
        if distributed.from_leader(all(trial.read_marker(self.config.schedule.steps) for trial in chosen)):
            self._score_and_discard(chosen)

    def iter_one_trial(self, lr: float, seed: int) -> Generator[VtabTrial, None, None]:
        """Yield one trial, unless it has finished."""
        yield from self._iter_unfinished([self._make_trial(lr, seed)])

    def is_unfinished(self, lr: float, seed: int) -> bool:
        """Return whether a trial is still to be trained."""
        return self._marker(self._make_trial(lr, seed)) is None

    @property
    def is_scored(self) -> bool:
        """Return whether the chosen trials of every seed have their scores on test."""
        choice = read_json(self.choice_path)
        if choice is None:
            return False
        split = "train800" if self.config.protocol == "paper" else "train800val200"
        chosen = [self._make_trial(choice["lr"], seed, split) for seed in self.config.seeds]
        return all(self.ledger.entry(trial) for trial in chosen)

    def _choose_lr(self, trials: Sequence[VtabTrial]) -> float | None:
        """Return the learning rate by the validation accuracies of trials that have all ended; None where too few did.

        A choice is final: trials that failed before it and finish later cannot change the lr that is scored on test.
        """
        outcome = self.outcome
        for trial in trials:
            if marker := self._marker(trial):
                outcome.val.setdefault(trial.lr, {})[trial.seed] = float(marker["val_accuracy"])
        if outcome.failed and not self.config.allow_failed:
            return None
        if saved_choice := distributed.from_leader(read_json(self.choice_path)):
            return float(saved_choice["lr"])
        lr = choose_lr(outcome.val, len(self.config.seeds))
        if lr is not None and self.world.leads:
            replace_json(self.choice_path, {"lr": lr, "by": "mean val200 accuracy over the seeds"})
        distributed.barrier()
        return lr

    def _make_trial(self, lr: float, seed: int, split: str = "train800") -> VtabTrial:
        return VtabTrial(self.network, self.task, lr, seed, split, self.path / f"{split}_lr{lr:g}_seed{seed}")

    def _may_be_scored(self, trial: VtabTrial) -> bool:
        """Return whether a trial's weights may still be scored on test."""
        if self.ledger.entry(trial):
            return False
        choice = read_json(self.choice_path)
        is_final_split = trial.split == ("train800" if self.config.protocol == "paper" else "train800val200")
        return is_final_split and (choice is None or choice["lr"] == trial.lr)

    def _marker(self, trial: VtabTrial) -> Json | None:
        """Return the leading rank's marker of a finished trial; None also when weights that it needs are missing."""
        marker = trial.read_marker(self.config.schedule.steps)
        if marker and self._may_be_scored(trial) and not trial.weights.is_file():
            marker = None
        return distributed.from_leader(marker)

    def _iter_unfinished(self, trials: Sequence[VtabTrial]) -> Iterator[VtabTrial]:
        """Yield the trials that have not ended; note in the outcome which of all have failed."""
        for trial in trials:
            if not self._has_ended(trial):
                with self.run.claim(trial.path):
                    if not self._has_ended(trial):  # another process may have trained it before the claim was free
                        yield trial
        self.outcome.failed += [f"{trial.label}: {error}" for trial in trials if (error := self._failure(trial))]

    def _has_ended(self, trial: VtabTrial) -> bool:
        return self._marker(trial) is not None or self._failure(trial) is not None

    def _failure(self, trial: VtabTrial) -> str | None:
        """Return why a trial failed, here or in another process."""
        if self.dispatched and trial.read_marker(self.config.schedule.steps) is None:
            failure = read_json(trial.path / "failed.json")
            return str(failure["error"]) if failure else self.failures.get(trial.label)
        return self.failures.get(trial.label)

    def save_failure(self, trial: VtabTrial, error: DpnError) -> None:
        """Record why a trial failed, so that the sweep continues."""
        self.failures[trial.label] = str(error)
        self.needs_whole_gpu |= is_shared() and isinstance(error, OutOfMemoryError)
        if self.world.leads:
            replace_json(trial.path / "failed.json", {"error": str(error), "exit_code": error.exit_code})

    def save(self, trial: VtabTrial, result: engine.FitResult) -> None:
        """Write the marker of a trained trial, and its weights if they may still be scored on test."""
        marker: Json = {
            "steps": result.steps,
            "val_accuracy": result.metrics["accuracy"],
            "loss": result.loss,
            "train_seconds": round(result.seconds, 3),
            "wait_seconds": round(result.wait_seconds, 3),
            "micro_batch": result.micro_batch,
        }
        if self.world.leads:
            if self._may_be_scored(trial) or self.config.keep_weights == "all":
                model = self.trainer.model
                marker["weights_sha256"] = export_backbone(model, trial.weights)
            replace_json(trial.path / "done.json", marker)
            (trial.path / "failed.json").unlink(missing_ok=True)
            Checkpoints(trial.path / "checkpoints").clear()
        distributed.barrier()
        self.console.info(f"{trial.label}: val {marker['val_accuracy']:.1f} %  ({result.seconds:.1f} s)")

    def _score_and_discard(self, trials: Sequence[VtabTrial]) -> None:
        """Score the chosen trials on the test split, warn of a mean at chance, and delete their weights."""
        with self.run.claim(self.path):
            self._score(trials)
        self._discard(trials)
        counts = np.bincount(np.asarray(self.data.test.labels), minlength=self.task.classes)
        metric = f"{self.task.name} {self.network}: test top-1"
        mean = fmean(self.outcome.test.values())
        if warning := result_warning(metric, mean, class_floors(counts.tolist()), self.outcome.test_images):
            self.console.warn(warning)

    def _score(self, trials: Sequence[VtabTrial]) -> None:
        """Score trials on the test split, each once in the life of the run: the ledger records past scores."""
        todo = [trial for trial in trials if distributed.from_leader(self.ledger.entry(trial)) is None]
        if todo:
            start_time, device = time.perf_counter(), self.world.device
            if self.world.leads:
                self._record([(trial, {"images": len(self.data.test.labels), "accuracy": None}) for trial in todo])
            weights = [{name: value.to(device) for name, value in trial.load().items()} for trial in todo]
            rows = [
                (trial, {"images": images, "right": right, "accuracy": 100 * right / images})
                for trial, (right, images) in zip(todo, self.trainer.count_test(weights), strict=True)
            ]
            if self.world.leads:
                self._record(rows)
            distributed.barrier()
            mean, images = fmean(row["accuracy"] for _, row in rows), rows[0][1]["images"]
            self.console.info(
                f"{self.task.name} {self.network}: chosen lr {trials[0].lr:g}, test {mean:.1f} % "
                f"({len(rows)} seeds, {images} images, {time.perf_counter() - start_time:.1f} s)"
            )
        for trial in trials:
            entry = distributed.from_leader(self.ledger.entry(trial))
            assert entry is not None
            self.outcome.test[trial.seed], self.outcome.test_images = entry["accuracy"], entry["images"]

    def _record(self, rows: Sequence[tuple[VtabTrial, Json]]) -> None:
        with claim(self.ledger.path, on_wait=check_here):  # other processes score other tasks
            self.ledger.add(rows)

    def _discard(self, trials: Sequence[VtabTrial]) -> None:
        """Delete weights that are no longer needed, unless the config keeps them."""
        if self.world.leads and self.config.keep_weights != "all":
            for trial in trials:
                is_retained = self.config.keep_weights == "chosen" and trial.lr == self.outcome.lr
                if not is_retained and not self._may_be_scored(trial):
                    trial.weights.unlink(missing_ok=True)
        distributed.barrier()
