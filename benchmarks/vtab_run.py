"""A VTAB run as a whole: the share of time spent waiting for data, and the peak memory of a large test split.

    python benchmarks/vtab_run.py [--arch Ti/16] [--test-images 22000] [--steps 30]

Makes a task in the VTAB layout from noise (800 / 200 / N images of 32 x 32 pixels, PNG), runs the command on it at
224 px in a process of its own, and prints what that process needed beside what its weights alone need.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from dpn_cli.weights.backbone import load_backbone


def write_noise(root: Path, sizes: dict[str, int]) -> None:
    """Write ``root/svhn`` with that many random images per split."""
    rng = np.random.default_rng(0)
    for split, count in sizes.items():
        folder = root / "svhn" / "images" / split
        folder.mkdir(parents=True)
        lines = []
        for number in range(count):
            name = f"images/{split}/{number:06d}.png"
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / "svhn" / name)
            lines.append(f"{name} {number % 10}\n")
        (root / "svhn" / f"{split}.txt").write_text("".join(lines))


def main() -> None:
    """Make the data, run the command, print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="Ti/16")
    parser.add_argument("--test-images", type=int, default=22_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "vtab-1k"
        write_noise(root, {"train800": 800, "val200": 200, "test": asked.test_images})
        command = [sys.executable, "-m", "dpn_cli", "finetune", "vtab", "--data", str(root), "--tasks", "svhn"]
        command += ["--arch", asked.arch, "--checkpoint", "none", "--lrs", "1e-3", "--seeds", "1", "-q", "--json"]
        command += ["--steps", str(asked.steps), "-b", str(asked.batch_size), "-o", str(Path(folder) / "run")]
        command += ["--set", "schedule.warmup=2"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    timing = json.loads(done.stdout)["timing"]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    weights = 4 * load_backbone(asked.arch, image_size=224).report.parameters
    share = timing["wait_seconds"] / timing["train_seconds"]
    print(
        f"{asked.arch} at 224 px, batch {asked.batch_size}: {share:.2%} of {timing['train_seconds']:.0f} s of training "
        f"spent waiting for data; peak memory {peak / 1e9:.2f} GB with {asked.test_images} test images, "
        f"of which weights {weights / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
