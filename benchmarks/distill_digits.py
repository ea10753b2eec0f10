"""Distil a network that reads handwritten digits, and fine-tune teacher and student alike on the digits' VTAB task.

    python benchmarks/distill_digits.py --out runs/distill_digits    # 12 short trainings, about ten minutes on 2 cores

scikit-learn's 1797 digits of 8 x 8 pixels are cut into 800 + 200 + 797. A plain ViT is pre-trained on the 800 with
their labels; ``dpn distill`` turns it into one with a DPN stem, with the same images and no label. Then VTAB's
protocol trains both, and a DPN network that was pre-trained with labels, on the 1000 and scores them on the 797, which
none of them has seen before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ARCH = ["--arch", "nano/4", "--image-size", "16"]


def write_digits(root: Path) -> None:
    """Write the digits twice: in folders of classes, and in the layout of a VTAB task."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    for split, part in (("train800", order[:800]), ("val200", order[800:1000]), ("test", order[1000:])):
        lines = []
        for number in part:
            label, name = data.target[number], f"{number:04d}.png"
            image = Image.fromarray((data.images[number] * 255 / 16).astype(np.uint8))
            task = root / "vtab-1k" / "svhn"
            (task / "images").mkdir(parents=True, exist_ok=True)
            image.save(task / "images" / name)
            lines.append(f"images/{name} {label}\n")
            if split != "test":
                folder = root / "digits" / {"train800": "train", "val200": "val"}[split] / str(label)
                folder.mkdir(parents=True, exist_ok=True)
                image.save(folder / name)
        (task / f"{split}.txt").write_text("".join(lines))


def dpn(*words: str, folder: Path) -> dict[str, Any]:
    """Run a command in a folder of its own, unless that was done, and return the result."""
    if not (folder / "result.json").is_file():
        command = [sys.executable, "-m", "dpn_cli", *words, "-o", str(folder), "--overwrite", "-q"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def main() -> None:
    """Train all networks and print what they score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distill_digits"))
    parser.add_argument("--epochs", type=int, default=60)
    asked = parser.parse_args()
    out: Path = asked.out
    if not (out / "vtab-1k" / "svhn" / "test.txt").is_file():
        write_digits(out)
    epochs, digits = str(asked.epochs), str(out / "digits")
    dpn("pretrain", "--data", digits, "--stem", "none", "--epochs", epochs, *ARCH, folder=out / "teacher")
    student = dpn(
        "distill", "--teacher", str(out / "teacher"), "--data", digits, "--epochs", epochs, "-b", "64", "--jitter", "0",
        folder=out / "student",
    )  # fmt: skip
    dpn("pretrain", "--data", digits, "--stem", "dpn", "--epochs", epochs, *ARCH, folder=out / "scratch")
    print("on 200 validation digits: teacher {teacher_top1:.1f} %, student {top1:.1f} %".format(**student))
    print("agreement {agreement:.1f} %, token variance {token_variance:.3f} on held-out digits".format(**student))
    print("| VTAB's protocol on the digits, from | test accuracy of 3 seeds, % |\n|---|---|")
    for name in ("teacher", "student", "scratch"):
        result = dpn(
            "finetune", "vtab", "--data", str(out / "vtab-1k"), "--tasks", "svhn", "--checkpoint",
            str(out / name / "weights.safetensors"), "--image-size", "16", "--steps", "500", "-b", "64",
            "--lrs", "0.01,0.03,0.1", folder=out / f"vtab-{name}",
        )  # fmt: skip
        test = result["tasks"]["svhn"]["test"]
        words = {"teacher": "the plain teacher", "student": "the distilled DPN student", "scratch": "DPN, with labels"}
        print(f"| {words[name]} | {test['mean']:.2f} ± {test['stderr']:.2f} |")


if __name__ == "__main__":
    main()
