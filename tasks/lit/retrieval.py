"""Retrieval: which of all sentences is nearest to an image, and which of all images to a sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from dpn_cli.run import signals

KS = (1, 5, 10)
ROWS = 512  # whose similarities to everything exist at one time


def recalls(images: Tensor, texts: Tensor, owner: Tensor) -> dict[str, float]:
    """Return recall@k in percent, both ways, as ``image_to_text@1`` and so on.

    An image is a hit when one of its sentences is among the k nearest, a sentence when its image is. Equal similarities
    are ranked by their order in the data, so that features which are all alike score as chance does.

    Args:
        images: unit features (n, d).
        texts: unit features (m, d).
        owner: which image (m,) each text belongs to; every image has one.
    """
    to_text, to_image = [], []
    for start in range(0, len(images), ROWS):
        signals.check_here()
        rows = torch.arange(start, min(start + ROWS, len(images)), device=images.device)
        is_match = owner[None, :] == rows[:, None]
        to_text.append(_best_ranks(images[rows] @ texts.T, is_match))
    for start in range(0, len(texts), ROWS):
        signals.check_here()
        part = slice(start, start + ROWS)
        is_match = torch.arange(len(images), device=images.device)[None, :] == owner[part, None]
        to_image.append(_best_ranks(texts[part] @ images.T, is_match))
    ways = {"image_to_text": torch.cat(to_text), "text_to_image": torch.cat(to_image)}
    return {
        f"{direction}@{k}": 100 * (ranks < k).double().mean().item() for direction, ranks in ways.items() for k in KS
    }


def _best_ranks(similarity: Tensor, is_match: Tensor) -> Tensor:
    """Return how many columns come before the best of a row's own ones (b,), for similarities (b, n)."""
    best, position = similarity.masked_fill(~is_match, -torch.inf).max(-1, keepdim=True)
    first = (is_match & (similarity == best)).int().argmax(-1, keepdim=True)
    is_earlier = torch.arange(similarity.shape[-1], device=position.device) < first
    # NaN ranks first, so NaN features never score.
    return (~(similarity <= best) | ((similarity == best) & is_earlier)).sum(-1)


def chance(images: int, k: int) -> float:
    """Return recall@k in percent of a blind draw among as many images."""
    return 100 * min(1.0, k / images)
