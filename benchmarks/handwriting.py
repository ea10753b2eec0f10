"""Real images without a download: scikit-learn's handwritten digits in the VTAB layout, trained and scored.

Writes 800 / 200 / 797 images of 8 x 8 pixels as the folder of the ``svhn`` task, then runs the command below, three
learning rates and three seeds, with the plain ViT beside Dual PatchNorm:

    python benchmarks/handwriting.py [FOLDER]
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SPLITS = {"train800": slice(0, 800), "val200": slice(800, 1000), "test": slice(1000, None)}
COMMAND = shlex.split(
    "finetune vtab --tasks svhn --checkpoint none --config vtab_demo --arch mu/4 --image-size 16 --steps 1500 "
    "--lrs 3e-3,1e-2,3e-2 --compare none,dpn --overwrite"
)


def write_digits(root: Path) -> None:
    """Write the data set as ``root/svhn`` unless it is there."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    for split, part in SPLITS.items():
        folder = root / "svhn" / "images" / split
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, index in enumerate(order[part]):
            name = f"images/{split}/{number:06d}.png"
            Image.fromarray((data.images[index] * 255 / 16).astype(np.uint8)).save(root / "svhn" / name)
            lines.append(f"{name} {data.target[index]}\n")
        (root / "svhn" / f"{split}.txt").write_text("".join(lines))


def main() -> None:
    """Write the images and run the command."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    write_digits(folder / "vtab-1k")
    began = time.perf_counter()
    command = [sys.executable, "-m", "dpn_cli", *COMMAND, "--data", str(folder / "vtab-1k"), "-o", str(folder / "run")]
    print("$ dpn", " ".join(command[3:]), flush=True)
    done = subprocess.run(command, check=False)
    print(f"{time.perf_counter() - began:.0f} s; raw values in {folder / 'run' / 'result.json'}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
