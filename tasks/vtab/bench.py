"""One network and one task's pixels, made once and used for all trainings of the task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpn_cli import distributed, engine, stopping
from dpn_cli.arch import Stem
from dpn_cli.backbone import Backbone, load_backbone
from dpn_cli.console import Console
from dpn_cli.data.pixels import PixelSet, load, resize, shuffled_batches, stream
from dpn_cli.distributed import World
from dpn_cli.losses import LOSSES
from dpn_cli.memory import MicroBatch
from dpn_cli.metrics import Top1
from tasks.vtab.cells import Cell
from tasks.vtab.data import TaskData
from tasks.vtab.recipe import VtabRecipe
from tasks.vtab.table import Task

# 256 for 224: what the public relative of the paper's recipe resizes to before it crops.
RESIZE_RATIO = 256 / 224


def input_size(recipe: VtabRecipe) -> tuple[int, int]:
    """Return the (height, width) of the network's input in pixels."""
    pixels = recipe.backbone.image_size or 224
    return (pixels, pixels) if isinstance(pixels, int) else pixels


def load_network(recipe: VtabRecipe, stem: Stem, classes: int) -> Backbone:
    """Load the recipe's network with one stem and a zero head. Raises as `load_backbone` does."""
    section = recipe.backbone
    return load_backbone(
        section.arch,
        stem=stem,
        checkpoint=section.checkpoint and section.checkpoint.replace("{stem}", stem),
        image_size=input_size(recipe),
        num_classes=classes,
        pool=section.pool,
        pre_logits=section.pre_logits,
        drop_path=section.drop_path,
        grad_checkpointing=section.grad_checkpointing,
    )


class Bench:
    """Trains and scores one network on one task; its compiled step and its pixels serve every cell."""

    def __init__(
        self, recipe: VtabRecipe, stem: Stem, task: Task, data: TaskData, world: World, console: Console
    ) -> None:
        self.recipe, self.task, self.data, self.world, self.console = recipe, task, data, world, console
        self.size = input_size(recipe)
        self.model = load_network(recipe, stem, task.classes)
        if recipe.runtime.compile:
            torch.compiler.reset()  # the compiler gives up after eight head sizes, and VTAB has fifteen
        self.trainable = engine.prepare(self.model, recipe.runtime, world)
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.micro = MicroBatch.choose(recipe.runtime, recipe.batch_size // world.size, self.model, world.device)
        self._pixels: dict[tuple[str, bool], PixelSet] = {}

    def fit(self, cell: Cell, outputs: engine.Outputs) -> engine.FitResult:
        """Train the network of a cell from its start and return what came out; its ``accuracy`` is val200's."""
        if self.recipe.backbone.checkpoint == "none":
            self.model.initialize(cell.seed)
        else:
            self.model.load_state_dict(self.first)
        train, val = self.pixels(cell.split, train=True), self.pixels("val200", train=False)
        batches = shuffled_batches(
            train,
            self.size,
            self.recipe.batch_size,
            cell.seed,
            crop=self.task.crop,
            flip=self.task.flip,
            world=self.world,
        )
        training = engine.Training(self.recipe.optim, self.recipe.schedule, cell.lr, self.recipe.batch_size, cell.seed)
        return engine.fit(
            self.trainable,
            self.loss,
            batches,
            lambda: self.evaluate(val),
            training,
            self.recipe.runtime,
            self.world,
            outputs,
            self.micro,
        )

    def pixels(self, split: str, *, train: bool) -> PixelSet:
        """Return a split in memory, for training at the size that crops are taken from."""
        if split == "train800val200":
            parts = [self.pixels(part, train=train) for part in ("train800", "val200")]
            return PixelSet(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
        cropped = train and self.task.crop
        if (split, cropped) not in self._pixels:
            height, width = self.size
            larger = self.recipe.data.resize
            size = (larger or round(height * RESIZE_RATIO), larger or round(width * RESIZE_RATIO))
            pixels = load(
                getattr(self.data, split),
                size if cropped else self.size,
                workers=self.recipe.runtime.workers,
                skip_bad=self.recipe.data.skip_bad_images,
            )
            if pixels.skipped:
                self.console.warn(f"{self.task.name}: {pixels.skipped} unreadable images of {split} are left out")
            self._pixels[split, cropped] = pixels.to(self.world.device)
        return self._pixels[split, cropped]

    def loss(self, model: nn.Module, batch: engine.Batch) -> Tensor:
        """Return the mean loss of a batch of uint8 images and labels."""
        logits = model(self.model.normalize(batch["image"])).float()
        return LOSSES[self.recipe.loss](logits, F.one_hot(batch["label"], self.task.classes).float())

    def evaluate(self, pixels: PixelSet) -> dict[str, float]:
        """Return top-1 accuracy in percent over a set in memory, each image once whatever the ranks."""
        counts = Top1(self.task.classes, self.world.device)
        rows = torch.arange(self.world.rank, len(pixels.images), self.world.size, device=pixels.images.device)
        for part in torch.split(rows, self.recipe.eval_batch_size):
            counts.update(self.model(self.model.normalize(pixels.images[part])), pixels.labels[part])
        right, images = counts.compute()
        if images != len(pixels.images):
            raise RuntimeError(f"{self.task.name}: {images} images were scored, but the split has {len(pixels.images)}")
        return {"accuracy": 100 * right / images}

    def count_test(self, weights: Sequence[dict[str, Tensor]]) -> list[tuple[int, int]]:
        """Count (right, all) on test for several sets of weights in one pass: each image is decoded once.

        Test splits reach 70,000 images, so they are streamed and never held in memory. Raises `StoppedError`.
        """
        test, size = self.data.test, self.recipe.eval_batch_size
        counts = [Top1(self.task.classes, self.world.device) for _ in weights]
        rows = range(self.world.rank, len(test.labels), self.world.size)
        workers, skip_bad = self.recipe.runtime.workers, self.recipe.data.skip_bad_images
        skipped = 0
        self.model.eval()
        with stream(
            test, partial(resize, size=self.size), size, rows=rows, workers=workers, skip_bad=skip_bad
        ) as parts:
            # Rank 0 has the most rows; all ranks go round as often as it, because they decide together when to stop.
            for _ in range(0, -(-len(test.labels) // self.world.size), size):
                stopping.check()
                part = next(parts, None)
                skipped += part.skipped if part else 0
                if part is None or not len(part.images):
                    continue
                with torch.inference_mode(), engine.precision_of(self.recipe.runtime, self.world.device):
                    images = self.model.normalize(part.images.to(self.world.device))
                    labels = part.labels.to(self.world.device)
                    for state, count in zip(weights, counts, strict=True):
                        count.update(torch.func.functional_call(self.model, state, (images,)), labels)
        skipped = int(distributed.reduce_over_ranks(torch.tensor(skipped)))
        if skipped:
            self.console.warn(f"{self.task.name}: {skipped} unreadable test images are left out of the score")
        totals = [count.compute() for count in counts]
        if any(images + skipped != len(test.labels) for _, images in totals):
            raise RuntimeError(
                f"{self.task.name}: {[images for _, images in totals]} images were scored and {skipped} are "
                f"unreadable, but the test split has {len(test.labels)}"
            )
        return totals
