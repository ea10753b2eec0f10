"""Features of a frozen image tower: the encoder, and features that are read from the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli.data.pixels import crop_and_flip, to_device
from dpn_cli.engine.memory import in_chunks
from dpn_cli.engine.seeds import fold
from dpn_cli.weights.backbone import Backbone

# Augmented views are cut at random from images this much larger, and mirrored (big_vision's resize, random_crop, flip).
LARGER = 8 / 7

Encode = Callable[[Tensor], Tensor]
"""uint8 images (b, 3, h, w) to unit features (b, d) in float32, on the tower's device."""


@dataclass(frozen=True)
class ImageEncoder:
    """A frozen image tower: `encode`, the width of its features, and the facts that identify them.

    `workers` processes read the images; `batch_size` of them go through the tower at once (None: the cache's number).
    """

    encode: Encode
    width: int
    size: tuple[int, int]
    facts: dict[str, Any]
    views: int = 0
    seed: int = 0
    workers: int | Literal["auto"] = "auto"
    skip_bad: bool = False
    batch_size: int | None = None

    @property
    def read_size(self) -> tuple[int, int]:
        """The size at which images are read: larger when views are cropped from them."""
        height, width = (round(side * LARGER) if self.views else side for side in self.size)
        return height, width

    def encode_views(self, images: Tensor, rows: Sequence[int]) -> Tensor:
        """Encode the images of `rows`, (b, 3, *read_size); returns features (b, views, d) on the CPU."""
        return self.encode(views_of(images, rows, self)).cpu().reshape(len(images), max(1, self.views), -1)


class Features:
    """Unit features of images, (n, views, d), read from the disk on demand.

    All shards but the last have the same number of rows; `bad` are the rows of unreadable images.
    """

    def __init__(self, shards: Sequence[npt.NDArray[np.float16]], bad: Sequence[int]) -> None:
        self.shards, self.bad = shards, list(bad)
        self.views, self.width = shards[0].shape[1:]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def rows(self, rows: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the features (b, d) of images (b,), of their first view or the given ones, in float16."""
        index = rows.numpy()
        view = np.zeros_like(index) if views is None else views.numpy()
        features = np.empty((len(index), self.width), dtype=np.float16)
        shard, offsets = np.divmod(index, len(self.shards[0]))
        for number in np.unique(shard):
            positions = np.flatnonzero(shard == number)
            features[positions] = self.shards[number][offsets[positions], view[positions]]
        return torch.from_numpy(features)


def encode_function(tower: Backbone, device: torch.device, autocast: torch.autocast) -> Encode:
    """Return a function from uint8 images (b, 3, h, w) on the CPU to unit features (b, d) of the frozen tower."""

    def encode(images: Tensor) -> Tensor:
        def features(part: Tensor) -> Tensor:
            return F.normalize(tower(tower.normalize(to_device(part, device))).float(), dim=-1)

        with torch.no_grad(), autocast:
            return in_chunks(features, images)

    return encode


def digest_of(tower: torch.nn.Module) -> str:
    """Return a SHA-256 over a network's tensors, which does not depend on their file."""
    digest = hashlib.sha256()
    for name, value in sorted(tower.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def views_of(images: Tensor, rows: Sequence[int], encoder: ImageEncoder) -> Tensor:
    """Return the views (b * views, 3, h, w) of images (b, 3, H, W): a function of seed, image and view alone."""
    if not encoder.views:
        return images
    views = []
    for image, row in zip(images, rows, strict=True):
        for view in range(encoder.views):
            generator = torch.Generator().manual_seed(fold(encoder.seed, row, view))
            cut = partial(
                crop_and_flip, image[None], torch.tensor([0]), encoder.size, generator=generator, own_rows=slice(0, 1)
            )
            views.append(cut(crop=True, flip=True))
    return torch.cat(views)
