"""All trainings of a network on one task: the choice of the learning rate, and the score on the test split."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from dpn_cli.data.decoded_cache import folder_on_this_machine
from dpn_cli.engine import fit as engine
from dpn_cli.errors import NonFiniteError, OutOfMemoryError
from dpn_cli.run import distributed
from dpn_cli.run.baseline_warnings import class_floors, result_warning
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.files import replace_json
from dpn_cli.run.gpu_share import is_shared
from dpn_cli.run.leases import Unshared
from dpn_cli.run.run import Session
from dpn_cli.weights.backbone import export_backbone
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData
from tasks.vtab.tasks import Task
from tasks.vtab.train import Trainer
from tasks.vtab.trials import Cell, Json, Ledger, TaskOutcome, choose_lr, read_json

# In failed.json: whether the training had a part of a GPU only, and its memory ran out.
BESIDE = "beside_others"


def folder_of_pixels(begun: Session[VtabConfig]) -> Path | None:
    """Return where the processes of this machine that share the work keep what they decode."""
    return folder_on_this_machine(begun.folder.path, str(begun.folder.facts.get("started"))) if begun.leases else None


class TaskSweep:
    """All cells of one task and network: train, choose the learning rate on val200, score on test."""

    def __init__(self, begun: Session[VtabConfig], network: str, task: Task, data: TaskData) -> None:
        self.begun, self.config, self.network, self.task, self.data = begun, begun.config, network, task, data
        self.folder, self.world, self.console = begun.folder, begun.world, begun.console
        folder = begun.folder
        self.path = folder.path / "cells" / begun.config.folders[network] / task.name
        self.ledger = Ledger(folder.path / "ledger.jsonl")
        self.outcome = TaskOutcome(task, network)
        self.complete = False
        self.failures: dict[str, str] = {}

    @cached_property
    def trainer(self) -> Trainer:
        """The network and the pixels, created for the first unfinished cell."""
        shared = folder_of_pixels(self.begun)
        return Trainer(self.config, self.network, self.task, self.data, self.world, self.console, shared)

    def to_train(self) -> Generator[tuple[Cell, Unshared], None, None]:
        """Yield the unfinished cells that this process has leased, which the caller trains; score the task afterwards.

        The task is `complete` at the end, unless other processes have yet to finish some of its cells.
        """
        outcome, seeds = self.outcome, self.config.seeds
        cells = [self._cell(lr, seed) for lr in self.config.lrs for seed in seeds]
        for cell in cells:
            yield from self._unfinished(cell)
        if not self._all_ended(cells):
            return
        outcome.lr = None if self._set_aside(cells) else self._choose(cells)
        if outcome.lr is None:
            self.complete = True
            return
        self._discard(cells)
        if self.config.protocol == "vtab":
            cells = [self._cell(outcome.lr, seed, "train800val200") for seed in seeds]
            for cell in cells:
                yield from self._unfinished(cell)
        chosen = [cell for cell in cells if cell.lr == outcome.lr]
        self.complete = self._all_ended(chosen)
        if self.complete and distributed.from_leader(all(cell.done(self.config.schedule.steps) for cell in chosen)):
            self.complete = self._score_alone(chosen)

    def _choose(self, cells: Sequence[Cell]) -> float | None:
        """Return the learning rate by the validation accuracies of cells that have all ended; None where too few did.

        A choice is final: cells that failed before it and finish later cannot change the lr that is scored on test.
        """
        outcome = self.outcome
        for cell in cells:
            if marker := self._marker(cell):
                outcome.val.setdefault(cell.lr, {})[cell.seed] = float(marker["val_accuracy"])
        if outcome.failed and not self.config.allow_failed:
            return None
        if made := distributed.from_leader(read_json(self.path / "choice.json")):
            return float(made["lr"])
        lr = choose_lr(outcome.val, len(self.config.seeds))
        if lr is not None and self.world.leads:
            replace_json(self.path / "choice.json", {"lr": lr, "by": "mean val200 accuracy over the seeds"})
        distributed.barrier()
        return lr

    def _cell(self, lr: float, seed: int, split: str = "train800") -> Cell:
        return Cell(self.network, self.task, lr, seed, split, self.path / f"{split}_lr{lr:g}_seed{seed}")

    def _weights_needed(self, cell: Cell) -> bool:
        """Tell whether a cell's weights may still be scored on test."""
        if self.ledger.entry(cell):
            return False
        choice = read_json(self.path / "choice.json")
        meets_test = cell.split == ("train800" if self.config.protocol == "paper" else "train800val200")
        return meets_test and (choice is None or choice["lr"] == cell.lr)

    def _marker(self, cell: Cell) -> Json | None:
        """Return the leading rank's marker of a finished cell; None also when weights that it needs are missing."""
        marker = cell.done(self.config.schedule.steps)
        if marker and self._weights_needed(cell) and not cell.weights.is_file():
            marker = None
        return distributed.from_leader(marker)

    def _unfinished(self, cell: Cell) -> Iterator[tuple[Cell, Unshared]]:
        if self._ended(cell):
            return
        lease = self.begun.take(str(cell.path.relative_to(self.folder.path)))
        if lease is None:
            return
        try:
            if not self._ended(cell):  # another process may have trained it before the lease was free
                yield cell, lease
        finally:
            lease.release()

    def _all_ended(self, cells: Sequence[Cell]) -> bool:
        """Tell whether all cells have ended, and note in the outcome which of them failed."""
        failures = [f"{cell.label}: {error}" for cell in cells if (error := self._failure(cell))]
        self.outcome.failed += failures
        return all(self._ended(cell) for cell in cells)

    def _ended(self, cell: Cell) -> bool:
        return self._marker(cell) is not None or self._failure(cell) is not None

    def _failure(self, cell: Cell) -> str | None:
        """Return why a cell failed; processes that share the folder know what failed in the others.

        What failed in a part of a GPU is left to processes that have a whole one.
        """
        if self.begun.leases is not None and cell.label not in self.failures:
            written = None if cell.done(self.config.schedule.steps) else read_json(cell.path / "failed.json")
            return str(written["error"]) if written and (is_shared() or not written.get(BESIDE)) else None
        return self.failures.get(cell.label)

    def _set_aside(self, cells: Sequence[Cell]) -> bool:
        """Tell whether some cells will be tried again with a whole GPU."""
        failures = [read_json(cell.path / "failed.json") for cell in cells] if is_shared() else []
        return any(failure and failure.get(BESIDE) for failure in failures)

    def note_failure(self, cell: Cell, error: NonFiniteError | OutOfMemoryError) -> None:
        """Record why a cell failed, so that the sweep continues.

        Raises an `OutOfMemoryError` again when there are several ranks: the others wait for this one's gradients.
        """
        if self.world.size > 1 and isinstance(error, OutOfMemoryError):
            raise error
        self.console.warn(f"{cell.label} failed: {error}")
        self.failures[cell.label] = str(error)
        if self.world.leads:
            beside = is_shared() and isinstance(error, OutOfMemoryError)
            failure = {"error": str(error), "exit_code": error.exit_code, BESIDE: beside}
            replace_json(cell.path / "failed.json", failure)

    def keep(self, cell: Cell, result: engine.FitResult) -> None:
        """Write the marker of a trained cell, and its weights if they may still be scored on test."""
        marker: Json = {
            "steps": result.steps,
            "val_accuracy": result.metrics["accuracy"],
            "loss": result.loss,
            "train_seconds": round(result.seconds, 3),
            "wait_seconds": round(result.wait_seconds, 3),
            "micro_batch": result.micro_batch,
        }
        if self.world.leads:
            if self._weights_needed(cell) or self.config.keep_weights == "all":
                model = self.trainer.model
                marker["weights_sha256"] = export_backbone(model, cell.weights)
            replace_json(cell.path / "done.json", marker)
            (cell.path / "failed.json").unlink(missing_ok=True)
            Checkpoints(cell.path / "checkpoints").clear()
        distributed.barrier()
        self.console.info(f"{cell.label}: val {marker['val_accuracy']:.1f} %  ({result.seconds:.1f} s)")

    def _score_alone(self, chosen: Sequence[Cell]) -> bool:
        """Score the chosen cells on the test split; False while another process does that."""
        lease = self.begun.take(f"{self.path.relative_to(self.folder.path)}/test")
        if lease is None:
            return False
        try:
            self._score(chosen)
        finally:
            lease.release()
        self._discard(chosen)
        counts = np.bincount(np.asarray(self.data.test.labels), minlength=self.task.classes)
        metric = f"{self.task.name} {self.network}: test top-1"
        mean = fmean(self.outcome.test.values())
        if warning := result_warning(metric, mean, class_floors(counts.tolist()), self.outcome.test_images):
            self.console.warn(warning)
        return True

    def _score(self, cells: Sequence[Cell]) -> None:
        """Score cells on the test split, each once in the life of the run: the ledger records past scores."""
        todo = [cell for cell in cells if distributed.from_leader(self.ledger.entry(cell)) is None]
        if todo:
            began, device = time.perf_counter(), self.world.device
            if self.world.leads:
                self._record([(cell, {"images": len(self.data.test.labels), "accuracy": None}) for cell in todo])
            weights = [{name: value.to(device) for name, value in cell.load().items()} for cell in todo]
            rows = [
                (cell, {"images": images, "right": right, "accuracy": 100 * right / images})
                for cell, (right, images) in zip(todo, self.trainer.count_test(weights), strict=True)
            ]
            if self.world.leads:
                self._record(rows)
            distributed.barrier()
            mean, images = fmean(row["accuracy"] for _, row in rows), rows[0][1]["images"]
            self.console.info(
                f"{self.task.name} {self.network}: chosen lr {cells[0].lr:g}, test {mean:.1f} % "
                f"({len(rows)} seeds, {images} images, {time.perf_counter() - began:.1f} s)"
            )
        for cell in cells:
            entry = distributed.from_leader(self.ledger.entry(cell))
            assert entry is not None
            self.outcome.test[cell.seed], self.outcome.test_images = entry["accuracy"], entry["images"]

    def _record(self, rows: Sequence[tuple[Cell, Json]]) -> None:
        with self.begun.alone("ledger"):
            self.ledger.add(rows)

    def _discard(self, cells: Sequence[Cell]) -> None:
        """Delete weights that are no longer needed, unless the config keeps them."""
        if self.world.leads and self.config.keep_weights != "all":
            for cell in cells:
                kept = self.config.keep_weights == "chosen" and cell.lr == self.outcome.lr
                if not kept and not self._weights_needed(cell):
                    cell.weights.unlink(missing_ok=True)
        distributed.barrier()
