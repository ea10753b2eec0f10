"""Time one training step of a ViT with each norm in its blocks, as a ratio to LN's in the same run.

    python benchmarks/norms.py                              # B/16 at 224, 4 images, every norm; 40 minutes on 2 cores
    python benchmarks/norms.py --norms dtn,un --pairs 9
    python benchmarks/norms.py --only-norms                 # without the networks: the two norms of one block

Each pair is a step with LN and a step with the other norm, in turns, and the ratio is the median over pairs. A step is
forward, backward, clipping and SGD on one batch of noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from step import CLASSES, bare_steps, synthetic
from torch import nn

from dpn_cli.arch import NORMS, SIZES, Norm
from dpn_cli.config.schema import Runtime
from dpn_cli.model.norms import Tokens, token_norm
from dpn_cli.run.process import keep_memory
from dpn_cli.weights.backbone import load_backbone

Step = Callable[[], float]


def norms_of_a_block(name: Norm, arch: str, rows: int, device: torch.device) -> Step:
    """Return a step of the two norms of one block alone, over tokens of a 14 x 14 grid."""
    size = SIZES[arch.partition("/")[0]]
    tokens = Tokens(size.heads, (14, 14))
    norms = nn.Sequential(*(token_norm(name, size.width, eps=1e-6, tokens=tokens) for _ in range(2))).to(device)
    x = torch.randn(rows, 196, size.width, device=device)
    gradient = torch.randn_like(x)

    def step() -> float:
        began = time.perf_counter()
        norms(x.clone().requires_grad_()).backward(gradient)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def whole_network(name: Norm, arch: str, rows: int, device: torch.device) -> Step:
    """Return a step of a network at 224 px."""
    model = load_backbone(arch, norm=name, image_size=224, num_classes=CLASSES).to(device)
    run = bare_steps(model, synthetic(rows, device), Runtime(precision="auto"), device)
    return lambda: run(1)[0]


def ratio(step: Step, baseline: Step, pairs: int) -> tuple[float, float, float]:
    """Return the median ratio over pairs, and the median seconds of both."""
    step(), baseline()
    times = []
    for number in range(pairs):
        order = (step, baseline) if number % 2 else (baseline, step)
        first, second = (one() for one in order)
        times.append((first, second) if number % 2 else (second, first))
    own, theirs = (statistics.median(values) for values in zip(*times, strict=True))
    return statistics.median(a / b for a, b in times), own, theirs


def main() -> None:
    """Measure every norm on the device at hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="B/16")
    parser.add_argument("--rows", type=int, help="images a step (default: 4; 64 on a GPU)")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--norms", default=",".join(name for name in NORMS if name not in ("ln", "none")))
    parser.add_argument("--only-norms", action="store_true")
    asked = parser.parse_args()
    keep_memory()  # as the program does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = asked.rows or (64 if device.type == "cuda" else 4)
    what = asked.arch, rows, device
    layers = norms_of_a_block("ln", *what)
    network = None if asked.only_norms else whole_network("ln", *what)
    for name in asked.norms.split(","):
        _, own, theirs = ratio(norms_of_a_block(name, *what), layers, 5 * asked.pairs)
        line = f"{name:9} two norms {own * 1e3:6.1f} ms (LN {theirs * 1e3:.1f})"
        if network:
            whole, own, theirs = ratio(whole_network(name, *what), network, asked.pairs)
            line += f", {asked.arch} step {own:.3f} s (LN {theirs:.3f}), ratio {whole:.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
