"""The sweep: every (task, lr, seed) is a cell with a folder of its own; only the chosen cells see the test split."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dpn_cli import distributed, engine, stopping
from dpn_cli.arch import Stem, check_image_size
from dpn_cli.backbone import Backbone, export_backbone, load_backbone
from dpn_cli.console import Console
from dpn_cli.data.labelled import Labelled
from dpn_cli.data.pixels import PixelSet, load, shuffled_batches, stream
from dpn_cli.distributed import World
from dpn_cli.errors import NonFiniteError, OutOfMemoryError, SaveError
from dpn_cli.files import replace_json
from dpn_cli.losses import sigmoid_xent, softmax_xent
from dpn_cli.metrics import Top1
from dpn_cli.runstate import Checkpoints, MetricsLog, RunFolder, describe_device
from dpn_cli.trackers import Track, build_tracker
from tasks.vtab.data import TaskData, check_images, open_task
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.report import build_result, write_csv
from tasks.vtab.table import Task, choose_tasks

Json = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training of the sweep: where it lives and what was trained on."""

    stem: Stem
    task: Task
    lr: float
    seed: int
    split: str
    path: Path

    @property
    def label(self) -> str:
        """Name the cell for a person."""
        return f"{self.task.name} {self.stem} lr {self.lr:g} seed {self.seed}" + (
            "" if self.split == "train800" else f" ({self.split})")

    @property
    def weights(self) -> Path:
        """The file of the trained weights, which lasts until the task has been scored."""
        return self.path / "weights.safetensors"

    def marker(self, name: str) -> Json | None:
        """Read ``done.json`` or ``failed.json``."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@dataclass
class TaskOutcome:
    """What the sweep found for one task and stem; accuracies in percent, by lr and seed."""

    task: Task
    stem: Stem
    val: dict[float, dict[int, float]] = field(default_factory=dict)
    test: dict[int, float] = field(default_factory=dict)
    test_images: int = 0
    lr: float | None = None
    failed: list[str] = field(default_factory=list)


def run(recipe: VtabRecipe, folder: RunFolder, world: World, console: Console) -> Json:
    """Run or finish the sweep in `folder` and return its result, which is written there too.

    Data are checked for all tasks before anything is trained. Raises `DpnError` and its kin; a cell that fails for
    want of memory or finite numbers is noted in the result instead, and tried again when the run is resumed.
    """
    tasks = choose_tasks(recipe.data.tasks, recipe.demo)
    data = {task: open_task(recipe.data, task) for task in tasks}
    if world.leads:
        check_images(data, recipe.data.skip_bad_images, console)
        folder.update(device=describe_device(world.device), ranks=world.size, status="running",
                      data={task.name: entry.fingerprints for task, entry in data.items()})
    sweep = Sweep(recipe, folder, world, console)
    outcomes = [sweep.run_task(stem, task, data[task]) for stem in recipe.stems for task in tasks]
    result = build_result(recipe, outcomes, sweep.arch, {t.name: d.fingerprints for t, d in data.items()}, sweep.timing())
    if world.leads:
        write_csv(folder.path / "result.csv", outcomes)
        if any(outcome.failed for outcome in outcomes):
            replace_json(folder.path / "partial.json", result)
            folder.update(status="some cells failed")
        else:
            folder.finish(result)
    return result


class Sweep:
    """Trains cells, chooses learning rates, scores the chosen cells."""

    def __init__(self, recipe: VtabRecipe, folder: RunFolder, world: World, console: Console) -> None:
        self.recipe, self.folder, self.world, self.console = recipe, folder, world, console
        self.track: Track = build_tracker(recipe.runtime.report_to if world.leads else "none", folder.path, console)
        self.arch = recipe.backbone.arch or ""
        self.cells_done, self.cells_all = 0, 0

    def run_task(self, stem: Stem, task: Task, data: TaskData) -> TaskOutcome:
        """Train all cells of a task with one stem, choose the lr on val200 and score the chosen cells on test."""
        outcome = TaskOutcome(task, stem)
        workbench = Workbench(self, stem, task, data)
        cells = [self._cell(stem, task, lr, seed) for lr in self.recipe.lrs for seed in self.recipe.seeds]
        for cell in cells:
            accuracy = workbench.train(cell, outcome)
            if accuracy is not None:
                outcome.val.setdefault(cell.lr, {})[cell.seed] = accuracy
        outcome.lr = choose_lr(outcome.val, len(self.recipe.seeds))
        if outcome.lr is None:
            return outcome
        chosen = [cell for cell in cells if cell.lr == outcome.lr]
        self._discard([cell for cell in cells if cell.lr != outcome.lr], chosen=False)
        if self.recipe.protocol == "vtab":
            self._discard(chosen, chosen=False)
            chosen = [self._cell(stem, task, outcome.lr, seed, "train800val200") for seed in self.recipe.seeds]
            if any([workbench.train(cell, outcome) is None for cell in chosen]):  # all of them, not up to the first
                return outcome
        workbench.score(chosen, outcome)
        self._discard(chosen, chosen=True)
        return outcome

    def timing(self) -> Json:
        """Add up what the cells' markers say of their trainings, in seconds."""
        markers = [json.loads(path.read_text("utf-8")) for path in sorted(self.folder.path.glob("cells/*/*/*/done.json"))]
        total = {key: round(sum(marker[key] for marker in markers), 2) for key in ("train_seconds", "wait_seconds")}
        return {**total, "trainings": len(markers)}

    def _cell(self, stem: Stem, task: Task, lr: float, seed: int, split: str = "train800") -> Cell:
        name = f"{split}_lr{lr:g}_seed{seed}"
        return Cell(stem, task, lr, seed, split, self.folder.path / "cells" / stem / task.name / name)

    def _discard(self, cells: Sequence[Cell], *, chosen: bool) -> None:
        keep = self.recipe.keep_weights
        if self.world.leads and keep != "all" and not (chosen and keep == "chosen"):
            for cell in cells:
                cell.weights.unlink(missing_ok=True)
        distributed.barrier()


def choose_lr(val: dict[float, dict[int, float]], seeds: int) -> float | None:
    """Return the learning rate with the best mean validation accuracy, the smaller of two equal ones.

    Only learning rates whose every seed finished take part; None when there is no such one.
    """
    means = {lr: fmean(by_seed.values()) for lr, by_seed in val.items() if len(by_seed) == seeds}
    return min(means, key=lambda lr: (-means[lr], lr)) if means else None


class Workbench:
    """One network and one task's pixels, made when the first cell needs them and used for all its cells."""

    def __init__(self, sweep: Sweep, stem: Stem, task: Task, data: TaskData) -> None:
        self.sweep, self.stem, self.task, self.data = sweep, stem, task, data
        self.recipe, self.world, self.console = sweep.recipe, sweep.world, sweep.console
        patch_free = self.recipe.backbone.image_size or 224
        self.size = (patch_free, patch_free) if isinstance(patch_free, int) else patch_free
        self._model: Backbone | None = None
        self._pixels: dict[tuple[str, tuple[int, int]], PixelSet] = {}

    @property
    def model(self) -> Backbone:
        """The network, loaded once; `restart` puts its first weights back."""
        if self._model is None:
            section = self.recipe.backbone
            checkpoint = section.checkpoint.replace("{stem}", self.stem) if section.checkpoint else None
            self._model = load_backbone(
                section.arch, stem=self.stem, checkpoint=checkpoint, image_size=self.size,
                num_classes=self.task.classes, pool=section.pool, pre_logits=section.pre_logits,
                drop_path=section.drop_path, grad_checkpointing=section.grad_checkpointing)
            check_image_size(self.size, self._model.config.patch)
            report = self._model.report
            self.console.detail(f"{self.stem}: {report.summary()}")
            if self.world.leads:
                self.sweep.folder.update(**{f"backbone_{self.stem}": report.to_dict()})
            self.first = {name: value.clone() for name, value in self._model.state_dict().items()}
            self.trainable = engine.prepare(self._model, self.recipe.runtime, self.world)
            rows = self.recipe.batch_size // self.world.size
            self.micro = engine.MicroBatch.choose(self.recipe.runtime, rows, self._model, self.world.device)
            self._check_disk()
        return self._model

    def pixels(self, split: str, *, train: bool) -> PixelSet:
        """Return a split in memory, at the size that cropping starts from when `train`."""
        size = self.size
        if train and self.task.crop:
            # 256 for 224: the ratio of the public recipe
            size = tuple(self.recipe.data.resize or round(side * 256 / 224) for side in self.size)  # type: ignore[assignment]
        if split == "train800val200":
            parts = [self.pixels(name, train=train) for name in ("train800", "val200")]
            return PixelSet(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))
        key = (split, size)
        if key not in self._pixels:
            loaded = load(getattr(self.data, split), size, workers=self.recipe.runtime.workers,
                          skip_bad=self.recipe.data.skip_bad_images)
            if loaded.skipped:
                self.console.warn(f"{self.task.name}: {loaded.skipped} unreadable images of {split} are left out")
            self._pixels[key] = loaded.to(self.world.device)
        return self._pixels[key]

    def train(self, cell: Cell, outcome: TaskOutcome) -> float | None:
        """Return the cell's validation accuracy in percent, from its marker or by training; None when it fails."""
        done = distributed.from_leader(cell.marker("done"))
        steps = self.recipe.schedule.steps
        if isinstance(done, dict) and done["steps"] == steps and (self._scored(cell) or cell.weights.is_file()
                                                                   or not self._needs_weights(cell)):
            return float(done["val_accuracy"])
        try:
            marker = self._train(cell)
        except (NonFiniteError, OutOfMemoryError) as error:
            if self.world.size > 1 and isinstance(error, OutOfMemoryError):
                raise  # the other ranks are waiting for this one's gradients
            self.console.warn(f"{cell.label} failed: {error}")
            outcome.failed.append(f"{cell.label}: {error}")
            if self.world.leads:
                replace_json(cell.path / "failed.json", {"error": str(error), "exit_code": error.exit_code})
            return None
        return float(marker["val_accuracy"])

    def _train(self, cell: Cell) -> Json:
        train, val = self.pixels(cell.split, train=True), self.pixels("val200", train=False)
        self.restart(cell.seed)
        training = engine.Training(self.recipe.optim, self.recipe.schedule, cell.lr, self.recipe.batch_size, cell.seed)
        batches = shuffled_batches(train, self.size, self.recipe.batch_size, cell.seed, crop=self.task.crop,
                                   flip=self.task.flip, world=self.world)
        log = MetricsLog(cell.path / "metrics.jsonl", lambda record: self.sweep.track(cell.label, record))
        checkpoints = Checkpoints(cell.path / "checkpoints")
        with self.console.progress(cell.label) as tick:
            outputs = engine.Outputs(checkpoints, log, tick, self.console.warn)
            result = engine.fit(self.trainable, self.loss, batches, lambda: self.evaluate(val), training,
                                self.recipe.runtime, self.world, outputs, self.micro)
        marker = {"steps": result.steps, "val_accuracy": result.metrics["accuracy"], "lr": cell.lr, "seed": cell.seed,
                  "split": cell.split, "loss": result.loss, "train_seconds": round(result.seconds, 3),
                  "wait_seconds": round(result.wait_seconds, 3), "micro_batch": result.micro_batch}
        if self.world.leads:
            marker["weights_sha256"] = export_backbone(self.model, cell.weights, mean=self.model.mean, std=self.model.std)
            replace_json(cell.path / "done.json", marker)
            (cell.path / "failed.json").unlink(missing_ok=True)
            checkpoints.clear()
        distributed.barrier()
        self.console.info(f"{cell.label}: val {marker['val_accuracy']:.1f} %  ({result.seconds:.1f} s)")
        return marker

    def restart(self, seed: int) -> None:
        """Put the first weights back, or draw those of `seed` where training starts from scratch."""
        if self.recipe.backbone.checkpoint == "none":
            self.model.initialize(seed)
        else:
            self.model.load_state_dict(self.first)

    def loss(self, model: nn.Module, batch: engine.Batch) -> Tensor:
        """Return the mean loss of a batch of uint8 images and labels."""
        logits = model(self.model.normalize(batch["image"])).float()
        target = F.one_hot(batch["label"], self.task.classes).float()
        return (sigmoid_xent if self.recipe.loss == "sigmoid" else softmax_xent)(logits, target)

    def evaluate(self, val: PixelSet) -> dict[str, float]:
        """Return top-1 accuracy in percent over a set in memory, each image once whatever the ranks."""
        counts = Top1(self.task.classes, self.world.device)
        rows = torch.arange(self.world.rank, len(val.images), self.world.size, device=val.images.device)
        for part in rows.split(self.recipe.eval_batch_size):
            counts.update(self.model(self.model.normalize(val.images[part])), val.labels[part])
        right, images = counts.compute()
        assert images == len(val.images), f"scored {images} of {len(val.images)} images"
        return {"accuracy": 100 * right / images}

    def score(self, cells: Sequence[Cell], outcome: TaskOutcome) -> None:
        """Score cells on the test split, once in the life of the run: the ledger knows what was scored before."""
        todo = []
        for cell in cells:
            entry = self._scored(cell)
            if entry is None:
                todo.append(cell)
            else:
                outcome.test[cell.seed], outcome.test_images = entry["accuracy"], entry["images"]
        if not todo:
            return
        weights = [{name: value.to(self.world.device) for name, value in load_file(cell.weights).items()} for cell in todo]
        began = time.perf_counter()
        for cell, (right, images) in zip(todo, self._count(weights), strict=True):
            outcome.test[cell.seed], outcome.test_images = 100 * right / images, images
            if self.world.leads:
                self._enter(cell, {"split": "test", "images": images, "right": right, "accuracy": 100 * right / images})
        distributed.barrier()
        mean = fmean(outcome.test.values())
        self.console.info(f"{self.task.name} {self.stem}: chosen lr {cells[0].lr:g}, test {mean:.1f} % over "
                          f"{len(outcome.test)} seeds, {outcome.test_images} images ({time.perf_counter() - began:.1f} s)")

    def _count(self, weights: list[dict[str, Tensor]]) -> list[tuple[int, int]]:
        """Count (right, all) on test for several sets of weights in one pass: each image is decoded once."""
        test: Labelled = self.data.test
        counts = [Top1(self.task.classes, self.world.device) for _ in weights]
        rows = range(self.world.rank, len(test.labels), self.world.size)
        parts = stream(test, self.size, self.recipe.eval_batch_size, rows=rows, workers=self.recipe.runtime.workers,
                       skip_bad=self.recipe.data.skip_bad_images)
        skipped = 0
        self.model.eval()
        # The first rank has the most rows; all go round as often, because stopping is decided together.
        for _ in range(0, -(-len(test.labels) // self.world.size), self.recipe.eval_batch_size):
            stopping.check()
            part = next(parts, None)
            if part is None:
                continue
            skipped += part.skipped
            with torch.inference_mode(), engine.precision_of(self.recipe.runtime, self.world.device):
                images = self.model.normalize(part.images.to(self.world.device))
                labels = part.labels.to(self.world.device)
                for state, count in zip(weights, counts, strict=True):
                    count.update(torch.func.functional_call(self.model, state, (images,)), labels)
        skipped = int(distributed.reduce_over_ranks(torch.tensor(skipped)))
        if skipped:
            self.console.warn(f"{self.task.name}: {skipped} unreadable test images are left out of the score")
        totals = [count.compute() for count in counts]
        assert all(images + skipped == len(test.labels) for _, images in totals), totals
        return totals

    def _needs_weights(self, cell: Cell) -> bool:
        """Tell whether a finished cell's weights may still be asked for: not once the task's choice was made."""
        return not any(self._ledger(cell.stem, cell.task))

    def _scored(self, cell: Cell) -> Json | None:
        return next((entry for entry in self._ledger(cell.stem, cell.task)
                     if (entry["lr"], entry["seed"], entry["trained_on"]) == (cell.lr, cell.seed, cell.split)), None)

    def _ledger(self, stem: Stem, task: Task) -> Iterator[Json]:
        path = self.sweep.folder.path / "ledger.jsonl"
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if (entry["stem"], entry["task"]) == (stem, task.name):
                    yield entry

    def _enter(self, cell: Cell, entry: Json) -> None:
        done = cell.marker("done") or {}
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "stem": cell.stem, "task": cell.task.name, "lr": cell.lr,
               "seed": cell.seed, "trained_on": cell.split, **entry, "weights_sha256": done.get("weights_sha256")}
        with (self.sweep.folder.path / "ledger.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _check_disk(self) -> None:
        """Raise `SaveError` now rather than after hours when the weights of a task will not fit on the disk."""
        cells = len(self.recipe.lrs) * len(self.recipe.seeds)
        needed = cells * 4 * self.model.report.parameters
        free = shutil.disk_usage(self.sweep.folder.path).free
        if free < needed:
            raise SaveError(f"-o {self.sweep.folder.path}: {free / 1e9:.1f} GB free, and the {cells} cells of a task keep "
                            f"{needed / 1e9:.1f} GB of weights until its learning rate is chosen; free some space or "
                            "pass another -o")
