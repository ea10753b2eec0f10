"""Training batches of image features and tokens, from the cache or from the images themselves."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpn_cli.data.pixels import crop_and_flip, stream, to_device
from dpn_cli.data.resize import resize
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.engine.fit import Batch, Batches
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError
from dpn_cli.run import signals
from dpn_cli.run.arrays import facts_of, save_array
from dpn_cli.run.distributed import World
from tasks.lit.captions import CaptionedImages
from tasks.lit.features import Features, ImageEncoder
from tasks.lit.tokenizer import Tokenizer

# Independent streams of random numbers: captions, views, crops.
CAPTION, VIEW, CROP = 1, 2, 3
# Captions that are tokenized between two checks for a stop signal.
CHUNK = 10_000


@dataclass(frozen=True)
class TokenBatches:
    """Tokens (texts, context) of all captions of all images; image i has those from `first[i]` up to `first[i + 1]`."""

    tokens: Tensor
    first: Tensor
    cut: int

    def count(self, images: Tensor) -> int:
        """Return how many captions images (n,) have together."""
        return int((self.first[images + 1] - self.first[images]).sum())

    def of(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return the tokens (b, context) of one caption of each image (b,), chosen by `draws` (b,) from [0, 1)."""
        start, end = self.first[images], self.first[images + 1]
        return self.tokens[start + (draws * (end - start)).long()].long()


def tokenize(data: CaptionedImages, tokenizer: Tokenizer, root: Path | None = None) -> TokenBatches:
    """Tokenize all captions. With `root`, tokens are cached there under a hash of texts and tokenizer."""
    texts = (text for captions in data.captions for text in captions)
    first = torch.from_numpy(np.fromiter(chain([0], map(len, data.captions)), np.int64)).cumsum(0)
    if root is None:
        tokens, cut = _encode(texts, tokenizer)
        return TokenBatches(torch.from_numpy(tokens), first, cut)
    digest = hashlib.sha256(json.dumps(tokenizer.to_dict()).encode())
    for captions in data.captions:
        digest.update("".join(f"{text}\0" for text in captions).encode())
    path = root / f"tokens-{digest.hexdigest()[:16]}.npy"
    with contextlib.suppress(DataError):  # a damaged file is written again
        if facts := facts_of(path):
            return TokenBatches(torch.from_numpy(np.load(path)), first, facts["cut"])
    tokens, cut = _encode(texts, tokenizer)
    save_array(path, tokens, cut=cut)
    return TokenBatches(torch.from_numpy(tokens), first, cut)


def _encode(texts: Iterator[str], tokenizer: Tokenizer) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], int]:
    parts, cut = [], 0
    while chunk := list(islice(texts, CHUNK)):
        signals.check_here()
        tokens, longer = tokenizer.encode(chunk)
        parts.append(tokens)
        cut += longer
    return np.concatenate(parts), cut


def draws(count: int, seed: int, kind: int, step: int) -> Tensor:
    """Return `count` numbers from [0, 1): a function of seed, `kind` of draw, and step."""
    return torch.rand(count, generator=torch.Generator().manual_seed(fold(seed, kind, step)))


def cached_batches(
    features: Features, good: Tensor, texts: TokenBatches, batch_size: int, seed: int, world: World
) -> Batches:
    """Return the engine's ``batches``: ``image`` (b, d) in float16 and ``tokens`` (b, context), this rank's rows.

    Images are those of `good`, in shuffled epochs; every visit draws one caption and one view of the image.
    """
    rank_rows = _share(batch_size, world)

    def batches(start: int) -> Generator[Batch, None, None]:
        step = start
        while True:
            images = good[rows_of_step(len(good), batch_size, seed, step)][rank_rows]
            views = (draws(batch_size, seed, VIEW, step)[rank_rows] * features.views).long()
            yield {
                "image": to_device(features.rows(images, views), world.device),
                "tokens": to_device(texts.of(images, draws(batch_size, seed, CAPTION, step)[rank_rows]), world.device),
            }
            step += 1

    return batches


class _Rows(Sequence[int]):
    """The images of this rank in all batches from a step on, one after the other."""

    def __init__(self, rows: Callable[[int], list[int]], start: int, steps: int, share: int) -> None:
        self.rows, self.start, self.steps, self.share = rows, start, steps, share

    def __len__(self) -> int:
        return (self.steps - self.start) * self.share

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # no slices
        step, position = divmod(index, self.share)
        return self.rows(self.start + step)[position]


def encoded_batches(
    data: CaptionedImages,
    encoder: ImageEncoder,
    texts: TokenBatches,
    batch_size: int,
    seed: int,
    world: World,
    *,
    steps: int,
    micro: int,
) -> Batches:
    """Return the same batches without a cache: every image is read and encoded at every visit.

    With ``encoder.views``, every visit crops and mirrors it anew. A worker reads ahead, and the tower encodes, at most
    `micro` images at once: the largest number up to it that divides the rank's batch.
    """
    rank_rows = _share(batch_size, world)

    @lru_cache(maxsize=4)
    def rows(step: int) -> list[int]:
        listed: list[int] = rows_of_step(len(data.captions), batch_size, seed, step)[rank_rows].tolist()
        return listed

    def cut(images: Tensor, step: int, offset: int) -> Tensor:
        generator = torch.Generator().manual_seed(fold(seed, CROP, step))
        positions = torch.arange(batch_size) - offset  # the draws are the whole batch's
        chunk_rows = slice(offset, offset + len(images))
        return crop_and_flip(
            images, positions, encoder.size, crop=True, flip=True, generator=generator, own_rows=chunk_rows
        )

    def batches(start: int) -> Generator[Batch, None, None]:
        share = len(world.rows(batch_size))
        count = next(size for size in range(min(micro, share), 0, -1) if share % size == 0)
        read = partial(resize, size=encoder.read_size)
        visits = _Rows(rows, start, steps, share)
        with stream(data, read, count, rows=visits, workers=encoder.workers) as parts:
            for step in range(start, steps):
                features = []
                for offset, part in zip(range(rank_rows.start, rank_rows.stop, count), parts, strict=False):
                    features.append(encoder.encode(cut(part.images, step, offset) if encoder.views else part.images))
                token_rows = texts.of(torch.tensor(rows(step)), draws(batch_size, seed, CAPTION, step)[rank_rows])
                yield {"image": torch.cat(features), "tokens": to_device(token_rows, world.device)}

    return batches


def _share(batch_size: int, world: World) -> slice:
    rows = world.rows(batch_size)
    return slice(rows.start, rows.stop)
