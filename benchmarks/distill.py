"""What distilling costs: one step of `dpn distill` beside the teacher's forward pass and a step of the student alone.

    python benchmarks/distill.py                                    # B/32 at 224, 8 images on a CPU, 256 on a GPU
    python benchmarks/distill.py --arch B/16 --batch 128 --device cuda
    python benchmarks/distill.py --arch mu/8 --size 16 --batch 4 --steps 2 --rounds 2

Ours runs the teacher, compares what both compute as configs/distill.yaml does, and trains through `fit`; the other is
the sum of a bare forward pass and a bare PyTorch loop over the same student. Both get one batch of noise again and
again, and are measured in turns in one process. Behind the ratio stand the share of the device's matrix-product rate
and the hours that 10, 30 and 100 million images take, where the loader keeps up.
"""

from __future__ import annotations

import argparse
import time

import torch
from step import CLASSES, Steps, bare_steps, compare, fit_steps, synthetic

from dpn_cli.config.load import read_config
from dpn_cli.config.schema import Runtime
from dpn_cli.engine.fit import Batch
from dpn_cli.engine.planning import matrix_rate
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.run.precision import autocast, precision_of
from dpn_cli.weights.backbone import Backbone, load_backbone
from tasks.classify.distill.config import Losses
from tasks.classify.distill.losses import Distance, NetworkOutputs, ObservedNetwork, inputs_of

MILLIONS = (10, 30, 100)


def distilling(teacher: Backbone, student: Backbone, batch: Batch, runtime: Runtime, device: torch.device) -> Steps:
    """Return steps of our distillation with the shipped config's losses."""
    losses = Losses.model_validate(read_config("distill")["losses"])
    seeing, observed = ObservedNetwork(teacher, losses, []), ObservedNetwork(student, losses, [])

    @torch.no_grad()
    def targets(part: Batch) -> NetworkOutputs:
        seen: NetworkOutputs = seeing(inputs_of(teacher, part))
        return seen

    deviations = {"tokens": torch.ones(teacher.embed_dim, device=device)}
    loss = Distance(targets, student, losses, deviations, "softmax")
    return fit_steps(observed, batch, runtime, device, loss_fn=loss)


def apart(teacher: Backbone, student: Backbone, batch: Batch, runtime: Runtime, device: torch.device) -> Steps:
    """Return the teacher's forward pass and a training step of the student, one after the other, with their sum."""
    train = bare_steps(student, batch, runtime, device)

    @torch.no_grad()
    def look() -> float:
        began = time.perf_counter()
        with autocast(runtime, device, student):
            teacher(batch["image"]).sum().item()
        return time.perf_counter() - began

    return lambda steps: [look() + train(1)[0] for _ in range(steps)]


def main() -> None:
    """Measure the pair on the device at hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="B/32")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, help="images a step (default: 8; 256 on a GPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    device, runtime = torch.device(asked.device), Runtime(precision="auto")
    rows = asked.batch or (256 if device.type == "cuda" else 8)
    teacher, student = (
        load_backbone(asked.arch, stem=stem, image_size=asked.size, num_classes=CLASSES).to(device)
        for stem in ("none", "dpn")
    )
    teacher.requires_grad_(False).eval()
    noise = synthetic(rows, device, asked.size)
    pixels = torch.randint(256, noise["image"].shape, dtype=torch.uint8).to(device)
    seconds = compare(
        f"{asked.arch} at {asked.size}, {rows} images: dpn distill / teacher's forward + student's step",
        distilling(teacher, student, {"image": pixels}, runtime, device),
        apart(teacher, student, noise, runtime, device),
        asked.steps,
        asked.rounds,
        rows,
    )
    flops = 2 * count_macs(teacher.config).forward + training_flops(student.config)
    rate = matrix_rate(device, precision_of(runtime, device, student))
    hours = [f"{millions} M {millions * 1e6 * seconds / rows / 3600:.3g}" for millions in MILLIONS]
    print(
        f"{rows / seconds:.1f} images/s, {flops * rows / seconds / rate:.1%} of {rate / 1e12:.3g} TFLOP/s that matrix "
        f"products reach; hours: {', '.join(hours)}"
    )


if __name__ == "__main__":
    main()
