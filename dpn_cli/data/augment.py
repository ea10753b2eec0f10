"""DeiT's augmentation by timm and torchvision, drawn anew for every position of every batch.

Both libraries draw from the global random numbers of Python, NumPy and torch. They are seeded here for the call and
restored after it, so that an image's augmentation depends only on its position in the training.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.auto_augment import posterize
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, Compose, InterpolationMode, RandomHorizontalFlip

from dpn_cli.config.schema import DistillCrop, TorchvisionPolicy
from dpn_cli.data.crops import Decode
from dpn_cli.data.resize import Size
from dpn_cli.engine.seeds import fold

if TYPE_CHECKING:
    from dpn_cli.engine.fit import Batch, Batches

# Streams of draws; see `dpn_cli.data.loader` for the others.
MIX_TIMM = 6
# Grey fills the areas that AutoAugment's geometric operations leave empty.
FILL = [128, 128, 128]


@contextmanager
def seed_globally(seed: int) -> Iterator[None]:
    """Seed the global random numbers of Python, NumPy and torch's CPU for the block, and restore them after it."""
    saved_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(saved_states[0])
        np.random.set_state(saved_states[1])
        torch.set_rng_state(saved_states[2])


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images.

    Args:
        size: height and width in pixels.
        decode: how JPEGs are decoded.
        mixup: big_vision's mixup, the strength p of Beta(p, p).
        layers: the number of operations of big_vision's RandAugment.
        magnitude: how strong those are.
        crop: inception crops, the whole image squeezed to `size`, timm's random crops, or the centre.
        resize_side: shorter side in pixels before the centre is cut out.
        crop_area: smallest share of an image's area in a crop; None for 0.05, of timm's crops 0.08.
        flip: mirror every second image.
        policy: timm's RandAugment or torchvision's AutoAugment, by name.
        jitter: how far timm changes brightness, contrast and saturation: by factors of 1 - jitter to 1 + jitter.
        noise: largest standard deviation of Gaussian noise in grey levels; each image draws its own below it.
        noise_pairs: keep the images without noise, too: channels 0 to 2 have none, 3 to 5 have it.
        erase: share of images of which timm erases a part; these batches are float32 and normalised.
        repeats: how often an epoch draws each of its images (repeated augmentation).
        mirrored: give each rank the pairs of positions that mirror each other, which timm mixes.
        mean: the network's, of pixels in [0, 1]; `erase` needs both.
        std: the network's.
        views: draw each image in so many ways, one in an epoch, over and over; 0 draws it anew at every position.
    """

    size: Size
    decode: Decode = "exact"
    mixup: float = 0.0
    layers: int = 0
    magnitude: float = 0.0
    crop: DistillCrop = "inception"
    resize_side: int | None = None
    crop_area: float | None = None
    flip: bool = True
    policy: str | None = None
    jitter: float = 0.0
    noise: float = 0.0
    noise_pairs: bool = False
    erase: float = 0.0
    repeats: int = 1
    mirrored: bool = False
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    views: int = 0

    @property
    def random_crop(self) -> bool:
        """Return whether timm cuts the crop."""
        return self.crop in ("timm_bicubic", "timm_bilinear")

    @property
    def one_by_one(self) -> bool:
        """Return whether images are mirrored and augmented one by one, rather than a batch at a time."""
        return bool(self.layers or self.policy or self.jitter or self.erase or self.random_crop or self.views)

    @property
    def image_bytes(self) -> int:
        """The size of a training image in bytes."""
        return (6 if self.noise_pairs else 3) * math.prod(self.size) * (4 if self.erase else 1)

    def describe(self) -> str:
        """Return what happens to a training image, in words."""
        crops = {"inception": "inception crops", "whole": "whole", "centre": "centre crops as in evaluation"}
        area = f" of {self.crop_area:g} of the area or more" if self.crop_area else ""
        operations = {
            crops.get(self.crop, "timm's crops") + area: True,
            "flipped at random": self.flip,
            f"{self.layers} operations of RandAugment ({self.magnitude:g})": self.layers,
            self.policy: self.policy,
            f"jitter {self.jitter:g}": self.jitter,
            f"erased in part ({self.erase:g})": self.erase,
            f"noise up to {self.noise:g}": self.noise,
        }
        return ", ".join(str(operation) for operation, is_on in operations.items() if is_on)


@cache
def make_transform(augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
    """Return timm's training transform: crop where `how` says timm's, mirror, policy or colour jitter, random erasing.

    It maps an RGB image to (3, *size): uint8, or with erasing, whose noise is normal in the network's input range,
    float32 pixels in that range.
    """
    bicubic = augmentation.crop == "timm_bicubic"
    by_torchvision = augmentation.policy in get_args(TorchvisionPolicy)
    crop, policy, finish = create_transform(
        augmentation.size,
        is_training=True,
        separate=True,
        scale=(augmentation.crop_area, 1.0) if augmentation.crop_area else None,
        hflip=0.5 * augmentation.flip,
        color_jitter=augmentation.jitter or None,
        auto_augment=None if by_torchvision else augmentation.policy,
        interpolation="bicubic" if bicubic else "bilinear",
        mean=augmentation.mean,
        std=augmentation.std,
        re_prob=augmentation.erase,
        re_mode="pixel",
        normalize=augmentation.erase > 0,
    )
    if augmentation.crop in ("inception", "whole", "centre"):  # the image comes in its final size
        crop = Compose([RandomHorizontalFlip(0.5 * augmentation.flip)])
    for operation in (op for transform in policy.transforms for op in getattr(transform, "ops", ())):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    if by_torchvision:
        policy = AutoAugment(AutoAugmentPolicy(augmentation.policy), InterpolationMode.BILINEAR, FILL)
    combined: Callable[[Image.Image], Tensor] = Compose([crop, policy, finish])
    return combined


def _posterize(image: Image.Image, bits: int, **others: Any) -> Image.Image:
    """Keep `bits` of each value, as timm does. Zero bits, which Pillow 13 refuses, give a black image."""
    posterized: Image.Image = posterize(image, bits, **others) if bits else Image.new(image.mode, image.size)
    return posterized


def add_noise(image: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise to an image (3, h, w) uint8; its deviation is uniform from 0 to `most` grey levels."""
    deviation = most * torch.rand((), generator=generator)
    noise = deviation * torch.randn(image.shape, generator=generator)
    return (image + noise).round_().clamp_(0, 255).to(torch.uint8)


def mix_batches(batches: Batches, mixup: Mixup, normalize: Callable[[Tensor], Tensor], seed: int) -> Batches:
    """Return batches of ``image`` (b, 3, h, w), normalised and mixed by timm's mixup and CutMix, and ``target``.

    The images that are mixed with each other are neighbours, a first one and the one at the mirrored position of the
    batch: a part of the batch is the same for any number of ranks. There is one share for the whole batch. ``target``
    (b, classes) includes the label smoothing of `mixup`.
    """

    def mixing(start: int) -> Generator[Batch, None, None]:
        with closing(batches(start)) as stream:
            for step, batch in enumerate(stream, start):
                rows, device = len(batch["label"]), batch["label"].device
                firsts, others = torch.arange(0, rows, 2, device=device), torch.arange(rows - 1, 0, -2, device=device)
                mirroring = torch.cat([firsts, others])
                with seed_globally(fold(seed, MIX_TIMM, step)):
                    image, target = mixup(normalize(batch["image"][mirroring]), batch["label"][mirroring])
                neighbours = mirroring.argsort()
                yield {"image": image[neighbours], "target": target[neighbours]}

    return mixing


def make_mixup(mixup: float, cutmix: float, smoothing: float, classes: int) -> Mixup:
    """Return timm's mixing with DeiT's other settings: every batch is mixed, by mixup or CutMix with equal chances."""
    shares: dict[str, Any] = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "label_smoothing": smoothing}
    return Mixup(**shares, prob=1.0, switch_prob=0.5, mode="batch", num_classes=classes)
