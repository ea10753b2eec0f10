"""Where a training step of `benchmarks/gpu.py` waits for the GPU: how often, and in which lines."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_report import Check, NotHereError, Settings
from gpu_speed import RUNTIME
from step import CLASSES, Steps, fit_steps, loss_fn, synthetic
from torch import Tensor, nn

from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import Batch, prepare
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone

ROOT = Path(__file__).parents[1]
# Waits that a step may have.
ALLOWED = 0
# Steps of the two runs whose difference counts: both are logged 50 times, which waits. And the JPEGs that one reads.
SHORT, LONG = 50, 100
IMAGES = 16


def waits(settings: Settings) -> Iterator[Check]:
    """Count the synchronisations of a step: of the loop, with segmentation's loss, and with images from files."""
    device = settings.device
    if device.type != "cuda":
        raise NotHereError("nobody waits for a CPU")
    with tempfile.TemporaryDirectory() as place:
        for name, run in trainings(settings, Path(place)):
            run(SHORT)  # what happens once in a process does not count
            more = places(run, LONG)
            more.subtract(places(run, SHORT))
            each = {where: count / (LONG - SHORT) for where, count in more.items() if count}
            note = ", ".join(f"{where} {count:g}" for where, count in each.items())
            yield Check(f"synchronisations of a step, {name}", sum(each.values()), ALLOWED, note)


def trainings(settings: Settings, folder: Path) -> Iterator[tuple[str, Steps]]:
    """Yield trainings of small networks by name."""
    device, rows, side = settings.device, settings.rows, 32
    model = load_backbone("mu/8", image_size=side, num_classes=CLASSES)
    ready = prepare(model, RUNTIME, World(0, 1, device))
    batch = synthetic(rows, device, side)
    yield "one batch on the device", fit_steps(ready, batch, RUNTIME, device)

    def of_pixels(trainable: nn.Module, part: Batch) -> Tensor:
        label = nn.functional.one_hot(part["label"], CLASSES).float()
        return loss_fn(trainable, {"image": model.normalize(part["image"]), "label": label})

    from loader import write_images

    images = ClassFolders(write_images(folder / "images", (64, 48), IMAGES))
    stream = crop_batches(images, Augmentation((side, side)), rows, 0, World(0, 1, device), workers=1)
    yield "crops of files", fit_steps(ready, batch, RUNTIME, device, batches=stream, loss_fn=of_pixels)
    import segment

    plain = segment.network("mu/8", "none", crop=side, device=device)
    yield "segmentation", segment.our_steps(plain, segment.synthetic(rows, side, device), RUNTIME, device)


def places(run: Steps, steps: int) -> Counter[str]:
    """Return how often each line of Python has waited for the GPU in so many steps."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in told if "synchronizing CUDA operation" in str(one.message)]
    return Counter(f"{short(one.filename)}:{one.lineno}" for one in found)


def short(name: str) -> str:
    """Return the name of a file, from the checkout's folder where it is in there."""
    path = Path(name)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-2:])
