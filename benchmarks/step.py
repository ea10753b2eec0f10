"""What our loop, our stem and `log.layer_norms` cost: each beside the same without it.

    python benchmarks/step.py [--steps 8] [--rounds 4]

Each pair is measured in turns in one process, so that whatever else the machine does falls on both. Reported are
medians over all steps of all rounds (the first step of each round, which warms up, left out) and their ratio.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dpn_cli.arch import Stem, parse_arch
from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.engine.fit import Batch, Outputs, TrainJob, fit
from dpn_cli.engine.layer_grad_norms import LayerGradNorms
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.engine.optim import clip_gradients
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.weights.backbone import load_backbone

CLASSES = 100
Steps = Callable[[int], list[float]]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sigmoid loss of a batch."""
    return sigmoid_xent(model(batch["image"]).float(), batch["label"])


def synthetic(rows: int, device: torch.device, side: int = 224) -> Batch:
    """Return one batch of noise, (rows, 3, side, side)."""
    target = nn.functional.one_hot(torch.arange(rows) % CLASSES, CLASSES).float()
    return {"image": torch.randn(rows, 3, side, side).to(device), "label": target.to(device)}


def timms(arch: str, side: int, classes: int) -> VisionTransformer:
    """Return timm's own ViT of a size and a patch, such as its `vit_base_patch32_224` of B/32."""
    size, patch = parse_arch(arch)
    return VisionTransformer(
        img_size=side,
        patch_size=patch,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
        mlp_ratio=size.mlp / size.width,
        num_classes=classes,
        no_embed_class=True,
    )


def bare_steps(model: nn.Module, batch: Batch, runtime: Runtime, device: torch.device) -> Steps:
    """Return a plain PyTorch loop over `model`: forward, backward, clip, fused SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def run(steps: int) -> list[float]:
        model.train()
        times = [time.perf_counter()]
        for _ in range(steps):
            with autocast(runtime, device, model):
                loss = loss_fn(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]

    return run


def job_on(
    batch: Batch, steps: int, runtime: Runtime, device: torch.device, outputs: Outputs, **others: Any
) -> TrainJob:
    """Return the training of some steps on one batch, again and again; `others` are fields of `TrainJob`."""
    rows = len(next(iter(batch.values())))

    def batches(start: int) -> Generator[Batch, None, None]:
        return (batch for _ in itertools.count())

    settings: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batches": batches,
        "optim": Optim(),
        "schedule": Schedule(steps=steps),
        "lr": 1e-3,
        "batch_size": rows,
        "seed": 0,
        "world": World(0, 1, device),
        "runtime": runtime,
        "micro_batch": MicroBatch(rows, fixed=True),
        "outputs": outputs,
    }
    return TrainJob(**{**settings, **others})


def fit_steps(model: nn.Module, batch: Batch, runtime: Runtime, device: torch.device, **others: Any) -> Steps:
    """Return the same training through our loop, logging every step; `others` are fields of `TrainJob`."""

    def run(steps: int) -> list[float]:
        times = [time.perf_counter()]
        outputs = Outputs(tick=lambda tick: times.append(time.perf_counter()))
        fit(model, job_on(batch, steps, runtime, device, outputs, **others))
        return [after - before for before, after in itertools.pairwise(times)]

    return run


def norms_share(model: nn.Module, batch: Batch, step: float, rounds: int) -> None:
    """Print what the norms of layers add to clipping, as a share of a step of so many seconds."""
    loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
    layers, parameters = LayerGradNorms(model), list(model.parameters())
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(20 * rounds):
        with_norms = number % 2 == 0
        began = time.perf_counter()
        clip_gradients(parameters, 1.0, layers.add() if with_norms else None).item()
        times[with_norms].append(time.perf_counter() - began)
    more, less = (statistics.median(values) for values in (times[True], times[False]))
    print(
        f"log.layer_norms / step: clipping {more * 1e3:.2f} ms against {less * 1e3:.2f} ms, "
        f"{100 * (more - less) / step:+.2f} % of a step of {step * 1e3:.0f} ms",
        flush=True,
    )


def compare(label: str, ours: Steps, theirs: Steps, steps: int, rounds: int, rows: int) -> float:
    """Measure two loops in turns and print medians and ratio; returns the median of ours in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = ((0, ours), (1, theirs)) if number % 2 == 0 else ((1, theirs), (0, ours))
        for which, run in order:
            times[which].extend(run(steps + 1)[1:])
    first, second = (statistics.median(values) for values in times)
    print(
        f"{label}: {first * 1e3:.1f} ms against {second * 1e3:.1f} ms, ratio {first / second:.3f} "
        f"({rows / first:.1f} and {rows / second:.1f} images/s, {rounds} rounds of {steps} steps)",
        flush=True,
    )
    return first


def main() -> None:
    """Measure all of them on the device at hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runtime = Runtime(precision="auto")
    rows = 256 if device.type == "cuda" else 8

    def network(arch: str, stem: Stem) -> nn.Module:
        return load_backbone(arch, stem=stem, image_size=224, num_classes=CLASSES).to(device)

    batch = synthetic(rows, device)
    stock = timms("B/32", 224, CLASSES).to(device)
    both = asked.steps, asked.rounds, rows
    plain, dual = network("B/32", "none"), network("B/32", "dpn")
    compare(
        "B/32 fit / bare loop, DPN",
        fit_steps(dual, batch, runtime, device),
        bare_steps(dual, batch, runtime, device),
        *both,
    )
    compare(
        "B/32 fit plain / bare loop, timm's ViT",
        fit_steps(plain, batch, runtime, device),
        bare_steps(stock, batch, runtime, device),
        *both,
    )
    rows = rows if device.type == "cuda" else 4
    batch = synthetic(rows, device)
    plain, dual = network("B/16", "none"), network("B/16", "dpn")
    step = compare(
        "B/16 DPN stem / plain stem, bare loop",
        bare_steps(dual, batch, runtime, device),
        bare_steps(plain, batch, runtime, device),
        asked.steps,
        asked.rounds,
        rows,
    )
    norms_share(dual, batch, step, asked.rounds)


if __name__ == "__main__":
    main()
