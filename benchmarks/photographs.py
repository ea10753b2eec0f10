"""Photographs under less light, less contrast and noise: plain and Dual PatchNorm networks, with their remedies.

    python benchmarks/photographs.py CIFAR -o FOLDER [--seeds 3] [--steps 1700] [--only NAMES] [--figure FILE]

CIFAR holds CIFAR-10 as image files, in train/CLASS and test/CLASS. Every recipe is trained from scratch by
`dpn pretrain` with each seed, beside a bare loop of timm's functions with the same steps, batch, crops and schedule.
Then the plain networks are distilled by `dpn distill` without labels. All networks are scored by `dpn eval --shifts` on
the same test images. A training that FOLDER holds is not repeated. Prints tables in Markdown, means over the seeds with
half the width of their 95 % interval, and draws the accuracy over the light.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from dpn_cli.arch import SIZES
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.run.distributed import World
from dpn_cli.statistics import summarize

SIZE, BATCH, DISTILL_BATCH = 32, 128, 64
LR, WARMUP = 1e-3, 0.05
SHIFTS, SEVERITIES = ("gain", "flat_contrast", "dusk", "gaussian_noise"), (1, 3, 5)
# Evaluated whole, as in the bare loop.
COMMON = [
    "--image-size", str(SIZE), "--augment", "none", "--flip", "--set", "data.minival=0", "--no-report",
    "--set", "data.crop=inception", "--set", f"data.eval_resize={SIZE}",
]  # fmt: skip
# By name: the options of `dpn pretrain`, and how many times the steps they get.
RECIPES: dict[str, tuple[list[str], int]] = {
    "plain": (["--stem", "none"], 1),
    "DPN": (["--stem", "dpn"], 1),
    "DPN, noise 20": (["--stem", "dpn", "--noise", "20"], 1),
    "plain, noise 20": (["--stem", "none", "--noise", "20"], 1),
    "plain, jitter 0.5": (["--stem", "none", "--jitter", "0.5"], 1),
    "plain, jitter 0.875": (["--stem", "none", "--jitter", "0.875"], 1),
    "plain, jitter 0.5, noise 20": (["--stem", "none", "--jitter", "0.5", "--noise", "20"], 1),
    "DPN, jitter 0.5": (["--stem", "dpn", "--jitter", "0.5"], 1),
    "plain, jitter 0.5, 3 x steps": (["--stem", "none", "--jitter", "0.5"], 3),
    "plain, jitter 0.875, 3 x steps": (["--stem", "none", "--jitter", "0.875"], 3),
    "plain, jitter 0.5, noise 20, 3 x steps": (["--stem", "none", "--jitter", "0.5", "--noise", "20"], 3),
    "DPN, noise 5": (["--stem", "dpn", "--noise", "5"], 1),
    "DPN, noise 10": (["--stem", "dpn", "--noise", "10"], 1),
    "DPN, no affine": (["--stem", "dpn_no_affine"], 1),
    "RMS norms": (["--stem", "rms"], 1),
}
# Students of the plain networks, trained without labels: the largest noise in their images.
DISTILLED = {"distilled": "0", "distilled, noise 20": "20"}


def run_dpn(*options: str) -> Any:
    """Return the JSON that a command prints. Ends the benchmark where it fails."""
    ended = subprocess.run([sys.executable, "-m", "dpn_cli", *options, "--json"], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"dpn {' '.join(options)}: exit code {ended.returncode}")
    return json.loads(ended.stdout)


def link_images(cifar: Path, folder: Path, each: int) -> None:
    """Make ``data`` with CIFAR's training and test images, and ``scored`` with the first `each` ones of every class."""
    data, scored = folder / "data", folder / "scored"
    data.mkdir(parents=True, exist_ok=True)
    for name, origin in (("train", "train"), ("val", "test")):
        if not (data / name).exists():
            (data / name).symlink_to((cifar / origin).resolve())
    for images in sorted((cifar / "test").iterdir()):
        (scored / images.name).mkdir(parents=True, exist_ok=True)
        for image in sorted(images.iterdir())[:each]:
            link = scored / images.name / image.name
            if not link.exists():
                link.symlink_to(image.resolve())


def train_bare(data: Path, steps: int, seed: int) -> tuple[float, float]:
    """Train timm's plain ViT by a bare loop; return its top-1 on the test images in percent, and images per second.

    The images come from the same loader with the same options: the loops alone are compared.
    """
    torch.manual_seed(seed)
    size = SIZES["nano"]
    model = VisionTransformer(
        SIZE, 4, num_classes=10, embed_dim=size.width, depth=size.depth, num_heads=size.heads,
        mlp_ratio=size.mlp / size.width,
    )  # fmt: skip
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=0.1)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=steps, warmup_t=round(WARMUP * steps), warmup_prefix=True, t_in_epochs=False
    )
    train, test = ClassFolders(data / "train"), ClassFolders(data / "val")
    world = World(0, 1, torch.device("cpu"))
    batches = crop_batches(train, Augmentation((SIZE, SIZE)), BATCH, seed, world, workers=1)(0)
    began = time.perf_counter()
    for step in range(steps):
        batch = next(batches)
        loss = F.cross_entropy(model(batch["image"] / 127.5 - 1), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scheduler.step_update(step)
        optimizer.step()
    rate = steps * BATCH / (time.perf_counter() - began)
    batches.close()
    model.eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, len(test.labels), 500):
            rows = range(start, min(start + 500, len(test.labels)))
            images = torch.stack([torch.from_numpy(test.pixels(row).copy()) for row in rows]).permute(0, 3, 1, 2)
            right += int(
                (model(images / 127.5 - 1).argmax(1) == torch.as_tensor(test.labels[rows.start : rows.stop])).sum()
            )
    return 100 * right / len(test.labels), rate


def measure(folder: Path, name: str, seed: int, train: Sequence[str]) -> None:
    """Train a network into a folder of its own, and write its top-1 and its scores under shifts to ``scores.json``."""
    run = folder / name.replace(", ", "-").replace(" ", "_") / f"seed{seed}"
    result = run.with_suffix(".json")
    if result.is_file():
        return
    began = time.perf_counter()
    trained = run_dpn(*train, "--seed", str(seed), "-o", str(run), "--overwrite")
    seconds = time.perf_counter() - began
    scored = run_dpn(
        "eval", str(run), "--data", str(folder / "scored"), "--split", "all", "-b", "200",
        "--shifts", ",".join(SHIFTS), "--severity", ",".join(map(str, SEVERITIES)),
    )  # fmt: skip
    network = next(iter(scored["shifts"]["networks"].values()))
    top1 = trained["top1"] if "top1" in trained else trained["student"]["top1"]
    record = {"top1": top1, "seconds": seconds, "clean": network["clean"], **network["scores"]}
    result.write_text(json.dumps(record, indent=1) + "\n")
    print(name, "seed", seed, f"top-1 {top1:.2f}", f"{seconds:.0f} s", file=sys.stderr, flush=True)


def read(folder: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each network that was measured, one per seed."""
    records = {
        name: [
            json.loads(path.read_text())
            for path in sorted((folder / name.replace(", ", "-").replace(" ", "_")).glob("seed*.json"))
        ]
        for name in names
    }
    return {name: found for name, found in records.items() if found}


def cell(values: Sequence[float]) -> str:
    """Return a mean, with half the width of its 95 % interval where there are several values."""
    summary = summarize(values)
    if not summary.ci95:
        return f"{summary.mean:.1f}"
    return f"{summary.mean:.1f} ± {summary.ci95[1] - summary.mean:.1f}"


def table(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the scores as a table in Markdown."""
    columns = [(shift, index) for shift in SHIFTS for index in range(len(SEVERITIES))]
    head = ["network", "seeds", "all test images", "scored ones", *(f"{s} {SEVERITIES[i]}" for s, i in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, rows in records.items():
        cells = [cell([row["top1"] for row in rows]), cell([row["clean"] for row in rows])]
        cells += [cell([row[shift][index] for row in rows]) for shift, index in columns]
        lines.append("| " + " | ".join([name, str(len(rows)), *cells]) + " |")
    return "\n".join(lines)


def draw(records: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw top-1 over the light that is left, as a gain and as dusk, with the spread of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lights = {"gain": (1, 1 / 2, 1 / 4, 1 / 8), "dusk": (1, 1 / 2, 1 / 8, 1 / 32)}
    titles = {"gain": "Less light, without noise", "dusk": "Dusk: less light with a sensor's noise"}
    for panel, (shift, light) in zip(panels, lights.items(), strict=True):
        for name, rows in records.items():
            curves = [[row["clean"], *row[shift]] for row in rows]
            means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            panel.plot(light, means, "o-", label=name)
            panel.fill_between(light, *([end(v) for v in zip(*curves, strict=True)] for end in (min, max)), alpha=0.15)
        panel.axhline(10, color="0.6", lw=1, ls=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(light, ["1", *(f"1/{round(1 / value)}" for value in light[1:])])
        panel.invert_xaxis()
        panel.set(title=titles[shift], xlabel="light", ylim=(0, None))
    panels[0].set_ylabel("top-1 in %")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, score, print the tables, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--arch", default="nano/4")
    parser.add_argument("--each", type=int, default=100, help="test images of each class that are scored under shifts")
    parser.add_argument("--only", default="", help="only these networks, with ; between them; 'bare loop' is timm's")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("DPN_HOME", str(options.output / "home"))
    link_images(options.cifar, options.output, options.each)
    data = ["--data", str(options.output / "data")]
    only = options.only.split(";") if options.only else [*RECIPES, "bare loop", *DISTILLED]
    for seed in range(options.seeds):
        for name, (recipe, times) in RECIPES.items():
            if name in only:
                steps = ["--steps", str(times * options.steps), "-b", str(BATCH), "--lr", str(LR)]
                loss = ["--loss", "softmax", "--set", "schedule.warmup=" + str(round(WARMUP * times * options.steps))]
                train = ["pretrain", *data, "--arch", options.arch, *COMMON, *steps, *loss, *recipe]
                measure(options.output, name, seed, train)
        bare = options.output / f"bare-seed{seed}.json"
        if "bare loop" in only and not bare.is_file():
            top1, rate = train_bare(options.output / "data", options.steps, seed)
            bare.write_text(json.dumps({"top1": top1, "rate": rate}) + "\n")
            print("bare loop, seed", seed, f"top-1 {top1:.2f}", f"{rate:.0f} images/s", file=sys.stderr, flush=True)
        for name, noise in DISTILLED.items():
            teacher = options.output / "plain" / f"seed{seed}"
            if name in only and teacher.is_dir():
                train = [
                    "distill", "--teacher", str(teacher), *data, "--jitter", "0", "--noise", noise, "--no-report",
                    "--steps", str(options.steps), "-b", str(DISTILL_BATCH), "--set", "evaluate_every=100000",
                ]  # fmt: skip
                measure(options.output, name, seed, train)
    records = read(options.output, [*RECIPES, *DISTILLED])
    print(table(records))
    loops = [json.loads(path.read_text()) for path in sorted(options.output.glob("bare-seed*.json"))]
    if loops:
        print(f"\nbare loop over timm's plain ViT: top-1 {cell([loop['top1'] for loop in loops])} on all test images")
    if options.figure:
        chosen = ("plain", "plain, jitter 0.5", "DPN", "DPN, noise 20")
        draw({name: records[name] for name in chosen if name in records}, options.figure)


if __name__ == "__main__":
    main()
