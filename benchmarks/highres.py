"""What fine-tuning at 384 px costs with real JPEGs: our loader and loop beside a bare loop.

    python benchmarks/highres.py [--steps 4] [--rounds 3]

B/32, 8 images a step. Ours reads 500 x 375 JPEGs (one decoding process), crops, flips and normalises; the bare loop is
given one batch of noise again and again. Measured in turns in one process; reported are images per second (medians).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from loader import write_images
from step import bare_steps
from torch import nn

from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import FitResult, Outputs, TrainJob, fit
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone

ROWS, SIZE, CLASSES = 8, 384, 100


def ours(model: Backbone, folder: ClassFolders, steps: int, device: torch.device) -> tuple[list[float], FitResult]:
    """Train on the folder; returns the seconds of every step and the loop's own account."""
    world, times = World(0, 1, device), [time.perf_counter()]
    batches = crop_batches(folder, Augmentation((SIZE, SIZE)), ROWS, 0, world, workers=1)

    def loss(trainable: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target = nn.functional.one_hot(batch["label"], CLASSES).float()
        return sigmoid_xent(trainable(model.normalize(batch["image"])).float(), target)

    outputs = Outputs(tick=lambda tick: times.append(time.perf_counter()))
    job = TrainJob(
        loss_fn=loss,
        batches=batches,
        optim=Optim(),
        schedule=Schedule(steps=steps),
        lr=1e-3,
        batch_size=ROWS,
        seed=0,
        world=world,
        micro_batch=MicroBatch(ROWS),
        outputs=outputs,
    )
    done = fit(model, job)
    return [after - before for before, after in itertools.pairwise(times)], done


def compare(label: str, model: Backbone, other: nn.Module, folder: ClassFolders, steps: int, rounds: int) -> None:
    """Measure our training of `model` and a bare loop over `other` in turns, and print rates and ratio."""
    device = next(model.parameters()).device
    target = nn.functional.one_hot(torch.arange(ROWS), CLASSES).float().to(device)
    noise = {"image": torch.randn(ROWS, 3, SIZE, SIZE, device=device), "label": target}
    bare, waited, trained = bare_steps(other, noise, Runtime(), device), 0.0, 0.0
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        times[1].extend(bare(steps + 1)[1:])
        seconds, done = ours(model, folder, steps + 1, device)
        times[0].extend(seconds[1:])
        waited, trained = waited + done.wait_seconds, trained + done.seconds
    first, second = (statistics.median(values) for values in times)
    print(
        f"{label} at {SIZE}: {ROWS / first:.2f} images/s from JPEGs, bare loop {ROWS / second:.2f}, ratio "
        f"{second / first:.3f}; {waited / trained:.2%} of the training waited for data, its start included",
        flush=True,
    )


def main() -> None:
    """Measure the plain network against timm's own, and the DPN network against itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stock = timm.create_model("vit_base_patch32_224", img_size=SIZE, num_classes=CLASSES).to(device)
    plain, dual = (
        load_backbone("B/32", stem=stem, image_size=SIZE, num_classes=CLASSES).to(device) for stem in ("none", "dpn")
    )
    with tempfile.TemporaryDirectory() as place:
        folder = ClassFolders(write_images(Path(place), (500, 375), 64))
        compare("B/32 plain, bare loop over timm's own", plain, stock, folder, asked.steps, asked.rounds)
        compare("B/32 DPN, bare loop over the same network", dual, dual, folder, asked.steps, asked.rounds)


if __name__ == "__main__":
    main()
