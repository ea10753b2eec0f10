"""Checks of `benchmarks/gpu.py`: a network's numbers beside the CPU's, compiled ones, and training in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpu_report import Check, NotHereError, Settings
from step import CLASSES, job_on, synthetic
from torch import Tensor, nn

from dpn_cli.arch import Stem
from dpn_cli.config.schema import Runtime
from dpn_cli.engine.fit import Batch, Outputs, fit, prepare
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.errors import OutOfMemoryError
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.weights.backbone import Backbone, load_backbone

CPU = torch.device("cpu")
FULL, SHORT = Runtime(precision="fp32"), Runtime(precision="bf16")
STEMS: tuple[Stem, ...] = ("none", "dpn")
# Most distance from the CPU's numbers in float32, as a share of their length. The CPU's own are 1e-6 from those in
# float64 (B/16, 4 images; after 6 steps the movement, in which every rounding of a weight counts, 3e-4); products in
# TF32, which has three bits more than bfloat16, are some 1e-3 away.
LIMITS = {"logits": 1e-4, "gradient": 1e-4, "losses": 1e-4, "movement of the weights": 1e-2}
# In bfloat16: how many times as far from float32 as the CPU's bfloat16 is, and the rounding of a single number, below
# which that distance says little; what is compiled beside what is not likewise.
TIMES, ROUNDING = 2.0, 2.0**-9
# Steps of a training, and its learning rate: large enough for the weights to move much further than they are rounded.
STEPS, RATE = 20, 1e-2
# Rows of the training whose memory is limited, the share of its activations that it gets, and its steps.
ROWS, ALLOWED, LIMITED_STEPS = 32, 0.6, 3


@dataclass(frozen=True)
class Outcome:
    """The numbers of a network on one batch, by name, on the CPU: its passes, and a training."""

    numbers: dict[str, Tensor]

    def distances(self, other: Outcome) -> dict[str, float]:
        """Return the distance of each number from those of another, as a share of the other's length."""
        return {name: apart(self.numbers[name], value) for name, value in other.numbers.items()}


def apart(here: Tensor, there: Tensor) -> float:
    """Return the distance of two vectors as a share of the length of the second."""
    return float((here.double() - there.double()).norm() / there.double().norm())


def numbers(settings: Settings) -> Iterator[Check]:
    """Compare logits, gradients and a training with those on the CPU: float32 with it, bfloat16 with its bfloat16."""
    for stem in STEMS:
        truth = outcome(settings, stem, FULL, CPU)
        for name, distance in outcome(settings, stem, FULL, settings.device).distances(truth).items():
            yield Check(f"{titled(settings, stem)}, fp32: {name}, distance from the CPU's", distance, LIMITS[name])
        usual = outcome(settings, stem, SHORT, CPU).distances(truth)
        for name, distance in outcome(settings, stem, SHORT, settings.device).distances(truth).items():
            what = f"{titled(settings, stem)}, bf16: {name}, distance from the CPU's float32"
            yield Check(what, distance, TIMES * max(ROUNDING, usual[name]), f"bfloat16 on the CPU: {usual[name]:.3g}")


def compiled(settings: Settings) -> Iterator[Check]:
    """Compare a compiled network with one that is not, both in bfloat16."""
    stem: Stem = "dpn"
    truth = outcome(settings, stem, FULL, settings.device)
    usual = outcome(settings, stem, SHORT, settings.device).distances(truth)
    found = outcome(settings, stem, SHORT.model_copy(update={"compile": True}), settings.device).distances(truth)
    for name, distance in found.items():
        what = f"{titled(settings, stem)}, bf16, --compile: {name}, distance from float32"
        yield Check(what, distance, TIMES * max(ROUNDING, usual[name]), f"without --compile: {usual[name]:.3g}")


def titled(settings: Settings, stem: Stem) -> str:
    """Return the name of the network of the checks."""
    arch, side = settings.checked
    return f"{arch} at {side}, stem {stem}"


def outcome(settings: Settings, stem: Stem, runtime: Runtime, device: torch.device) -> Outcome:
    """Compute logits and gradient of a batch of noise, and train on it."""
    model, batch = network(settings, stem), noise(settings, settings.rows, device)
    with exact_products():
        torch.compiler.reset()  # another batch would be compiled for batches of any size
        ready = prepare(model, runtime, World(0, 1, device)).train()
        with autocast(runtime, device, model):
            logits = ready(batch["image"])
            sigmoid_xent(logits.float(), batch["label"]).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradient = torch.cat([one.detach().flatten().cpu() for one in gradients])
        before = weights(model)
        losses = train(ready, batch, STEPS, runtime, device)
    moved = weights(model) - before
    found = (logits.detach().float().cpu(), gradient, torch.tensor(losses), moved)
    return Outcome(dict(zip(LIMITS, found, strict=True)))


def network(settings: Settings, stem: Stem) -> Backbone:
    """Return a network whose head is not zero, always the same one."""
    arch, side = settings.checked
    model = load_backbone(arch, stem=stem, image_size=side, num_classes=CLASSES, seed=0)
    nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return model


def noise(settings: Settings, rows: int, device: torch.device) -> Batch:
    """Return a batch of noise, always the same one."""
    torch.manual_seed(0)
    return synthetic(rows, device, settings.checked[1])


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector on the CPU."""
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def train(
    ready: nn.Module,
    batch: Batch,
    steps: int,
    runtime: Runtime,
    device: torch.device,
    micro_batch: MicroBatch | None = None,
) -> list[float]:
    """Train on one batch with our loop, and return the losses."""
    losses: list[float] = []
    outputs = Outputs(tick=lambda tick: losses.append(tick.loss), warn=lambda text: None)
    micro_batch = micro_batch or MicroBatch(len(batch["image"]))
    fit(ready, job_on(batch, steps, runtime, device, outputs, lr=RATE, micro_batch=micro_batch))
    return losses


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside the block, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def memory(settings: Settings) -> Iterator[Check]:
    """Train where a batch does not fit into what the allocator may take, then where no single image does."""
    device = settings.device
    if device.type != "cuda":
        raise NotHereError("the allocator of a CPU has no limit")
    rows, stem = ROWS, STEMS[-1]
    batch = noise(settings, rows, device)

    def trained(micro_batch: MicroBatch, share: float | None) -> tuple[Tensor, int, int]:
        """Return how far weights move, and the bytes before and at the peak, of which a `share` between is allowed."""
        model = network(settings, stem).to(device)
        before, start = weights(model), torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with allowed(device, None if share is None else int(start + share * (peak - held))), exact_products():
            train(model, batch, LIMITED_STEPS, FULL, device, micro_batch)
        return weights(model) - before, start, torch.cuda.max_memory_allocated(device)

    held = peak = 0
    whole, held, peak = trained(MicroBatch(rows), None)
    micro_batch = MicroBatch(rows)
    parts, *_ = trained(micro_batch, ALLOWED)
    note = f"{ALLOWED:.0%} of {(peak - held) / 2**30:.2f} GiB above the network"
    yield Check(f"micro-batch where {rows} images do not fit", micro_batch.size, rows // 2, note)
    name = "movement of the weights"
    what = f"{titled(settings, stem)}, fp32, in smaller micro-batches: {name}, distance from that of whole batches"
    yield Check(what, apart(parts, whole), LIMITS[name])
    try:
        trained(MicroBatch(rows), 0.0)
        code, said = 0, "it was trained"
    except OutOfMemoryError as error:
        code, said = error.exit_code, str(error)[:100]
    yield Check("where no image fits: exit code beside that of memory", abs(code - OutOfMemoryError.exit_code), 0, said)


@contextmanager
def allowed(device: torch.device, most: int | None) -> Iterator[None]:
    """Let torch's allocator take at most so many bytes of the GPU inside the block."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if most is None else most / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
