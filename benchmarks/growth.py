"""How seconds and peak memory grow with a data set, with its classes, with ranks and with the size of images.

    python benchmarks/growth.py [--match WORDS] [--results FILE] [--figure FILE]

Each point is a process of its own: its seconds, and its peak memory on top of what it held before, with PyTorch and all
modules imported. Data are made up in a temporary folder (hard links of a few images, tables, logs). Prints a table in
Markdown and draws a figure. A line whose seconds grow with the number itself has the exponent 1 in the last column.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dpn_cli.data import splits
from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.sampler import StepSampler
from dpn_cli.data.sources.base import Images, fingerprint
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.splits import open_class_data
from dpn_cli.metrics import score
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World, join
from dpn_cli.run.run_dir import MetricsLog
from dpn_cli.weights.backbone import load_backbone
from tasks.classify.predictions_file import describe_pairs, per_class
from tasks.lit.cache import cached_features
from tasks.lit.data import CaptionSource, open_pairs, open_split
from tasks.lit.features import ImageEncoder
from tasks.lit.train import fingerprints
from tasks.segment.model import LinearSegmenter
from tasks.segment.sliding_window import WindowPlan, label_map

Work = Callable[[], object]
# ext4 allows 65,000 links of a file.
ORIGINALS = 64
# ImageNet-1k has 1.28 million images of 1000 classes, ImageNet-21k 21,843 classes.
IMAGES = (1_000, 10_000, 100_000, 1_300_000)
CLASSES = (10, 100, 1_000, 10_000, 21_843)
ALONE = World(0, 1, torch.device("cpu"))
BATCH = 1024
# Panels of the figure side by side, and the smallest seconds and MiB that are drawn.
COLUMNS, LEAST = 3, (1e-5, 0.1)


def tree(size: int, folder: Path) -> Path:
    """Return a folder of `size` images in class folders as ImageNet's, made once."""
    root, classes = folder / f"tree-{size}", min(1000, size // 10)
    if root.is_dir():
        return root
    made = folder / "making"
    originals = [made / f"original-{number}" for number in range(ORIGINALS)]
    for label in range(classes):
        (made / f"n{label:08d}").mkdir(parents=True)
    for number, original in enumerate(originals):
        Image.new("RGB", (4 + number, 4)).save(original, "JPEG")
    for number in range(size):
        os.link(originals[number % ORIGINALS], made / name_of(number, classes))
    for original in originals:
        original.unlink()
    made.rename(root)
    time.sleep(2.5)  # the list of a folder that has just been written to is not kept
    return root


def name_of(number: int, classes: int) -> str:
    """Return an image's name in its tree."""
    return f"n{number % classes:08d}/n{number % classes:08d}_{number}.JPEG"


def forget(size: int, folder: Path) -> None:
    """Make a tree of which no list is kept."""
    tree(size, folder)
    shutil.rmtree(folder / "home", ignore_errors=True)


def keep(size: int, folder: Path) -> None:
    """Make a tree of which a list is kept, if it is long enough."""
    ClassFolders(tree(size, folder))


def list_folders(size: int, folder: Path) -> Work:
    """List a folder of `size` images."""
    root = tree(size, folder)
    return lambda: ClassFolders(root)


def split_up(size: int, folder: Path) -> Work:
    """Open `size` images whose list is kept, set validation images and minival apart, take digests."""
    root = tree(size, folder)

    def work() -> object:
        data = open_class_data(ImageSource(str(root), val_fraction=0.04), None)
        return data, [fingerprint(split) for split in (data.train, data.minival, data.val)]

    return work


def first_batch(size: int, folder: Path) -> Work:
    """Draw the images of the first batch of a training."""
    return lambda: next(iter(StepSampler(size, BATCH, 0, 0, range(BATCH))))


def resumed_batch(size: int, folder: Path) -> Work:
    """Draw the images of a batch inside the 101st epoch, as a resumed training does first."""
    return lambda: next(iter(StepSampler(size, BATCH, 0, 100 * size // BATCH + size // BATCH // 2, range(BATCH))))


def log_of(size: int, folder: Path) -> MetricsLog:
    """Return the place of a log."""
    return MetricsLog(folder / f"metrics-{size}.jsonl")


def write_log(size: int, folder: Path) -> None:
    """Write a log of `size` records."""
    record = {"loss": 1.2345678901234567, "lr": 1e-3, "grad_norm": 1.234567890123456, "images_per_second": 123.45}
    with log_of(size, folder).path.open("w") as file:
        for step in range(size):
            file.write(json.dumps({"step": step, **record, "wait_share": 0.00123}) + "\n")


def resumed_log(size: int, folder: Path) -> Work:
    """Read metrics.jsonl of `size` records when a run is resumed, and drop the last one."""
    log = log_of(size, folder)

    def work() -> None:
        log.truncate(size - 2)
        log.record_lost(size, size - 1)

    return work


def saved_log(size: int, folder: Path) -> Work:
    """Count the records of a training that has written `size` of them, as each of its 100 checkpoints does."""
    log = log_of(size, folder)
    log.count()

    def work() -> None:
        for _ in range(100):
            log.count()

    return work


class Grey(Images):
    """Grey images that are in no file."""

    def __init__(self, images: int, classes: int) -> None:
        self.labels = array("i", (number * 7 % classes for number in range(images)))
        self.sizes = array("q", [1000]) * images

    def locate(self, index: int) -> str:
        """Name an image by its number."""
        return f"image {index}"

    def open(self, index: int) -> Image.Image:
        """Return an image."""
        return Image.new("RGB", (8, 8), (index % 256,) * 3)


def hold_out(size: int, folder: Path) -> Work:
    """Set images of each of `size` classes apart, of 200,000 in all."""
    images = Grey(200_000, size)
    return lambda: splits.hold_out(images, 0.1)


def score_classes(size: int, folder: Path) -> Work:
    """Score 8192 images of `size` classes, and tell every class and the most frequent confusions."""
    split, logits = Grey(8192, size), torch.randn(256, size, generator=torch.Generator().manual_seed(0))

    def logits_of(images: torch.Tensor) -> torch.Tensor:
        return logits[: len(images)]

    def transform(pixels: Any) -> torch.Tensor:
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    names = [f"n{label:08d}" for label in range(size)]

    def work() -> object:
        scores = score(logits_of, split, transform, size, ALONE, loss="softmax", batch_size=256, workers=0)
        return scores, per_class(names, scores.confusion), describe_pairs(names, scores.confusion)

    return work


def pairs(size: int, folder: Path) -> CaptionSource:
    """Return a table of `size` captions of as many images, and the folder of these."""
    return CaptionSource(str(folder / f"captions-{size}.csv"), images=str(tree(size, folder)))


def write_table(size: int, folder: Path) -> None:
    """Write that table."""
    with Path(pairs(size, folder).location).open("w") as file:
        file.write("file,caption\n")
        for number in range(size):
            name = name_of(number, min(1000, size // 10))
            file.write(f"{name},a photo of thing number {number} beside another one\n")


def read_captions(size: int, folder: Path) -> Work:
    """Read a table of captions, and take its digests."""
    source = pairs(size, folder)

    def work() -> object:
        train, val = open_pairs(source)
        return train, val, fingerprints(train, val)

    return work


def check_cache(size: int, folder: Path) -> Work:
    """Check the features of `size` images that were cached before, each with 768 numbers."""
    data = open_split(pairs(size, folder), "train")
    encoder = ImageEncoder(lambda images: torch.ones(len(images), 768) / 768**0.5, 768, (8, 8), {}, workers=2)
    return lambda: cached_features(data, encoder, folder / "features", ALONE, Console(quiet=True))


def fill_cache(size: int, folder: Path) -> None:
    """Cache those features."""
    write_table(size, folder)
    check_cache(size, folder)()


def ranks(size: int, folder: Path) -> Work:
    """Open 100,000 images on each of `size` ranks, whose listing is kept, and draw a batch."""
    return split_up(100_000, folder)


def keep_one(size: int, folder: Path) -> None:
    """Make the tree that all ranks open."""
    keep(100_000, folder)


def slide(size: int, folder: Path) -> Work:
    """Segment a square image with sides of `size` pixels by sliding windows, with a small network, 150 classes."""
    vit = load_backbone("mu/16", stem="dpn", image_size=512, num_classes=150)
    network = LinearSegmenter(vit, final_norm=False).eval()
    image = torch.randint(0, 256, (3, size, size), dtype=torch.uint8)
    plan = WindowPlan(512, 341, (2048, 512))

    def work() -> object:
        with torch.inference_mode():
            return label_map(network, [image], (size, size), plan)

    with torch.inference_mode():  # a first, small one, so that what the libraries set up does not count
        label_map(network, [image[:, :128, :128]], (128, 128), plan)
    return work


@dataclass(frozen=True)
class Line:
    """A line of the figure: what is measured, along which axis, at which numbers, and what is made before."""

    work: Callable[[int, Path], Work]
    axis: str
    what: str
    points: Sequence[int]
    before: Callable[[int, Path], object] = lambda size, folder: None


RECORDS = (100, 1_000, 10_000, 100_000)
LINES = {
    "list": Line(list_folders, "images", "list class folders", IMAGES, forget),
    "again": Line(list_folders, "images", "list them again", IMAGES, keep),
    "split": Line(split_up, "images", "open, hold out, digests", IMAGES, keep),
    "first": Line(first_batch, "images", "draw the first batch", IMAGES),
    "resumed": Line(resumed_batch, "images", "draw a batch of epoch 101", IMAGES),
    "captions": Line(read_captions, "captions", "read a table", IMAGES, write_table),
    "cache": Line(check_cache, "captions", "check cached features", IMAGES[:3], fill_cache),
    "log": Line(resumed_log, "records", "resume metrics.jsonl", RECORDS, write_log),
    "checkpoints": Line(saved_log, "records", "100 checkpoints", RECORDS, write_log),
    "hold": Line(hold_out, "classes", "hold out, 200,000 images", CLASSES),
    "score": Line(score_classes, "classes", "score 8192 images", CLASSES),
    "ranks": Line(ranks, "ranks", "open 100,000 images on each", (1, 2, 3, 4), keep_one),
    "slide": Line(slide, "side in pixels", "sliding windows", (128, 256, 512, 1024, 2048, 4096)),
}


def status(key: str) -> float:
    """Return a figure of this process's memory in MiB (Linux)."""
    found = re.search(key + r":\s*(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 2**10


def measure(name: str, size: int, folder: Path) -> tuple[float, float]:
    """Return seconds, and peak memory in MiB on top of what this process holds before."""
    torch.set_num_threads(1)
    with join("cpu"):
        work = LINES[name].work(size, folder)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would be taken again without being counted
        Path("/proc/self/clear_refs").write_text("5")
        before, began = status("VmRSS"), time.perf_counter()
        kept = work()
        spent, peak = time.perf_counter() - began, status("VmHWM") - before
        del kept
    return spent, peak


def run_apart(command: Sequence[str], folder: Path) -> str:
    """Run Python on one thread, with a home of its own; returns what it prints."""
    environment = {**os.environ, "DPN_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def measure_apart(name: str, size: int, folder: Path) -> tuple[float, float]:
    """Return what `measure` does in a process of its own, or the most of several ranks."""
    command = [__file__, "--point", name, str(size), str(folder)]
    run_apart([*command, "--before"], folder)
    if LINES[name].axis == "ranks":
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *command]
    found = [json.loads(line) for line in run_apart(command, folder).splitlines() if line.startswith("[")]
    return max(spent for spent, _ in found), max(peak for _, peak in found)


Found = dict[str, dict[str, tuple[float, float]]]


def table(found: Found) -> str:
    """Return the measurements as a table in Markdown."""
    lines = ["| | from | to | seconds | peak MiB on top | exponent of the seconds |", "|---|---|---|---|---|---|"]
    for name, points in found.items():
        line, numbers = LINES[name], [int(number) for number in points]
        seconds, peaks = (", ".join(f"{values[which]:.3g}" for values in points.values()) for which in (0, 1))
        (few, before), (many, after) = list(zip(numbers, points.values(), strict=True))[-2:]
        exponent = math.log(after[0] / before[0]) / math.log(many / few)
        said = f"{line.what}, by {line.axis}"
        lines.append(f"| {said} | {numbers[0]:,} | {numbers[-1]:,} | {seconds} | {peaks} | {exponent:.2f} |")
    return "\n".join(lines)


def draw(found: Found, path: Path) -> None:
    """Draw seconds and memory against what grows."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    from dpn_cli.report.charts import COLOURS, STYLE

    axes = list(dict.fromkeys(LINES[name].axis for name in found))
    columns = min(COLUMNS, len(axes))
    with plt.rc_context({**STYLE, "legend.fontsize": 7}):
        figure, panels = plt.subplots(
            2 * -(-len(axes) // columns), columns, figsize=(3.2 * columns, 1.9 * len(axes)), squeeze=False
        )
        for place, axis in enumerate(axes):
            above, below = (panels[place // columns * 2 + row, place % columns] for row in (0, 1))
            here = {name: points for name, points in found.items() if LINES[name].axis == axis}
            for colour, (name, points) in zip(COLOURS, here.items(), strict=False):
                numbers, what = [int(number) for number in points], LINES[name].what
                for panel, values, least in zip((above, below), zip(*points.values(), strict=True), LEAST, strict=True):
                    shown = [max(value, least) for value in values]
                    panel.plot(numbers, shown, "o-", color=colour, ms=3, label=what)
            for panel in (above, below):
                if max(numbers) < 10:
                    panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
                else:
                    panel.set(xscale="log", yscale="log")
                    low, high = panel.get_ylim()
                    panel.set_ylim(min(low, high / 10), high)
                    for side in (panel.xaxis, panel.yaxis):
                        side.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.9g}"))
                        side.set_minor_locator(NullLocator())
                if max(numbers) < 100 * min(numbers):
                    panel.set_xticks(numbers)
            low, high = above.get_ylim()
            room = 0.13 * len(here)  # for the legend
            above.set_ylim(low, high * (high / low) ** room if low else high * (1 + room))
            above.legend(loc="upper left")
            below.set_xlabel(axis)
            above.set_ylabel("seconds")
            below.set_ylabel("MiB on top")
        for panel in panels.flat[2 * len(axes) :]:
            panel.remove()
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def main() -> None:
    """Measure every point, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only lines whose name holds one of these words")
    parser.add_argument("--most", type=int, default=max(IMAGES), help="only points up to this number")
    parser.add_argument("--results", type=Path, help="JSON to add the measurements to")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--scratch", type=Path, help="where the temporary folder is made")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--before", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        name, size, folder = asked.point
        if asked.before:
            LINES[name].before(int(size), Path(folder))
            return
        print(json.dumps(measure(name, int(size), Path(folder))), flush=True)
        return
    found: Found = json.loads(asked.results.read_text()) if asked.results and asked.results.is_file() else {}
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        for name, line in LINES.items():
            if not any(word in name for word in asked.match.split() or [""]):
                continue
            found[name] = {}
            for number in line.points:
                if number <= asked.most:
                    found[name][str(number)] = measure_apart(name, number, Path(scratch))
                    print(line.axis, line.what, number, *found[name][str(number)], file=sys.stderr, flush=True)
            if asked.results:
                asked.results.write_text(json.dumps(found, indent=1) + "\n")
    found = {name: found[name] for name in LINES if name in found}
    print(table(found))
    if asked.figure:
        draw(found, asked.figure)


if __name__ == "__main__":
    main()
