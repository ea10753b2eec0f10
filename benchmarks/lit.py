"""What cached features save in LiT, and what caching costs.

    python benchmarks/lit.py [--arch B/32] [--text B] [--batch 64] [--steps 2] [--rounds 3] [--images 256]
                             [--only caching]

1. One training step with cached features, with the frozen tower in the loop, and of open_clip with its image tower
   locked (a timm ViT, open_clip's TextTransformer, ClipLoss, AdamW), measured in turns in one process; beside them the
   ratio that the counts of floating-point operations allow.
2. Encoding JPEGs of 500 x 375 into the cache, beside a bare forward pass over as many images in memory, in turns; every
   opening of a file is counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loader import write_images
from open_clip.loss import ClipLoss
from open_clip.transformer import TextTransformer
from PIL import Image
from step import Steps, fit_steps
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpn_cli.arch import SIZES
from dpn_cli.config.schema import Optim, Runtime
from dpn_cli.data.loader import count_workers
from dpn_cli.engine.fit import Batch
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.run.process import keep_memory
from dpn_cli.weights.backbone import Backbone, load_backbone
from tasks.lit.cache import BATCH, cached_features
from tasks.lit.captions import CaptionedFiles
from tasks.lit.encode import image_encoder
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.text_tower import TextTower

VOCABULARY, CONTEXT = 49408, 16


def open_clip_steps(tower: torch.nn.Module, text: TextTower, images: Tensor, tokens: Tensor) -> Steps:
    """Return a bare loop over open_clip's parts, with a locked image tower in it."""
    size = text.size
    transformer = TextTransformer(
        context_length=CONTEXT, vocab_size=VOCABULARY, width=size.width, heads=size.heads, layers=size.depth,
        output_dim=text.width, no_causal_mask=True, pool_type="last",
    ).to(images.device)  # fmt: skip
    scale, loss_fn = torch.nn.Parameter(torch.tensor(2.3, device=images.device)), ClipLoss()
    optimizer = torch.optim.AdamW([*transformer.parameters(), scale], lr=1e-4, fused=True)

    def run(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            with autocast(Runtime(), images.device, transformer):
                with torch.no_grad():
                    seen = torch.nn.functional.normalize(tower(images), dim=-1)
                loss = loss_fn(seen, torch.nn.functional.normalize(transformer(tokens), dim=-1), scale.exp())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            found.append(time.perf_counter() - began)
        return found

    return run


def flops(run: Callable[[], object]) -> int:
    """Return the floating-point operations of a call."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@dataclass(frozen=True)
class Pairs:
    """Kinds of LiT steps on the same pairs, by name, and their floating-point operations."""

    steps: dict[str, Steps]
    learning: int
    looking: int


def step_kinds(tower: Backbone, text: TextTower, ready: nn.Module, rows: int, world: World) -> Pairs:
    """Return a step with cached features, one with the frozen tower in the loop, and open_clip's; `ready` is trained.

    `ready` is what `prepare` returned for `text`. A cached step has the operations `learning`, the tower `looking`.
    """
    size = tower.config.image_size
    images = torch.randint(256, (rows, 3, *size), dtype=torch.uint8)
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT)).to(world.device)
    encoder = image_encoder(tower, Runtime(), world)
    kept = encoder.encode(images).half().to(world.device)
    normal, loss = tower.normalize(images.to(world.device)), ContrastiveLoss("softmax", world)
    batch: Batch = {"image": kept, "tokens": tokens}
    how: dict[str, Any] = {"loss_fn": loss, "optim": Optim(name="adam"), "lr": 1e-4}

    def looked_at(start: int) -> Generator[Batch, None, None]:
        while True:
            yield {"image": encoder.encode(images).to(world.device), "tokens": tokens}

    kinds = {
        "cached": fit_steps(ready, batch, Runtime(), world.device, **how),
        "in the loop": fit_steps(ready, batch, Runtime(), world.device, batches=looked_at, **how),
        "open_clip, locked": open_clip_steps(tower, text, normal, tokens),
    }
    return Pairs(kinds, flops(lambda: loss(text, batch).backward()), flops(lambda: encoder.encode(images)))


def compare_steps(tower: Backbone, text: TextTower, rows: int, steps: int, rounds: int, world: World) -> None:
    """Measure the three kinds of steps in turns and print their medians and ratios."""
    pairs = step_kinds(tower, text, text, rows, world)
    times: dict[str, list[float]] = {name: [] for name in pairs.steps}
    for _ in range(rounds):
        for name, run in pairs.steps.items():
            times[name] += run(steps + 2)[1:-1]  # `fit` makes no batch in its last step
    allowed = 1 + pairs.looking / pairs.learning
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.0f} ms a step of {rows}, {rows / median:.2f} pairs/s")
    for name in ("in the loop", "open_clip, locked"):
        ratio = medians[name] / medians["cached"]
        print(
            f"{name} : cached = {ratio:.2f}; operations allow {allowed:.2f}, reached {ratio / allowed:.1%}", flush=True
        )


class Counted(CaptionedFiles):
    """Files that note when they are opened, in this process."""

    opened = 0

    def open(self, index: int) -> Image.Image:
        """Open an image."""
        self.opened += 1
        return super().open(index)


def caching_seconds(tower: Backbone, count: int, rounds: int, world: World) -> tuple[float, float, float]:
    """Measure caching `count` JPEGs and a bare forward pass over as many images in turns.

    Returns the medians of their seconds, and how often each file was opened.
    """
    # A GPU has processes beside it, as with many images.
    workers = count_workers("auto", world.device) if world.device.type == "cuda" else "auto"
    encoder, quiet = image_encoder(tower, Runtime(workers=workers), world), Console(quiet=True)
    with tempfile.TemporaryDirectory() as place:
        root = write_images(Path(place) / "photos", (500, 375), count)
        files = Counted(root)
        for path in sorted(root.rglob("*.jpg")):
            files.add(str(path.relative_to(root)), ("an image",), place)
        noise = torch.randint(256, (BATCH, 3, *encoder.size), dtype=torch.uint8)
        bare, cached = [], []
        for number in range(rounds):
            began = time.perf_counter()
            for begin in range(0, len(files.keys), BATCH):
                encoder.encode(noise[: min(BATCH, len(files.keys) - begin)]).cpu()
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            cached_features(files, encoder, Path(place) / f"cache{number}", world, quiet)
            cached.append(time.perf_counter() - began)
        files.opened, alone = 0, image_encoder(tower, Runtime(workers=0), world)
        cached_features(files, alone, Path(place) / "counted", world, quiet)
    return statistics.median(cached), statistics.median(bare), files.opened / count


def compare_caching(tower: Backbone, count: int, rounds: int, world: World) -> None:
    """Print how long caching takes beside a bare forward pass, and the ratio."""
    cached, bare, opened = caching_seconds(tower, count, rounds, world)
    print(
        f"caching {count} JPEGs: {cached:.2f} s, bare forward {bare:.2f} s, ratio {cached / bare:.3f}; "
        f"each opened {opened:.2f} times"
    )


def main() -> None:
    """Measure steps and caching."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="B/32")
    parser.add_argument("--text", default="B")
    for name, value in (("--batch", 64), ("--steps", 2), ("--rounds", 3), ("--images", 256)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--only", choices=("steps", "caching"))
    asked = parser.parse_args()
    keep_memory()  # as the program does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(0, 1, device)
    tower = load_backbone(asked.arch).requires_grad_(False).to(device).eval()
    if asked.only != "caching":
        text = TextTower(SIZES[asked.text], VOCABULARY, CONTEXT, tower.embed_dim, 10.0, None, 0).to(device)
        compare_steps(tower, text, asked.batch, asked.steps, asked.rounds, world)
    if asked.only != "steps":
        compare_caching(tower, asked.images, asked.rounds, world)


if __name__ == "__main__":
    main()
