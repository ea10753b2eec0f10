"""A network and a task's pixels, loaded once and used by all trainings of the task."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpn_cli.config.launch import SCRATCH_PIXELS
from dpn_cli.data.decoded_cache import decode_once
from dpn_cli.data.pixels import PixelSet, load, shuffled_batches
from dpn_cli.data.resize import Size, resize
from dpn_cli.engine import fit as engine
from dpn_cli.engine.losses import LOSSES
from dpn_cli.engine.memory import MicroBatch, in_chunks
from dpn_cli.metrics import confusion_matrix, count_right, rank_share
from dpn_cli.run import distributed
from dpn_cli.run.baseline_warnings import crop_warning
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.weights.backbone import Backbone, backbone_of
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData
from tasks.vtab.tasks import Task
from tasks.vtab.trials import VtabTrial

# 256 for 224: the size from which the public relative of the paper's config crops.
RESIZE_RATIO = 256 / 224


def resized_for_crops(config: VtabConfig, size: Size) -> Size:
    """Return the (height, width) in pixels that training crops of the input `size` are taken from."""
    height, width = size
    larger = config.data.resize
    return larger or round(height * RESIZE_RATIO), larger or round(width * RESIZE_RATIO)


def check_crops(config: VtabConfig, tasks: Sequence[Task], console: Console) -> None:
    """Warn when training crops show too little of an image; all tasks that crop do it alike."""
    pixels = config.backbone.image_size or SCRATCH_PIXELS  # which most checkpoints have
    size = (pixels, pixels) if isinstance(pixels, int) else pixels
    if any("crop" in config.data.augment[task.name] for task in tasks) and (
        warning := crop_warning(size, [resized_for_crops(config, size)])
    ):
        console.warn(warning)


def load_network(config: VtabConfig, network: str, classes: int) -> Backbone:
    """Load the config's network of that name, with a zero head. Raises the errors of `load_backbone`."""
    return backbone_of(config.by_network()[network].backbone, num_classes=classes)


class Trainer:
    """Trains and scores one network on one task; its compiled step and its pixels serve every cell.

    Processes that share the work share the pixels, too, in the folder `shared`.
    """

    def __init__(
        self,
        config: VtabConfig,
        network: str,
        task: Task,
        data: TaskData,
        world: World,
        console: Console,
        shared: Path | None = None,
    ) -> None:
        self.config, self.task, self.data, self.world, self.console = config, task, data, world, console
        self.augment, self.shared = config.data.augment[task.name], shared
        self.model = load_network(config, network, task.classes)
        self.size = self.model.config.image_size
        if config.runtime.compile:
            torch.compiler.reset()  # the compiler gives up after eight head sizes; VTAB has fifteen
        self.trainable = engine.prepare(self.model, config.runtime, world)
        self.scratch = config.by_network()[network].backbone.checkpoint == "none"
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.micro_batch = MicroBatch.choose(config.runtime, world.most(config.batch_size), self.model, world.device)
        self._pixels: dict[tuple[str, bool], PixelSet] = {}

    def job(self, trial: VtabTrial, outputs: engine.Outputs) -> engine.TrainJob:
        """Reset the network and return the engine's job of a cell, whose ``accuracy`` is that on val200."""
        if self.scratch:
            self.model.initialize(trial.seed)
        else:
            self.model.load_state_dict(self.first)
        train, val = self.pixels(trial.split, train=True), self.pixels("val200", train=False)
        batches = shuffled_batches(
            train,
            self.size,
            self.config.batch_size,
            trial.seed,
            crop="crop" in self.augment,
            flip="flip" in self.augment,
            world=self.world,
        )
        return engine.TrainJob(
            loss_fn=self.loss,
            batches=batches,
            optim=self.config.optim,
            schedule=self.config.schedule,
            lr=trial.lr,
            batch_size=self.config.batch_size,
            seed=trial.seed,
            evaluate=lambda: self.evaluate(val),
            runtime=self.config.runtime,
            world=self.world,
            micro_batch=self.micro_batch,
            outputs=outputs,
        )

    def pixels(self, split: str, *, train: bool) -> PixelSet:
        """Return a split in memory; with `train` and crops, at the size that crops are taken from."""
        if split == "train800val200":
            parts = [self.pixels(part, train=train) for part in ("train800", "val200")]
            return PixelSet(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
        cropped = train and "crop" in self.augment
        if (split, cropped) not in self._pixels:
            size = resized_for_crops(self.config, self.size) if cropped else self.size
            decode = partial(
                load,
                getattr(self.data, split),
                size,
                workers=self.config.runtime.workers,
                skip_bad=self.config.data.skip_bad_images,
            )
            name = f"{self.task.name}-{split}-{size[0]}x{size[1]}"
            pixels = decode_once(self.shared / name if self.shared else None, decode)
            if pixels.skipped:
                self.console.warn(f"{self.task.name}: {pixels.skipped} unreadable images of {split} are left out")
            self._pixels[split, cropped] = pixels.to(self.world.device)
        return self._pixels[split, cropped]

    def loss(self, model: nn.Module, batch: engine.Batch) -> Tensor:
        """Return the mean loss of a batch of uint8 images and labels."""
        logits = model(self.model.normalize(batch["image"])).float()
        return LOSSES[self.config.loss](logits, F.one_hot(batch["label"], self.task.classes).float())

    def evaluate(self, pixels: PixelSet) -> dict[str, float]:
        """Return top-1 accuracy in percent over a set in memory; the ranks share the images."""
        confusion = confusion_matrix(self.task.classes, self.world.device)
        rows = torch.arange(self.world.rank, len(pixels.images), self.world.size, device=pixels.images.device)
        for part in torch.split(rows, self.config.eval_batch_size):
            logits = in_chunks(lambda some: self.model(self.model.normalize(some)), pixels.images[part])
            confusion.update(logits, pixels.labels[part])
        right, images = count_right(confusion)
        if images != len(pixels.images):
            raise RuntimeError(f"{self.task.name}: {images} images were scored, but the split has {len(pixels.images)}")
        return {"accuracy": 100 * right / images}

    def count_test(self, weights: Sequence[dict[str, Tensor]]) -> list[tuple[int, int]]:
        """Return (right, all) counts on test for several sets of weights, in one pass that decodes each image once.

        Test splits have up to 70,000 images, so they are streamed and never held in memory. Raises `StoppedError`.
        """
        config, test = self.config, self.data.test
        confusions = [confusion_matrix(self.task.classes, self.world.device) for _ in weights]
        transform, bad = partial(resize, size=self.size), config.data.skip_bad_images
        skipped = 0
        self.model.eval()
        share = rank_share(test, transform, self.world, config.eval_batch_size, config.runtime.workers, skip_bad=bad)
        with closing(share) as parts:
            for part in parts:
                skipped += part.skipped
                if not len(part.images):
                    continue
                with torch.inference_mode(), autocast(config.runtime, self.world.device, self.model):
                    images = self.model.normalize(part.images.to(self.world.device))
                    labels = part.labels.to(self.world.device)
                    for state, confusion in zip(weights, confusions, strict=True):
                        forward = partial(torch.func.functional_call, self.model, state)
                        confusion.update(in_chunks(forward, images), labels)
        skipped = int(distributed.reduce_over_ranks(torch.tensor(skipped)))
        if skipped:
            self.console.warn(f"{self.task.name}: {skipped} unreadable test images are left out of the score")
        totals = [count_right(confusion) for confusion in confusions]
        if any(images + skipped != len(test.labels) for _, images in totals):
            raise RuntimeError(
                f"{self.task.name}: {[images for _, images in totals]} images were scored and {skipped} are "
                f"unreadable, but the test split has {len(test.labels)}"
            )
        return totals
