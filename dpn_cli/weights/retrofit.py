"""A plain ViT's stem turned into a Dual PatchNorm stem that gives nearly the same tokens: a start for training.

A patch p has the mean m and the standard deviation s over its pixel values, and LN(p) = (p - m) / s does not know
them any more; no stem with a norm in front gives the plain stem's token W p + b. The nearest start keeps W and b,
gives every patch the average contrast and brightness (scale = mean of s, bias = mean of m in the first norm), and
fits scale and bias of the second norm to the plain tokens, channel by channel, by least squares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dpn_cli.errors import DataError, DpnError
from dpn_cli.weights.backbone import Backbone, as_checkpoint, export_backbone, load_backbone, load_whole
from dpn_cli.weights.convert import origin
from dpn_cli.weights.formats import Checkpoint

Batches = Callable[[], Iterator[Tensor]]
# Of this many images each, one is held out from the fit to measure what survives.
HELD_OUT = 4


@dataclass(frozen=True)
class Survival:
    """Shares of the variance of held-out tokens that a stem gives back; negative is worse than their mean."""

    fitted: float
    copied: float  # both norms with scale 1 and bias 0 around the same projection


def retrofit(
    source: Checkpoint, target: Path, images: Batches, *, image_size: int | tuple[int, int] | None = None
) -> dict[str, Any]:
    """Write a plain ViT with a DPN stem fitted on `images`; returns what was fitted and what survives.

    `images` yields batches (b, 3, h, w) of uint8 pixels at the image size, and can be started again. Raises
    `DpnError` when the network already has a norm in its stem, `DataError` when there are too few images.
    """
    if source.stem != "none":
        raise DpnError(
            f"{source.source} has stem {source.stem!r}; only a plain stem (none) can be turned into a DPN stem"
        )
    plain = load_whole(source, image_size)
    contrast, brightness, patches = _moments(plain, images)
    n = plain.patch_embed.proj.weight[0].numel()
    norm_in = torch.full((n,), contrast), torch.full((n,), brightness)
    norm = _least_squares(plain, images, norm_in)
    fitted = {"norm_in.weight": norm_in[0], "norm_in.bias": norm_in[1], "norm.weight": norm[0], "norm.bias": norm[1]}
    dual = _with_stem(plain, fitted)
    ones = {name: torch.full_like(value, name.endswith("weight")) for name, value in fitted.items()}
    survival = Survival(_survival(plain, dual, images), _survival(plain, _with_stem(plain, ones), images))
    digest = export_backbone(dual, target, {"origin": origin(plain), "retrofit": json.dumps(survival.__dict__)})
    return {
        "path": str(target),
        "digest": digest,
        "patches": patches,
        "contrast": contrast,
        "brightness": brightness,
        "survives": survival.fitted,
        "survives_copied": survival.copied,
    }


def _patches(model: Backbone, pixels: Tensor) -> Tensor:
    """Cut images into flattened patches (n, p*q*c) in the model's input range."""
    rows, columns = model.config.patch
    image = model.normalize(pixels)
    return rearrange(image, "b c (h p) (w q) -> (b h w) (p q c)", p=rows, q=columns)


def _split(images: Batches, held_out: bool) -> Iterator[Tensor]:
    """Yield the images of one side: every fourth is held out."""
    seen = 0
    for batch in images():
        index = torch.arange(seen, seen + len(batch))
        seen += len(batch)
        chosen = batch[(index % HELD_OUT == HELD_OUT - 1) == held_out]
        if len(chosen):
            yield chosen


def _moments(model: Backbone, images: Batches) -> tuple[float, float, int]:
    """Return the mean over patches of their contrast (standard deviation) and brightness (mean), and their number."""
    contrast = brightness = 0.0
    count = 0
    for pixels in _split(images, held_out=False):
        patches = _patches(model, pixels)
        contrast += float((patches.var(-1, correction=0) + model.config.eps).sqrt().double().sum())
        brightness += float(patches.mean(-1).double().sum())
        count += len(patches)
    if count < 2:
        raise DataError(f"{count} patches to fit the stem on; pass more images (--data)")
    return contrast / count, brightness / count, count


@torch.no_grad()
def _least_squares(model: Backbone, images: Batches, norm_in: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Fit scale and bias of the second norm, (d,) each, to the plain tokens t: t = scale * v + bias per channel."""
    sums: dict[str, Tensor] = {}
    count = 0
    for pixels in _split(images, held_out=False):
        tokens, normed = _tokens(model, _patches(model, pixels), norm_in)
        count += len(tokens)
        for name, value in (("t", tokens), ("v", normed), ("tv", tokens * normed), ("vv", normed * normed)):
            sums[name] = sums.get(name, 0) + value.sum(0)
    mean = {name: value / count for name, value in sums.items()}
    variance = mean["vv"] - mean["v"] ** 2
    covariance = mean["tv"] - mean["t"] * mean["v"]
    # A channel that does not vary keeps the scale 1, which its bias makes up for.
    scale = torch.where(variance > 1e-12, covariance / variance.clamp(min=1e-12), torch.ones_like(variance))
    return scale.float(), (mean["t"] - scale * mean["v"]).float()


def _tokens(model: Backbone, patches: Tensor, norm_in: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the plain tokens and the second norm's input after its standardisation, (n, d) each in float64."""
    eps, weight = model.config.eps, rearrange(model.patch_embed.proj.weight, "d c p q -> d (p q c)")
    plain = F.linear(patches, weight, model.patch_embed.proj.bias)
    first = F.layer_norm(patches, patches.shape[-1:], *norm_in, eps)
    projected = F.linear(first, weight, model.patch_embed.proj.bias)
    return plain.double(), F.layer_norm(projected, projected.shape[-1:], eps=eps).double()


def _with_stem(plain: Backbone, norms: dict[str, Tensor]) -> Backbone:
    """Return the network with a DPN stem of the given norms; the rest is shared."""
    config = plain.config
    state = {**plain.state_dict(), **{f"patch_embed.{name}": value for name, value in norms.items()}}
    described = replace(as_checkpoint(plain, state), stem="dpn")
    return load_backbone(
        checkpoint=described,
        image_size=config.image_size,
        num_classes=config.num_classes,
        head="load" if config.num_classes else "new",
    )


@torch.no_grad()
def _survival(plain: Backbone, dual: Backbone, images: Batches) -> float:
    """Return 1 - E|dual - plain|^2 / E|plain - mean|^2 over the tokens of the held-out images."""
    count, wrong, total, squares = 0, 0.0, torch.zeros(plain.embed_dim, dtype=torch.float64), 0.0
    for pixels in _split(images, held_out=True):
        image = plain.normalize(pixels)
        tokens, given = (model.patch_embed(image).flatten(0, 1).double() for model in (plain, dual))
        count += len(tokens)
        wrong += float(((given - tokens) ** 2).sum())
        squares += float((tokens**2).sum())
        total += tokens.sum(0)
    if count == 0:
        raise DataError(f"fewer than {HELD_OUT} images: none is left to measure what survives; pass more (--data)")
    return 1 - wrong / (squares - float((total**2).sum()) / count)
