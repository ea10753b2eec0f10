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
import torch
import torch.nn.functional as F
from loader import write_images
from PIL import Image
from step import Steps, fit_steps, timms
from torch import Tensor, nn

from dpn_cli.config.schema import Optim, Runtime
from dpn_cli.engine.fit import Batch, prepare
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.run.process import keep_memory
from dpn_cli.weights.backbone import load_backbone
from tasks.segment.iou import count_pixels
from tasks.segment.labels import LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.loss import segmentation_loss
from tasks.segment.model import LinearSegmenter, initialize_head, normalize, use_imagenet_inputs
from tasks.segment.pairs import FolderPairs
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.segment.transforms import SegmentAugmentation

CLASSES, CROP = 150, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORLD = World(0, 1, DEVICE)


def network(arch: str, stem: str = "dpn", *, crop: int = CROP, device: torch.device = DEVICE) -> LinearSegmenter:
    """Build a network with random weights."""
    vit = load_backbone(arch, stem=stem, image_size=crop, num_classes=CLASSES)
    use_imagenet_inputs(vit)
    initialize_head(vit, "truncated_normal", 0)
    return LinearSegmenter(vit, final_norm=False).to(device)


class Bare(nn.Module):
    """timm's own ViT with the head that the bare loop trains."""

    def __init__(self, arch: str, crop: int) -> None:
        super().__init__()
        self.vit = timms(arch, crop, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map normalised images to logits per patch."""
        tokens = self.vit.forward_intermediates(image, indices=1, output_fmt="NLC", intermediates_only=True)[0]
        rows = image.shape[-2] // self.vit.patch_embed.patch_size[0]
        return self.vit.head(tokens).transpose(1, 2).unflatten(2, (rows, -1))


def synthetic(rows: int, crop: int, device: torch.device) -> Batch:
    """Return one batch of noise with labels of noise."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (rows, 3, crop, crop), dtype=torch.uint8, generator=generator)
    label = torch.randint(0, CLASSES, (rows, crop, crop), dtype=torch.uint8, generator=generator)
    extent, valid = torch.full((rows, 2), crop), torch.full((rows,), float(crop**2))
    return {
        "image": image.to(device),
        "label": label.to(device),
        "extent": extent.to(device),
        "valid": valid.to(device),
    }


def our_steps(plain: LinearSegmenter, batch: Batch, runtime: Runtime, device: torch.device = DEVICE) -> Steps:
    """Return the training of `plain` on a batch through our loop."""

    def loss(trainable: nn.Module, part: Batch) -> Tensor:
        return segmentation_loss(trainable(normalize(plain.vit, part["image"], part["extent"])), part)

    ready = prepare(plain, runtime, World(0, 1, device))
    adam = Optim(name="adam", weight_decay=0.01, clip_norm=None)
    return fit_steps(ready, batch, runtime, device, loss_fn=loss, optim=adam, lr=3e-5)


def loop(losses: Callable[[], Tensor], model: nn.Module, runtime: Runtime, device: torch.device) -> Steps:
    """Return a plain PyTorch loop: the loss, backward, fused AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-5, weight_decay=0.01, fused=True)

    def run(count: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(count):
            with autocast(runtime, device, model):
                loss = losses()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]

    return run


def bare_steps(arch: str, floats: Tensor, label: Tensor, runtime: Runtime, device: torch.device = DEVICE) -> Steps:
    """Return the training of timm's own ViT with a linear head on normalised images in a bare loop."""
    size, target = floats.shape[-2:], label.long()
    stock = Bare(arch, size[0]).to(device).train()
    ready = torch.compile(stock) if runtime.compile else stock

    def losses() -> Tensor:
        logits = F.interpolate(ready(floats).float(), size, mode="bilinear")
        return F.cross_entropy(logits, target, ignore_index=255)

    return loop(losses, stock, runtime, device)


def mmseg_steps(plain: LinearSegmenter, arch: str, floats: Tensor, label: Tensor, runtime: Runtime) -> Steps:
    """Return the training of mmsegmentation's model around the same network in a bare loop."""
    theirs = mmseg_model(plain, arch, floats.device).train()
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    samples = [SegDataSample(gt_sem_seg=PixelData(data=one.long()[None])) for one in label]

    def losses() -> Tensor:
        found: Tensor = theirs.parse_losses(theirs.loss(floats, samples))[0]
        return found

    return loop(losses, theirs, runtime, floats.device)


def measure_step(arch: str, rows: int, steps: int, rounds: int, runtime: Runtime) -> None:
    """Print the medians of a step of our loop and of a bare one, and their ratio."""
    plain, batch = network(arch, "none"), synthetic(rows, CROP, DEVICE)
    ours = our_steps(plain, batch, runtime)
    bare = bare_steps(arch, plain.vit.normalize(batch["image"]), batch["label"], runtime)
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
    """Write images of 683 x 512 with the spectrum of photographs, and masks of a dozen regions."""
    images = sorted(write_images(root / "images", (683, 512), count).rglob("*.jpg"))
    for kind in ("images", "annotations"):
        (root / kind / "training").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, image in enumerate(images):
        image.rename(root / "images" / "training" / f"{number:04d}.jpg")
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
        yield normalize(vit, batch["image"], batch["extent"])


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


def mmseg_model(ours: LinearSegmenter, arch: str, device: torch.device = DEVICE) -> Any:
    """Return mmsegmentation's model around the same network and head."""
    from mmengine.config import ConfigDict
    from mmseg.models import EncoderDecoder
    from mmseg.utils import register_all_modules

    from tasks.segment import openmmlab, openmmlab_ade20k

    assert openmmlab  # importing it registers our network
    register_all_modules()
    model, window = dict(openmmlab_ade20k.model), ours.vit.config.image_size
    width, stride = ours.vit.embed_dim, stride_of(window[0])
    backbone = {**model["backbone"], "arch": arch, "stem": ours.vit.config.stem, "image_size": window[0]}
    head = {**model["decode_head"], "in_channels": width, "channels": width}
    inputs = {**model["data_preprocessor"], "size": window, "test_cfg": {"size": window}}
    sliding = ConfigDict({**model["test_cfg"], "crop_size": window, "stride": (stride, stride)})
    settings = {"data_preprocessor": inputs, "test_cfg": sliding}
    theirs = EncoderDecoder(backbone=backbone, decode_head=head, **settings).to(device)
    theirs.backbone.vit, own = ours.vit, theirs.decode_head.conv_seg
    own.weight.data, own.bias.data = ours.vit.head.weight.data[..., None, None], ours.vit.head.bias.data
    return theirs


def stride_of(window: int) -> int:
    """Return the stride of windows: two thirds of one, as 341 of 512."""
    return window * 2 // 3


def slide(
    which: str, arch: str, size: tuple[int, int], *, crop: int = CROP, device: torch.device = DEVICE
) -> Callable[[], Tensor]:
    """Return a function that segments one image: ours, or mmsegmentation's around the same network."""
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    ours = network(arch, crop=crop, device=device).eval()
    if which == "ours":
        return lambda: label_map(ours, [image], size, WindowPlan(crop, stride_of(crop), (2048, 512)))
    theirs = mmseg_model(ours, arch, device).eval()
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

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
    keep_memory()  # as the program does
    warnings.simplefilter("ignore")  # of mmsegmentation, about operators that are not compiled
    if asked.what == "step":
        measure_step(asked.arch, asked.rows, asked.steps, asked.rounds, Runtime(compile=asked.compile))
    elif asked.what == "transforms":
        measure_transforms(asked.rounds)
    else:
        measure_slide(asked.arch, asked.rounds)


if __name__ == "__main__":
    main()
