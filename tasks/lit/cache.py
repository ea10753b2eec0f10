"""Features of a frozen image tower, computed once per image and kept in memory-mapped shards.

A cache is a folder named by a hash of all that decides its content: weights, preprocessing, data, views. ``cache.json``
says what it is, ``features-00000.npy`` (rows, views, d) in float16 holds unit features, and ``features-00000.json`` the
shard's digest and the rows whose image is unreadable.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dpn_cli import distributed, stopping
from dpn_cli.backbone import Backbone
from dpn_cli.console import LINE_EVERY, Console
from dpn_cli.data.pixels import augment, resize, stream
from dpn_cli.distributed import World
from dpn_cli.errors import DataError
from dpn_cli.files import claimed, replace_json
from dpn_cli.seeds import fold
from tasks.lit.arrays import facts_of, save_array
from tasks.lit.captions import Captioned

# Images per shard: what a killed run encodes again. A multiple of every batch size that encoding uses.
SHARD, BATCH = 4096, 64
# Augmented views are cut at random from images this much larger, and mirrored (big_vision's resize, random_crop, flip).
LARGER = 8 / 7
# Images of an existing cache that are encoded again, to see that it holds what it says; cosine they must reach.
SPOT_CHECKS, SPOT_COSINE = 8, 0.999
# So many more of those whose files were written after that: all of a few that were changed, a sample of a copied set.
LATER_CHECKS = 256
VERSION = 1

Encode = Callable[[Tensor], Tensor]
"""uint8 images (b, 3, h, w) to unit features (b, d) in float32, on the CPU."""


@dataclass(frozen=True)
class Wanted:
    """What is encoded how: `encode`, the width of its features and the facts that it depends on, beside the data."""

    encode: Encode
    width: int
    size: tuple[int, int]
    facts: dict[str, Any]
    views: int = 0
    seed: int = 0
    workers: int | Literal["auto"] = "auto"
    skip_bad: bool = False

    @property
    def read_size(self) -> tuple[int, int]:
        """The size that images are read in: larger where views are cut from them."""
        height, width = (round(side * LARGER) if self.views else side for side in self.size)
        return height, width


class Features:
    """Unit features of images, (n, views, d), read from the disk as they are asked for."""

    def __init__(self, shards: Sequence[npt.NDArray[np.float16]], bad: Sequence[int]) -> None:
        self.shards, self.bad = shards, list(bad)
        self.views, self.width = shards[0].shape[1:]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def rows(self, rows: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the features (b, d) of images (b,), of their first view or the given ones, in float16."""
        wanted = rows.numpy()
        view = np.zeros_like(wanted) if views is None else views.numpy()
        found = np.empty((len(wanted), self.width), dtype=np.float16)
        shard, inside = wanted // SHARD, wanted % SHARD
        for number in np.unique(shard):
            here = np.flatnonzero(shard == number)
            found[here] = self.shards[number][inside[here], view[here]]
        return torch.from_numpy(found)


def encoder(tower: Backbone, device: torch.device, autocast: torch.autocast) -> Encode:
    """Return what maps uint8 images (b, 3, h, w) to unit features (b, d) of the frozen tower."""

    def encode(images: Tensor) -> Tensor:
        with torch.no_grad(), autocast:
            return F.normalize(tower(tower.normalize(images.to(device))).float(), dim=-1).cpu()

    return encode


def digest_of(tower: torch.nn.Module) -> str:
    """Return a SHA-256 over a network's tensors, whatever file they came from."""
    found = hashlib.sha256()
    for name, value in sorted(tower.state_dict().items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def data_fingerprint(data: Captioned) -> str:
    """Return a hash over the images' names and encoded sizes, in order; places on this machine do not matter."""
    lines = (f"{data.key(index)} {size}" for index, size in enumerate(data.sizes))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cached_features(data: Captioned, wanted: Wanted, root: Path, world: World, console: Console) -> Features:
    """Return the features of all images from the cache below `root`, encoding what is not there yet, once.

    Ranks share the work, and the folder; another process that fills the same one is waited for. Damaged shards, and
    caches of something else under this name, are said and made again. Raises `DataError` for an unreadable image unless
    they are skipped, `StoppedError` when a signal asks to stop; finished shards are kept.
    """
    facts = {
        **wanted.facts,
        "version": VERSION,
        "data": data_fingerprint(data),
        "images": len(data.captions),
        "image_size": list(wanted.size),
        "views": wanted.views,
        "seed": wanted.seed if wanted.views else None,
        "dtype": "float16",
    }
    folder = root / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def wait() -> None:
        stopping.check_here()
        console.info(f"waiting for another process, which encodes images into {folder}")

    with claimed(folder, wait) if world.leads else nullcontext():
        return _filled(folder, facts, data, wanted, world, console)


def _filled(
    folder: Path, facts: dict[str, Any], data: Captioned, wanted: Wanted, world: World, console: Console
) -> Features:
    """Return the features of a cache's folder, after encoding what is not there yet."""
    files = [_file(folder, number) for number in range(-(-len(data.captions) // SHARD))]
    found = distributed.from_leader(_finished(files, facts, data, wanted, console) if world.leads else None)
    assert found is not None
    missing = [number for number, facts in enumerate(found) if facts is None]
    if missing:
        rows = sum(min(SHARD, len(data.captions) - number * SHARD) for number in missing)
        console.info(f"encoding {rows} images once, into {folder}")
        _encode(data, wanted, folder, missing[world.rank :: world.size], console)
        distributed.barrier()
        found = [facts or facts_of(file) for file, facts in zip(files, found, strict=True)]
    bad = [row for facts in found if facts for row in facts["bad"]]
    if len(bad) == len(data.captions):
        raise DataError(f"{data.where(0)}: not a readable image, and no other one is; nothing is left to work with")
    if bad and not wanted.skip_bad:
        raise DataError(
            f"{data.where(bad[0])}: not a readable image, as are {len(bad) - 1} others; fetch them again, or leave "
            "them out and count them with --skip-bad-images"
        )
    return Features([np.load(file, mmap_mode="r") for file in files], bad)


def _whole(files: Sequence[Path], console: Console) -> list[dict[str, Any] | None]:
    """Return what was saved with each shard, None for those to be encoded; damaged ones are said."""
    found: list[dict[str, Any] | None] = []
    for file in files:
        try:
            found.append(facts_of(file))
        except DataError as error:
            console.warn(f"{error}; its images are encoded again")
            found.append(None)
    return found


def _file(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.npy"


def _finished(
    files: Sequence[Path], facts: dict[str, Any], data: Captioned, wanted: Wanted, console: Console
) -> list[dict[str, Any] | None]:
    """Return `_whole` of a cache that holds what its name says; another one is cleared, and a new one begun."""
    folder = files[0].parent
    path = folder / "cache.json"
    if folder.is_dir():
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in facts.items() if described.get(name) != value]
            problem = f"it is of another {', '.join(other)}" if other else None
        except (OSError, ValueError, AttributeError) as error:
            problem = f"cache.json cannot be read ({error})"
        if problem is None:
            found = _whole(files, console)
            problem = _spot_check(files, found, data, wanted)
            if problem is None:
                return found
        console.warn(f"cache {folder}: {problem}; its images are encoded again")
        shutil.rmtree(folder)
    replace_json(path, facts)
    return [None] * len(files)


def _spot_check(
    files: Sequence[Path], found: Sequence[dict[str, Any] | None], data: Captioned, wanted: Wanted
) -> str | None:
    """Encode a few images of the finished shards again; returns what is wrong with the stored features."""
    bad = {row for facts in found if facts for row in facts["bad"]}
    rows = [row for row in range(len(data.captions)) if found[row // SHARD] and row not in bad]
    encoded = [file.stat().st_mtime_ns if facts else 0 for file, facts in zip(files, found, strict=True)]
    later = [row for row in rows if data.written and data.written[row] > encoded[row // SHARD]]
    for row in (*_spread(rows, SPOT_CHECKS), *_spread(later, LATER_CHECKS)):
        try:
            pixels = data.pixels(row)
        except DataError:  # an image that is gone has been encoded
            continue
        stored = torch.from_numpy(np.load(files[row // SHARD], mmap_mode="r")[row % SHARD].astype(np.float32))
        now = wanted.encode(_views(resize(pixels, wanted.read_size)[None], [row], wanted)).cpu()
        if not (stored * now).sum(-1).min() > SPOT_COSINE:
            return f"{data.where(row)} gives other features now"
    return None


def _spread(rows: Sequence[int], count: int) -> Sequence[int]:
    return rows[:: -(-len(rows) // count) or 1]


def _views(images: Tensor, rows: Sequence[int], wanted: Wanted) -> Tensor:
    """Return the views (b * views, 3, h, w) of images (b, 3, H, W): a function of seed, image and view alone."""
    if not wanted.views:
        return images
    found = []
    for image, row in zip(images, rows, strict=True):
        for view in range(wanted.views):
            generator = torch.Generator().manual_seed(fold(wanted.seed, row, view))
            cut = partial(augment, image[None], torch.tensor([0]), wanted.size, generator=generator, mine=slice(0, 1))
            found.append(cut(crop=True, flip=True))
    return torch.cat(found)


def _encode(data: Captioned, wanted: Wanted, folder: Path, shards: Sequence[int], console: Console) -> None:
    """Encode whole shards one after the other and put each in its place when it is complete."""
    pending = [row for number in shards for row in range(number * SHARD, min((number + 1) * SHARD, len(data.captions)))]
    rows, features, shown = list[int](), list[Tensor](), time.monotonic()
    resized = partial(resize, size=wanted.read_size)
    with stream(data, resized, BATCH, rows=pending, workers=wanted.workers, skip_bad=wanted.skip_bad) as parts:
        # SHARD is a multiple of BATCH and only the last shard of all is short, so no batch lies in two shards.
        for begin, part in zip(range(0, len(pending), BATCH), parts, strict=True):
            stopping.check_here()
            number, end = pending[begin] // SHARD, min(begin + BATCH, len(pending))
            if len(part.images):
                here = part.labels.tolist()
                found = wanted.encode(_views(part.images, here, wanted))
                rows += here
                features.append(found.reshape(len(here), max(1, wanted.views), -1).half())
            if end == len(pending) or pending[end] // SHARD != number:
                count = min(SHARD, len(data.captions) - number * SHARD)
                whole = torch.zeros(count, max(1, wanted.views), wanted.width, dtype=torch.float16)
                if rows:
                    whole[torch.tensor(rows) - number * SHARD] = torch.cat(features)
                if not whole.isfinite().all():
                    raise DataError("the image tower's features are not finite: its weights are damaged")
                bad = sorted(set(range(number * SHARD, number * SHARD + count)) - set(rows))
                save_array(_file(folder, number), whole.numpy(), bad=bad)
                rows, features = [], []
                if time.monotonic() - shown >= LINE_EVERY:
                    shown = time.monotonic()
                    console.info(f"{end} of {len(pending)} images encoded")
