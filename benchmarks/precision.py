"""What bfloat16 gains on a CPU, and what it costs.

    python benchmarks/precision.py [--steps 3] [--rounds 3] [--compiled] [--only NAMES]
    python benchmarks/precision.py --paired CIFAR -o FOLDER [--seeds 3] [--only TASKS]

1. A training step of networks in the precision that `--precision auto` takes, in fp32 and in bf16, beside a bare loop
   over timm's ViT of the same size in fp32, measured in turns in one process; then a forward pass. With `--compiled`
   also the compiled step, and the seconds of its first one.
2. Trainings of the tasks in fp32 and in bf16 from the same seeds, and the paired differences of their scores. CIFAR
   holds CIFAR-10 as image files, in train/CLASS and test/CLASS. A training that FOLDER holds is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from photographs import link_images, run_dpn
from step import CLASSES, Steps, bare_steps, fit_steps, synthetic, timms
from torch import nn

from dpn_cli.config.schema import Runtime
from dpn_cli.run.precision import autocast, precision_of
from dpn_cli.statistics import paired_difference, summarize
from dpn_cli.weights.backbone import load_backbone

CPU = torch.device("cpu")
FP32, BF16, AUTO = (Runtime.model_validate({"precision": name}) for name in ("fp32", "bf16", "auto"))
# By name: the image size and the rows of a batch. The last three are the demos' networks.
NETWORKS = {
    "Ti/16": (224, 8), "S/16": (224, 8), "B/32": (224, 8), "B/16": (224, 4), "Ti/4": (32, 64), "S/4": (32, 32),
    "nano/4": (32, 128), "nano/8": (64, 64), "mu/16": (64, 64),
}  # fmt: skip
TEMPLATES = ("a photo of a {}.", "a small picture of a {}.", "this is a {}.", "one {}, seen from near.")


def forward_seconds(model: nn.Module, images: torch.Tensor, runtime: Runtime) -> float:
    """Return the seconds of a forward pass."""
    model.eval()
    began = time.perf_counter()
    with torch.inference_mode(), autocast(runtime, CPU, model):
        model(images)
    return time.perf_counter() - began


def compiled_step(arch: str, side: int, rows: int, runtime: Runtime) -> tuple[float, float]:
    """Return the seconds of the first compiled step, and of a later one."""
    torch.compiler.reset()
    model = torch.compile(load_backbone(arch, image_size=side, num_classes=CLASSES, seed=0))
    first, *later = bare_steps(model, synthetic(rows, CPU, side), runtime, CPU)(6)
    return first, statistics.median(later)


def measure_speed(arch: str, side: int, rows: int, steps: int, rounds: int, *, compiled: bool) -> None:
    """Print a network's images per second, by precision, as a row of a table."""
    batch = synthetic(rows, CPU, side)
    ours = load_backbone(arch, image_size=side, num_classes=CLASSES, seed=0)
    theirs = timms(arch, side, CLASSES)
    loops: dict[str, Steps] = {
        "timm": bare_steps(theirs, batch, FP32, CPU),
        **{
            name: fit_steps(ours, batch, runtime, CPU)
            for name, runtime in (("fp32", FP32), ("bf16", BF16), ("auto", AUTO))
        },
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    passes: dict[str, list[float]] = {"fp32": [], "auto": []}
    for _ in range(rounds):
        for name, run in loops.items():
            times[name].extend(run(steps + 1)[1:])
        for name, runtime in (("fp32", FP32), ("auto", AUTO)):
            passes[name].append(min(forward_seconds(ours, batch["image"], runtime) for _ in range(3)))
    step = {name: statistics.median(values) for name, values in times.items()}
    forward = {name: statistics.median(values) for name, values in passes.items()}
    row = [
        f"{arch} at {side}, {rows} images",
        *(f"{rows / step[name]:.4g}" for name in ("timm", "fp32", "bf16", "auto")),
        precision_of(AUTO, CPU, ours),
        f"{step['timm'] / step['auto']:.2f}",
        f"{min(step['fp32'], step['bf16']) / step['auto']:.2f}",
        f"{forward['fp32'] / forward['auto']:.2f}",
    ]
    if compiled:
        first, later = compiled_step(arch, side, rows, AUTO)
        row += [f"{step['auto'] / later:.2f}", f"{first:.0f}"]
    print(f"| {' | '.join(row)} |", flush=True)


def write_captions(cifar: Path, folder: Path, each: int) -> Path:
    """Write a table of captions of CIFAR's first training images, in templates of their classes' names."""
    lines = ["image\tcaption"]
    for images in sorted((cifar / "train").iterdir()):
        for number, path in enumerate(sorted(images.iterdir())[:each]):
            lines.append(f"{images.name}/{path.name}\t{TEMPLATES[number % len(TEMPLATES)].format(images.name)}")
    table = folder / "captions.tsv"
    table.write_text("\n".join(lines) + "\n")
    return table


def tasks_of(cifar: Path, folder: Path) -> dict[str, tuple[str, Callable[[dict[str, Any]], float]]]:
    """Return the command of each task's training, and its score in percent by its result."""
    link_images(cifar, folder, 100)
    own, tower = f"--data {folder / 'data'} --set data.minival=0", f"--checkpoint {folder / 'pretrain' / 'fp32-0'}"
    captions = f"--data {write_captions(cifar, folder, 500)} --images {cifar / 'train'}"
    return {
        "pretrain": (
            f"pretrain --arch Ti/8 --image-size 32 --augment none --steps 400 -b 64 {own}",
            lambda result: result["top1"],
        ),
        "finetune highres": (
            f"finetune highres {tower} --image-size 48 --steps 100 -b 64 {own}",
            lambda result: result["top1"],
        ),
        "finetune vtab": (
            f"finetune vtab {tower} --data demo --tasks demo_color,demo_count --image-size 32 --steps 60",
            lambda result: statistics.fmean(task["test"]["mean"] for task in result["tasks"].values()),
        ),
        "lit train": (
            f"lit train {tower} {captions} --zeroshot-data {folder / 'scored'} --text-size Ti --steps 100 -b 128",
            lambda result: result["zeroshot"]["top1"],
        ),
        "segment": (f"segment ade20k {tower} --data demo --steps 200 -b 16", lambda result: result["miou"]),
    }


def compare_scores(cifar: Path, folder: Path, seeds: int, only: str) -> None:
    """Train every task in both precisions with each seed, and print the paired differences as a table."""
    print("| task | fp32 | bf16 | difference, 95 % interval | seconds, fp32 : bf16 |")
    print("|---|---|---|---|---|")
    for task, (command, score_of) in tasks_of(cifar, folder).items():
        if only and task not in only.split(","):
            continue
        scores: dict[str, list[float]] = {"fp32": [], "bf16": []}
        seconds = dict.fromkeys(scores, 0.0)
        for seed in range(seeds):
            for precision, values in scores.items():
                run = folder / task.replace(" ", "-") / f"{precision}-{seed}"
                seeded = ["--set", f"seeds=[{seed}]"] if task == "finetune vtab" else ["--seed", str(seed)]
                if not (run / "result.json").is_file():
                    asked = ["--precision", precision, "--device", "cpu", "-o", str(run), "--overwrite"]
                    run_dpn(*command.split(), *seeded, *asked, "--no-report", "-q")
                result = json.loads((run / "result.json").read_text())
                assert result["precision"] == precision
                values.append(score_of(result))
                seconds[precision] += result["timing"]["train_seconds"]
        difference = paired_difference(scores["bf16"], scores["fp32"])
        low, high = difference.ci95 or (float("nan"), float("nan"))
        means = " | ".join(f"{summarize(values).mean:.2f}" for values in scores.values())
        print(
            f"| `{task}` | {means} | {difference.mean:+.2f} ({low:+.2f} to {high:+.2f}) | "
            f"{seconds['fp32']:.0f} : {seconds['bf16']:.0f} |",
            flush=True,
        )


def main() -> None:
    """Measure speed, or compare scores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--paired", type=Path)
    parser.add_argument("-o", "--output-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="only these networks or tasks, with commas between them")
    asked = parser.parse_args()
    if asked.paired:
        os.environ["DPN_HOME"] = str(asked.output_dir.resolve())
        compare_scores(asked.paired, asked.output_dir, asked.seeds, asked.only)
        return
    compiled = ["compiled / auto", "first compiled step, s"] if asked.compiled else []
    columns = [
        "network",
        "timm, fp32",
        "fp32",
        "bf16",
        "auto",
        "auto is",
        "auto / timm",
        "auto / faster",
        "forward, auto / fp32",
    ]
    print(f"{torch.get_num_threads()} threads; images per second of a training step")
    print(f"| {' | '.join(columns + compiled)} |\n|{'---|' * len(columns + compiled)}")
    for arch, (side, rows) in NETWORKS.items():
        if not asked.only or arch in asked.only.split(","):
            measure_speed(arch, side, rows, asked.steps, asked.rounds, compiled=asked.compiled)


if __name__ == "__main__":
    main()
