"""The towers at work on whole data sets: features of all images, from the cache where there is one, and recalls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.config.paths import home
from dpn_cli.config.schema import Runtime
from dpn_cli.data.resize import resize
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast, precision_of
from dpn_cli.weights.backbone import Backbone
from tasks.lit.cache import BATCH, cached_features
from tasks.lit.captions import CaptionedImages
from tasks.lit.features import ImageEncoder, digest_of, encode_function
from tasks.lit.page_samples import save_pairs
from tasks.lit.retrieval import chance, recalls
from tasks.lit.towers import Towers


def cache_root(folder: str | None) -> Path:
    """Return the folder of all caches: `folder`, or $DPN_HOME/cache/lit."""
    return Path(folder).expanduser() if folder else home() / "cache" / "lit"


def image_encoder(
    tower: Backbone,
    runtime: Runtime,
    world: World,
    *,
    views: int = 0,
    seed: int = 0,
    skip_bad: bool = False,
    batch_size: int | None = None,
) -> ImageEncoder:
    """Return how images are encoded, with all that it depends on."""
    facts = {
        "weights": digest_of(tower),
        "network": repr(tower.config),  # stems, activations, heads: two networks may have the same tensors
        "mean": list(tower.mean),
        "std": list(tower.std),
        "resize": "bilinear, no antialias",
        "precision": f"{precision_of(runtime, world.device, tower)} on {world.device.type}",
    }
    encode = encode_function(tower, world.device, autocast(runtime, world.device, tower))
    size, workers = tower.config.image_size, runtime.workers
    return ImageEncoder(encode, tower.embed_dim, size, facts, views, seed, workers, skip_bad, batch_size)


def encode_all(
    data: CaptionedImages, encoder: ImageEncoder, root: Path | None, world: World, console: Console
) -> tuple[Tensor, list[int]]:
    """Return the features (n, d) of all readable images in float32, and which images they are.

    Without `root` nothing is kept. Raises as `cached_features` does.
    """
    all_rows = list(range(len(data.captions)))
    if root is None:
        parts = []
        chunk_size = encoder.batch_size or BATCH
        for start in range(0, len(all_rows), chunk_size):
            rows = all_rows[start : start + chunk_size]
            parts.append(encoder.encode(torch.stack([resize(data.pixels(row), encoder.size) for row in rows])).cpu())
        return torch.cat(parts), all_rows
    features = cached_features(data, encoder, root, world, console)
    unreadable = set(features.bad)
    readable = [row for row in all_rows if row not in unreadable]
    return features.rows(torch.tensor(readable)).float(), readable


def retrieval_scores(
    towers: Towers,
    data: CaptionedImages,
    encoder: ImageEncoder,
    root: Path | None,
    runtime: Runtime,
    world: World,
    console: Console,
    features_folder: Path | None = None,
) -> dict[str, Any]:
    """Return recalls on captioned images, both ways, next to what chance would give.

    The leading rank writes what a page shows of them to the folder `keep`.
    """
    images, readable = encode_all(data, encoder, root, world, console)
    owner = torch.tensor([index for index, row in enumerate(readable) for _ in data.captions[row]])
    with autocast(runtime, world.device, towers.text):
        texts = towers.encode_texts([text for row in readable for text in data.captions[row]])
    scores = recalls(images.to(world.device), texts, owner.to(world.device))
    if features_folder and world.leads:
        save_pairs(features_folder, data, readable, images, texts.float().cpu(), owner)
    counts = {"images": len(readable), "captions": len(owner), "unreadable": len(data.captions) - len(readable)}
    return {**scores, "chance@5": chance(len(readable), 5), **counts}


def describe_retrieval(scores: dict[str, Any]) -> str:
    """Return recalls as text."""
    ways = {"image_to_text": "image to text", "text_to_image": "text to image"}
    unreadable = f", {scores['unreadable']} unreadable ones left out" if scores["unreadable"] else ""
    lines = [
        f"retrieval on {count_noun(scores['images'], 'image')} with {count_noun(scores['captions'], 'caption')} "
        f"(chance R@5 {scores['chance@5']:.2f} %{unreadable})"
    ]
    for direction, name in ways.items():
        lines.append(f"  {name}: " + ", ".join(f"R@{k} {scores[f'{direction}@{k}']:.2f} %" for k in (1, 5, 10)))
    return "\n".join(lines)
