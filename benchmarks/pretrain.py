"""Pre-training beside timm: the step, the loader with RandAugment, and packed data.

    python benchmarks/pretrain.py [step|loader|packed ...] [--workers 1]

Step: S/16 at 224 px, plain and DPN, 16 images, Adam, augmentation off: `fit` on one batch in memory and on JPEGs that
another process decodes and crops, beside a bare loop on the batch in memory. Loaders: 500 x 375 JPEGs at quality 90,
crops of 224, measured in turns in one process.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from loader import rate, write_images
from step import bare_steps
from timm.data import create_dataset, create_loader
from torch import nn

from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.crops import train_crop
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.sources.pack_writer import PackOptions, pack
from dpn_cli.data.sources.packs import PackedImages
from dpn_cli.data.splits import hash_order
from dpn_cli.engine.fit import Batches, Outputs, TrainJob, fit
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone

ROWS, SIZE, CLASSES, BATCH, IMAGES = 16, 224, 1000, 32, 256
CPU = World(0, 1, torch.device("cpu"))
ADAM = Optim(name="adam", weight_decay=1e-4, decay_unit="schedule")


def trained(model: Backbone, batches: Batches, steps: int) -> tuple[list[float], float]:
    """Train; returns the seconds of every step, and the share that was spent waiting for data."""
    times = [time.perf_counter()]

    def loss(trainable: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target = nn.functional.one_hot(batch["label"], CLASSES).float()
        return sigmoid_xent(trainable(model.normalize(batch["image"])).float(), target)

    outputs = Outputs(tick=lambda tick: times.append(time.perf_counter()))
    job = TrainJob(
        loss_fn=loss,
        batches=batches,
        optim=ADAM,
        schedule=Schedule(steps=steps),
        lr=1e-3,
        batch_size=ROWS,
        seed=0,
        world=CPU,
        micro_batch=MicroBatch(ROWS),
        outputs=outputs,
    )
    done = fit(model, job)
    return [after - before for before, after in itertools.pairwise(times)], done.wait_seconds / done.seconds


def step(folder: LabelledImages, rounds: int, steps: int) -> None:
    """Print our images per second, from memory and from files, over those of a bare loop."""
    stock = timm.create_model("vit_small_patch16_224", num_classes=CLASSES)
    plain, dual = (load_backbone("S/16", stem=stem, num_classes=CLASSES) for stem in ("none", "dpn"))
    target = nn.functional.one_hot(torch.arange(ROWS), CLASSES).float()
    noise = {"image": torch.randn(ROWS, 3, SIZE, SIZE), "label": target}
    memory = {"image": torch.randint(256, (ROWS, 3, SIZE, SIZE), dtype=torch.uint8), "label": torch.arange(ROWS)}
    sources: dict[str, Batches] = {
        "memory": lambda start: (memory for _ in itertools.count()),
        "JPEGs": crop_batches(folder, Augmentation((SIZE, SIZE)), ROWS, 0, CPU, workers=1),
    }
    for label, model, other in (("plain, bare loop over timm's", plain, stock), ("DPN, over the same", dual, dual)):
        bare = bare_steps(other, noise, Runtime(), CPU.device)
        times: dict[str, list[float]] = {name: [] for name in ("bare", *sources)}
        waits: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(rounds):
            times["bare"].extend(bare(steps + 1)[1:])
            for name, batches in sources.items():
                seconds, wait = trained(model, batches, steps + 1)
                times[name].extend(seconds[1:])
                waits[name].append(wait)
        middle = {name: statistics.median(values) for name, values in times.items()}
        for name in sources:
            print(
                f"S/16 {label}, from {name}: {ROWS / middle[name]:.2f} : {ROWS / middle['bare']:.2f} images/s = "
                f"{middle['bare'] / middle[name]:.3f}; {statistics.median(waits[name]):.1%} waiting for data",
                flush=True,
            )


def compare(kinds: dict[str, Callable[[], Iterator[Any]]], workers: int, rounds: int) -> None:
    """Print images per second of loaders that are run in turns, each also over the first."""
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, start in kinds.items():
            rates[name].append(rate(start()))
    middle = {name: float(np.median(values)) for name, values in rates.items()}
    first = next(iter(middle.values()))
    for name, value in middle.items():
        print(f"  {name:28s} {value:6.1f} images/s, {value / workers:6.1f} a process, {value / first:.2f} x the first")


def ours(split: LabelledImages, workers: int, **how: Any) -> Iterator[Any]:
    """Start our loader."""
    return crop_batches(split, Augmentation((SIZE, SIZE), **how), BATCH, 0, CPU, workers=workers)(0)


def timms(root: Path, workers: int, policy: str | None) -> Iterator[Any]:
    """Start timm's loader with an augmentation policy, bilinear."""
    plain = {"use_prefetcher": False, "color_jitter": 0, "interpolation": "bilinear", "persistent_workers": False}
    loader = create_loader(
        create_dataset("", root=str(root)),
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        num_workers=workers,
        device=CPU.device,
        auto_augment=policy,
        **plain,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def loaders(root: Path, workers: int, rounds: int) -> None:
    """Print rates with RandAugment, two operations, beside timm's."""
    print(f"loaders with RandAugment (2, 15), {workers} processes:")
    folder = ClassFolders(root)
    compare(
        {
            "timm rand-m9-n2": lambda: timms(root, workers, "rand-m9-n2"),
            "timm rand-m9-n2-p1.0": lambda: timms(root, workers, "rand-m9-n2-p1.0"),
            "ours, exact": lambda: ours(folder, workers, layers=2, magnitude=15),
            "ours, fast": lambda: ours(folder, workers, decode="fast", layers=2, magnitude=15),
        },
        workers,
        rounds,
    )


def packed(root: Path, workers: int, rounds: int) -> None:
    """Print rates of packs over that of the folder, their sizes, and how far their crops are from the folder's."""
    folder = ClassFolders(root)
    kinds: dict[str, Callable[[], Iterator[Any]]] = {"folder": lambda: ours(folder, workers)}
    packings = (PackOptions(None), PackOptions(320), PackOptions(256), PackOptions(320, "ppm"), PackOptions(256, "ppm"))
    order = hash_order(folder)
    for packing in packings:
        name = f"pack {packing.encode} {packing.size or 'keep'}"
        out = root.with_name(name.replace(" ", "-"))
        splits = {"train": (folder, order)}
        pack(splits, folder.classes, out, packing, workers=2, skip_bad=False, progress=lambda text: None)
        split = PackedImages(out, "train")
        kinds[name] = lambda split=split: ours(split, workers)  # type: ignore[misc]
        if packing.encode == "jpeg":
            kinds[f"{name}, fast"] = lambda split=split: ours(split, workers, decode="fast")  # type: ignore[misc]
        differences = []
        for place, row in enumerate(order[:64]):
            generators = [torch.Generator().manual_seed(place) for _ in range(2)]
            one, other = (
                train_crop(image, "", (SIZE, SIZE), generator, "exact").float()
                for image, generator in zip((folder.open(row), split.open(place)), generators, strict=True)
            )
            differences.append((one - other).abs().mean().item())
        kilobytes = sum(split.sizes) / len(order) / 1000
        print(f"{name}: {kilobytes:.0f} kB an image, crops differ by {np.mean(differences):.2f} grey levels on average")
    print(f"folder and packs, {workers} processes:")
    compare(kinds, workers, rounds)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["step", "loader", "packed"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = write_images(Path(place) / "folder", (500, 375), IMAGES)
        if "step" in asked.parts:
            step(ClassFolders(root), asked.rounds, asked.steps)
        if "loader" in asked.parts:
            loaders(root, asked.workers, asked.rounds)
        if "packed" in asked.parts:
            packed(root, asked.workers, asked.rounds)


if __name__ == "__main__":
    main()
