"""What segmentation costs: a training step, the transforms and sliding-window evaluation, beside a peer in one run.

    python benchmarks/segment.py step [--arch B/16] [--rows 2] [--steps 3] [--rounds 3]
    python benchmarks/segment.py transforms [--rounds 5]
    python benchmarks/segment.py slide [--arch B/16] [--rounds 3]

step: `fit` on noise beside a bare loop over timm's own ViT with the same head and loss. transforms: from JPEG and PNG
files to normalised crops of 512, one process, beside mmsegmentation's pipeline and pre-processor. slide: a 512 x 2048
image with 150 classes beside mmsegmentation's slide inference over the same network; peak memory in a process each; and
what counting pixels takes of the evaluation of a 512 x 683 image. Medians of runs in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from loader import write_pictures
from PIL import Image
from torch import Tensor, nn

from dpn_cli.engine.fit import Batch, Job, Outputs, fit, precision_of, prepare
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.recipe.schema import Optim, Runtime, Schedule
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from tasks.segment.labels import LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.loss import segmentation_loss
from tasks.segment.network import LinearSegmenter, initialize_head, normalized, use_imagenet_inputs
from tasks.segment.pairs import FolderPairs
from tasks.segment.scoring import count_pixels
from tasks.segment.transforms import SegmentAugmentation
from tasks.segment.windows import Plan, label_map

CLASSES, CROP = 150, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORLD = World(0, 1, DEVICE)


def network(arch: str, stem: str = "dpn") -> LinearSegmenter:
    """Build a network with random weights."""
    vit = load_backbone(arch, stem=stem, image_size=CROP, num_classes=CLASSES)
    use_imagenet_inputs(vit)
    initialize_head(vit, "truncated_normal", 0)
    return LinearSegmenter(vit, final_norm=False).to(DEVICE)


class Bare(nn.Module):
    """timm's own ViT with the head that the bare loop trains."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        size = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}[arch.split("/")[0]]
        name = f"vit_{size}_patch{arch.split('/')[1]}_224"
        self.vit = timm.create_model(name, img_size=CROP, num_classes=CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map normalised images to logits per patch."""
        tokens = self.vit.forward_intermediates(image, indices=1, output_fmt="NLC", intermediates_only=True)[0]
        return self.vit.head(tokens).transpose(1, 2).unflatten(2, (CROP // self.vit.patch_embed.patch_size[0], -1))


def measure_step(arch: str, rows: int, steps: int, rounds: int, runtime: Runtime) -> None:
    """Print the medians of a step of our loop and of a bare one, and their ratio."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (rows, 3, CROP, CROP), dtype=torch.uint8, generator=generator).to(DEVICE)
    label = torch.randint(0, CLASSES, (rows, CROP, CROP), dtype=torch.uint8, generator=generator).to(DEVICE)
    extent, valid = torch.full((rows, 2), CROP, device=DEVICE), torch.full((rows,), float(CROP**2), device=DEVICE)
    batch = {"image": image, "label": label, "extent": extent, "valid": valid}
    plain, stock = network(arch, "none"), Bare(arch).to(DEVICE)
    ready, stock_ready = prepare(plain, runtime, WORLD), torch.compile(stock) if runtime.compile else stock
    optimizer = torch.optim.AdamW(stock.parameters(), lr=3e-5, weight_decay=0.01, fused=True)
    floats, target = plain.vit.normalize(image), label.long()

    def bare(count: int) -> list[float]:
        stock.train()
        times = [time.perf_counter()]
        for _ in range(count):
            with precision_of(runtime, DEVICE):
                logits = F.interpolate(stock_ready(floats).float(), (CROP, CROP), mode="bilinear")
                loss = F.cross_entropy(logits, target, ignore_index=255)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]

    def ours(count: int) -> list[float]:
        times = [time.perf_counter()]

        def loss(trainable: nn.Module, part: Batch) -> Tensor:
            return segmentation_loss(trainable(normalized(plain.vit, part["image"], part["extent"])), part)

        job = Job(
            loss_fn=loss,
            batches=lambda start: (batch for _ in itertools.count()),
            optim=Optim(name="adam", weight_decay=0.01, clip_norm=None),
            schedule=Schedule(steps=count),
            lr=3e-5,
            batch_size=rows,
            seed=0,
            world=WORLD,
            runtime=runtime,
            micro_batch=MicroBatch(rows),
            outputs=Outputs(tick=lambda tick: times.append(time.perf_counter())),
        )
        fit(ready, job)
        return [after - before for before, after in itertools.pairwise(times)]

    spent: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(rounds):
        spent["bare"] += bare(steps + 1)[1:]
        spent["ours"] += ours(steps + 1)[1:]
    first, second = (statistics.median(spent[name]) for name in ("ours", "bare"))
    print(
        f"{arch} plain at {CROP}, {rows} images a step: {first:.3f} s, bare loop over timm's own {second:.3f} s; "
        f"{rows / first:.2f} and {rows / second:.2f} images/s, ratio {second / first:.3f}"
    )


def write_pairs(root: Path, count: int) -> Path:
    """Write pictures of 683 x 512 with the spectrum of photographs, and masks of a dozen regions."""
    pictures = sorted(write_pictures(root / "pictures", (683, 512), count).rglob("*.jpg"))
    for kind in ("images", "annotations"):
        (root / kind / "training").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, picture in enumerate(pictures):
        picture.rename(root / "images" / "training" / f"{number:04d}.jpg")
        coarse = torch.from_numpy(rng.normal(size=(1, 12, 6, 8)))
        regions = F.interpolate(coarse, (512, 683), mode="bicubic")[0].argmax(0).numpy() * 12 + 1
        Image.fromarray(regions.astype(np.uint8)).save(root / "annotations" / "training" / f"{number:04d}.png")
    return root


def our_examples(root: Path, rows: int) -> Iterator[Tensor]:
    """Yield normalised batches made by our transforms in this process."""
    vit = load_backbone("mu/16", image_size=CROP)
    use_imagenet_inputs(vit)
    how = SegmentAugmentation((CROP, CROP))
    batches = segment_batches(FolderPairs(root, "training"), LabelRule(CLASSES, 1, 0), how, rows, 0, WORLD, workers=0)
    for batch in batches(0):
        yield normalized(vit, batch["image"], batch["extent"])


def their_examples(root: Path, rows: int) -> Iterator[Tensor]:
    """Yield normalised batches made by mmsegmentation's ADE20K pipeline and its pre-processor."""
    from mmseg.datasets import ADE20KDataset
    from mmseg.models import SegDataPreProcessor
    from mmseg.utils import register_all_modules

    from tasks.segment import openmmlab_ade20k as config

    register_all_modules()
    prefix = {"img_path": "images/training", "seg_map_path": "annotations/training"}
    data = ADE20KDataset(data_root=str(root), data_prefix=prefix, pipeline=config.train_pipeline)
    settings = {key: value for key, value in config.model["data_preprocessor"].items() if key != "type"}
    prepare_batch = SegDataPreProcessor(**settings)
    order = itertools.cycle(range(len(data)))
    while True:
        items = [data[next(order)] for _ in range(rows)]
        batch = {key: [item[key] for item in items] for key in items[0]}
        yield prepare_batch(batch, True)["inputs"]


def measure_transforms(rounds: int) -> None:
    """Print images per second of processor time of both pipelines, on one thread, and their ratio."""
    import cv2

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root, rows, count = write_pairs(Path(place), 32), 8, 4
        streams = {"ours": our_examples(root, rows), "mmsegmentation": their_examples(root, rows)}
        rates: dict[str, list[float]] = {name: [] for name in streams}
        for _ in range(rounds + 1):
            for name, stream in streams.items():
                began = time.process_time()
                for _ in range(count):
                    next(stream)
                rates[name].append(rows * count / (time.process_time() - began))
    first, second = (statistics.median(values[1:]) for values in rates.values())
    print(f"transforms: {first:.1f} images/s of a core, mmsegmentation {second:.1f}, ratio {first / second:.2f}")


def slide(which: str, arch: str, size: tuple[int, int]) -> Callable[[], Tensor]:
    """Return a function that segments one image: ours, or mmsegmentation's around the same network."""
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ours = network(arch).eval()
    if which == "ours":
        return lambda: label_map(ours, [image], size, Plan(CROP, 341, (2048, 512)))
    from mmengine.config import ConfigDict
    from mmengine.structures import PixelData
    from mmseg.models import EncoderDecoder
    from mmseg.structures import SegDataSample
    from mmseg.utils import register_all_modules

    from tasks.segment import openmmlab, openmmlab_ade20k

    assert openmmlab  # importing it registers our network
    register_all_modules()
    model = dict(openmmlab_ade20k.model)
    width = ours.vit.embed_dim
    backbone = {**model["backbone"], "arch": arch}
    head = {**model["decode_head"], "in_channels": width, "channels": width}
    settings = {"data_preprocessor": model["data_preprocessor"], "test_cfg": ConfigDict(model["test_cfg"])}
    theirs = EncoderDecoder(backbone=backbone, decode_head=head, **settings).to(DEVICE).eval()
    theirs.backbone.vit, own = ours.vit, theirs.decode_head.conv_seg
    own.weight.data, own.bias.data = ours.vit.head.weight.data[..., None, None], ours.vit.head.bias.data
    item = SegDataSample(gt_sem_seg=PixelData(data=torch.zeros(1, *size, dtype=torch.long)))
    item.set_metainfo({"img_shape": size, "ori_shape": size, "pad_shape": size})
    return lambda: theirs.test_step({"inputs": [image.flip(0)], "data_samples": [item.clone()]})[0].pred_sem_seg.data[0]


def peak_memory(which: str, arch: str) -> float:
    """Return the MiB that segmenting a 512 x 2048 image adds to a process that has segmented a small one (Linux)."""
    script = (
        "import json, re, sys, torch, warnings\n"
        "from pathlib import Path\n"
        "warnings.simplefilter('ignore')\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import segment\nwhich, arch = sys.argv[2:]\n"
        "def status(key):\n"
        "    return int(re.search(key + r':\\s*(\\d+)', Path('/proc/self/status').read_text())[1]) / 2**10\n"
        "with torch.inference_mode():\n"
        "    segment.slide(which, 'mu/16', (512, 512))()\n"
        "    run = segment.slide(which, arch, (512, 2048))\n"
        "    Path('/proc/self/clear_refs').write_text('5')\n"
        "    before = status('VmRSS')\n"
        "    run()\n"
        "print(json.dumps(status('VmHWM') - before))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), which, arch]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


@torch.inference_mode()
def measure_slide(arch: str, rounds: int) -> None:
    """Print times and memory of both ways over a wide image, whether they agree, and the share of counting."""
    runs = {name: slide(name, arch, (512, 2048)) for name in ("ours", "mmsegmentation")}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, Any] = {}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            found[name] = run().cpu()
            spent[name].append(time.perf_counter() - began)
    first, second = (statistics.median(values[1:]) for values in spent.values())
    same = (found["ours"] == found["mmsegmentation"]).float().mean().item()
    print(
        f"{arch}, 512 x 2048: {first:.2f} s, mmsegmentation {second:.2f} s, ratio {second / first:.2f}; "
        f"{same:.4%} of the pixels equal"
    )
    if DEVICE.type == "cpu":
        memory = [peak_memory(name, arch) for name in runs]
        print(
            f"  peak memory on top: {memory[0]:.0f} MiB, mmsegmentation {memory[1]:.0f} MiB, "
            f"{memory[0] / memory[1]:.2f} of it"
        )
    run, times = slide("ours", arch, (512, 683)), []
    label = torch.randint(0, CLASSES, (512, 683), dtype=torch.uint8).to(DEVICE)
    for _ in range(rounds + 1):
        began = time.perf_counter()
        done = run()
        middle = time.perf_counter()
        count_pixels(done, label, CLASSES).cpu()
        times.append(((middle - began), time.perf_counter() - middle))
    whole, counting = (statistics.median(values) for values in zip(*times[1:], strict=True))
    print(f"  512 x 683: {whole:.2f} s, counting {1000 * counting:.1f} ms, {counting / whole:.2%} of it")


def main() -> None:
    """Measure what was asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("step", "transforms", "slide"))
    parser.add_argument("--arch", default="B/16")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of mmsegmentation, about operators that are not compiled
    if asked.what == "step":
        measure_step(asked.arch, asked.rows, asked.steps, asked.rounds, Runtime(compile=asked.compile))
    elif asked.what == "transforms":
        measure_transforms(asked.rounds)
    else:
        measure_slide(asked.arch, asked.rounds)


if __name__ == "__main__":
    main()
