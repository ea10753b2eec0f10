"""Seconds to the first batch of the training loader, and the shared memory that it holds while batches are in use.

    python benchmarks/batches.py [--workers 1 2 4] [--batch 2048] [--size 224]

JPEGs of 500 x 375 at quality 90. The memory is that of files in /dev/shm which this process and its workers have open,
at its highest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import torch
from loader import IMAGES, write_images

from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.run.distributed import World

# Batches that are taken, seconds that the last of them is in use, and seconds between two looks at the memory.
TAKEN, IN_USE, EVERY = 3, 3.0, 0.02
SHARED = Path("/dev/shm")


def held() -> int:
    """Return the bytes of shared memory that this process and its children have open."""
    device, sizes = SHARED.stat().st_dev, dict[int, int]()
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        with suppress(FileNotFoundError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if (status := file.stat()).st_dev == device:
                        sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def measure(root: Path, workers: int, batch: int, size: int) -> tuple[float, float, int]:
    """Return the seconds to the first batch, those to each of the others, and the most bytes held."""
    split, world, most, ended = ClassFolders(root), World(0, 1, torch.device("cpu")), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(EVERY):
            most = max(most, held())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        began = time.perf_counter()
        with closing(crop_batches(split, Augmentation((size, size)), batch, 0, world, workers=workers)(0)) as batches:
            next(batches)
            first = time.perf_counter() - began
            for _ in range(TAKEN - 1):
                next(batches)
            rest = (time.perf_counter() - began - first) / (TAKEN - 1)
            time.sleep(IN_USE)
    finally:
        ended.set()
        watching.join()
    return first, rest, most


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--size", type=int, default=224)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = write_images(Path(folder), (500, 375), IMAGES)
        for workers in given.workers:
            first, rest, most = measure(root, workers, given.batch, given.size)
            print(
                f"{workers} workers: first batch of {given.batch} after {first:.1f} s, the next ones after {rest:.1f} "
                f"s each, {most / 2**20:.0f} MiB of shared memory"
            )
