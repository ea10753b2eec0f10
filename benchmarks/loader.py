"""Images per second of training and evaluation beside timm's, and how far fast decoding's pixels are from exact ones.

    python benchmarks/loader.py [--workers 2]

JPEGs at quality 90. Training: crops of 384, in batches from worker processes. Evaluation: the shorter side resized to
256, the centre of 224 cut out, one image after the other on one core. Ours and timm's run alternately and give uint8;
timm's decodes with Pillow.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_loader, create_transform

from dpn_cli.data.augment import Augmentation
from dpn_cli.data.crops import Decode, eval_crop, train_crop
from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.run.distributed import World
from dpn_cli.run.process import keep_memory

IMAGES, BATCH, SIZE, ROUNDS, STEPS = 256, 32, 384, 5, 16
HOW: tuple[Decode, Decode] = ("exact", "fast")


def write_images(root: Path, size: tuple[int, int], count: int) -> Path:
    """Write images with the spectrum of photographs (amplitude falls with the frequency)."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size[1]), np.fft.fftfreq(size[0]), indexing="ij"))

    def write(number: int) -> None:
        generator = np.random.default_rng(number)
        noise = np.fft.fft2(generator.normal(size=(3, size[1], size[0])))
        field = np.fft.ifft2(noise / np.maximum(frequency, 1 / max(size))).real
        field = (field - field.mean()) / field.std() * 55 + 120
        image = Image.fromarray(field.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
        folder = root / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:04d}.jpg", quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))
    return root


def ours(root: Path, decode: Decode, workers: int) -> Iterator[Any]:
    """Start our loader."""
    world, augmentation = World(0, 1, torch.device("cpu")), Augmentation((SIZE, SIZE), decode)
    return crop_batches(ClassFolders(root), augmentation, BATCH, 0, world, workers=workers)(0)


def timms(root: Path, workers: int) -> Iterator[Any]:
    """Start timm's loader, without colour jitter and with bilinear resizing."""
    data, shape, device = create_dataset("", root=str(root)), (3, SIZE, SIZE), torch.device("cpu")
    plain = {"use_prefetcher": False, "color_jitter": 0, "interpolation": "bilinear", "persistent_workers": False}
    loader = create_loader(data, shape, BATCH, is_training=True, num_workers=workers, device=device, **plain)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def rate(stream: Iterator[Any]) -> float:
    """Return images per second after the workers have started."""
    for _ in range(4):
        next(stream)
    began = time.perf_counter()
    for _ in range(STEPS):
        next(stream)
    return STEPS * BATCH / (time.perf_counter() - began)


def evaluated() -> dict[str, Callable[[Path], Any]]:
    """Return what prepares the file of an image for evaluation, by name."""
    theirs = create_transform(224, is_training=False, use_prefetcher=True, interpolation="bilinear", crop_pct=0.875)

    def ours(path: Path) -> Any:
        return eval_crop(read_pixels(path, "", ReadOptions()), 256, (224, 224))

    return {"timm": lambda path: theirs(Image.open(path).convert("RGB")), "ours": ours}


def evaluation_rates(root: Path) -> dict[str, float]:
    """Return images per second of a core in evaluation."""
    paths, threads = sorted(root.rglob("*.jpg")), torch.get_num_threads()
    rates: dict[str, list[float]] = {"timm": [], "ours": []}
    torch.set_num_threads(1)
    for _ in range(ROUNDS):
        for name, prepare in evaluated().items():
            began = time.perf_counter()
            for path in paths:
                prepare(path)
            rates[name].append(len(paths) / (time.perf_counter() - began))
    torch.set_num_threads(threads)
    return {name: float(np.median(values)) for name, values in rates.items()}


def pixel_difference(root: Path) -> list[float]:
    """Return mean absolute differences of fast from exact crops, in grey levels."""
    differences = []
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        exact, fast = (
            train_crop(Image.open(path), "", (SIZE, SIZE), torch.Generator().manual_seed(number), how) for how in HOW
        )
        differences.append((exact.float() - fast.float()).abs().mean().item())
    return differences


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    keep_memory()  # as the program does
    with tempfile.TemporaryDirectory() as folder:
        for size in ((500, 375), (1600, 1200)):
            count = IMAGES if size[0] == 500 else 48
            root = write_images(Path(folder) / str(size[0]), size, count)
            kinds: dict[str, Callable[[], Iterator[Any]]] = {
                "timm": lambda root=root: timms(root, workers),
                "exact": lambda root=root: ours(root, "exact", workers),
                "fast": lambda root=root: ours(root, "fast", workers),
            }
            rates: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(ROUNDS if size[0] == 500 else 2):
                for name, start in kinds.items():
                    rates[name].append(rate(start()))
            middle = {name: float(np.median(values)) for name, values in rates.items()}
            kilobytes = sum(path.stat().st_size for path in root.rglob("*.jpg")) / count / 1000
            print(f"{size[0]} x {size[1]}, {kilobytes:.0f} kB each, {workers} workers:")
            for name, value in middle.items():
                ratio = value / middle["timm"]
                print(f"  {name:6s} {value:6.1f} images/s, {value / workers:6.1f} per core, {ratio:.2f} x timm")
            for name, value in (evaluation := evaluation_rates(root)).items():
                print(f"  evaluation, {name} {value:6.1f} images/s of a core, {value / evaluation['timm']:.2f} x timm")
            differences = pixel_difference(root)
            mean, worst = np.mean(differences), max(differences)
            print(f"  fast differs from exact by {mean:.2f} grey levels on average, by {worst:.2f} in the worst image")
