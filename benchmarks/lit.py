"""What cached features save in LiT, and what caching costs.

    python benchmarks/lit.py [--arch B/32] [--text B] [--batch 64] [--steps 2] [--rounds 3] [--images 256]

1. One training step with cached features, with the frozen tower in the loop, and of open_clip with its image tower
   locked (a timm ViT, open_clip's TextTransformer, ClipLoss, AdamW), measured in turns in one process; beside them the
   ratio that the counts of floating-point operations allow.
2. Encoding JPEGs of 500 x 375 into the cache, beside a bare forward pass over as many images in memory, in turns; every
   opening of a file is counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from loader import write_pictures
from open_clip.loss import ClipLoss
from open_clip.transformer import TextTransformer
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dpn_cli.arch import SIZES
from dpn_cli.data.loader import worker_count
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Job, Outputs, fit
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.recipe.schema import Optim, Runtime, Schedule
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone
from tasks.lit.cache import BATCH, cached_features
from tasks.lit.captions import Files
from tasks.lit.encode import image_encoder
from tasks.lit.loss import ContrastiveLoss
from tasks.lit.text import TextTower

VOCABULARY, CONTEXT = 49408, 16
Steps = Callable[[int], list[float]]


def ours(text: TextTower, batch: Callable[[], Batch], rows: int, world: World) -> Steps:
    """Return what trains some steps through `fit` and returns the seconds of each."""

    def run(steps: int) -> list[float]:
        def batches(start: int) -> Generator[Batch, None, None]:
            while True:
                yield batch()

        times = [time.perf_counter()]
        job = Job(
            loss_fn=ContrastiveLoss("softmax", world),
            batches=batches,
            optim=Optim(name="adam"),
            schedule=Schedule(steps=steps),
            lr=1e-4,
            batch_size=rows,
            seed=0,
            world=world,
            micro_batch=MicroBatch(rows),
            outputs=Outputs(tick=lambda tick: times.append(time.perf_counter())),
        )
        fit(text, job)
        return [after - before for before, after in itertools.pairwise(times)]

    return run


def open_clip_steps(tower: torch.nn.Module, text: TextTower, images: Tensor, tokens: Tensor) -> Steps:
    """Return the same for a bare loop over open_clip's parts, with a locked image tower in it."""
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
            with engine.precision_of(Runtime(), images.device):
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


def compare_steps(tower: Backbone, text: TextTower, rows: int, steps: int, rounds: int, world: World) -> None:
    """Measure the three kinds of steps in turns and print their medians and ratios."""
    size = tower.config.image_size
    images = torch.randint(256, (rows, 3, *size), dtype=torch.uint8)
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT)).to(world.device)
    encoder = image_encoder(tower, Runtime(), world)
    kept = encoder.encode(images).half().to(world.device)
    normal = tower.normalize(images.to(world.device))
    kinds: dict[str, Steps] = {
        "cached": ours(text, lambda: {"image": kept, "tokens": tokens}, rows, world),
        "in the loop": ours(
            text, lambda: {"image": encoder.encode(images).to(world.device), "tokens": tokens}, rows, world
        ),
        "open_clip, locked": open_clip_steps(tower, text, normal, tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, run in kinds.items():
            times[name] += run(steps + 2)[1:-1]  # `fit` makes no batch in its last step
    loss = ContrastiveLoss("softmax", world)
    learning = flops(lambda: loss(text, {"image": kept, "tokens": tokens}).backward())
    looking = flops(lambda: encoder.encode(images))
    allowed, medians = 1 + looking / learning, {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.0f} ms a step of {rows}, {rows / median:.2f} pairs/s")
    for name in ("in the loop", "open_clip, locked"):
        ratio = medians[name] / medians["cached"]
        print(
            f"{name} : cached = {ratio:.2f}; operations allow {allowed:.2f}, reached {ratio / allowed:.1%}", flush=True
        )


class Counted(Files):
    """Files that note when they are opened, in this process."""

    opened = 0

    def open(self, index: int) -> Image.Image:
        """Open a picture."""
        self.opened += 1
        return super().open(index)


def compare_caching(tower: Backbone, count: int, rounds: int, world: World) -> None:
    """Measure caching and a bare forward pass over as many images in turns, and print the ratio."""
    runtime = Runtime(workers=worker_count("auto", world.device))
    encoder, quiet = image_encoder(tower, runtime, world), Console(quiet=True)
    with tempfile.TemporaryDirectory() as place:
        root = write_pictures(Path(place) / "photos", (500, 375), count)
        files = Counted(root)
        for path in sorted(root.rglob("*.jpg")):
            files.add(str(path.relative_to(root)), ("a picture",), place)
        noise = torch.randint(256, (BATCH, 3, *encoder.size), dtype=torch.uint8)
        bare, cached = [], []
        for number in range(rounds):
            began = time.perf_counter()
            for begin in range(0, len(files.keys), BATCH):
                encoder.encode(noise[: min(BATCH, len(files.keys) - begin)])
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            cached_features(files, encoder, Path(place) / f"cache{number}", world, quiet)
            cached.append(time.perf_counter() - began)
        alone = image_encoder(tower, Runtime(workers=0), world)
        cached_features(files, alone, Path(place) / "counted", world, quiet)
        ratio = statistics.median(cached) / statistics.median(bare)
        times = files.opened / len(files.keys)
        print(
            f"caching {len(files.keys)} JPEGs: {statistics.median(cached):.2f} s, bare forward "
            f"{statistics.median(bare):.2f} s, ratio {ratio:.3f}; each opened {times:.2f} times"
        )


def main() -> None:
    """Measure steps and caching."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="B/32")
    parser.add_argument("--text", default="B")
    for name, value in (("--batch", 64), ("--steps", 2), ("--rounds", 3), ("--images", 256)):
        parser.add_argument(name, type=int, default=value)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(0, 1, device)
    tower = load_backbone(asked.arch).requires_grad_(False).to(device).eval()
    text = TextTower(SIZES[asked.text], VOCABULARY, CONTEXT, tower.embed_dim, 10.0, None, 0).to(device)
    compare_steps(tower, text, asked.batch, asked.steps, asked.rounds, world)
    compare_caching(tower, asked.images, asked.rounds, world)


if __name__ == "__main__":
    main()
