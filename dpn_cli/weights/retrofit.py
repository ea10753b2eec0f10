"""A plain ViT's stem turned into one with norms that gives nearly the same tokens: a start for training.

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
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.arch import Stem
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.weights.backbone import Backbone, export_backbone, load_with_head
from dpn_cli.weights.convert import origin_metadata
from dpn_cli.weights.formats import Checkpoint
from dpn_cli.weights.load_report import LoadReport

Batches = Callable[[], Iterator[Tensor]]
# Of this many images each, one is held out from the fit to measure what survives.
HELD_OUT = 4
# The stems whose norms have scales.
FITTED: tuple[Stem, ...] = ("pre", "post", "post_posemb", "dpn", "rms")


@dataclass(frozen=True)
class FittedStem:
    """Statistics that a stem was fitted on: mean contrast and brightness of the patches, and their number.

    `survives` and `copied` are shares of the variance of held-out tokens that the fitted stem, and one with norms of
    scale 1 and bias 0, give back; negative is worse than their mean.
    """

    patches: int
    contrast: float
    brightness: float
    survives: float
    copied: float


def retrofit(
    source: Checkpoint,
    target: Path,
    images: Batches,
    *,
    stem: Stem = "dpn",
    image_size: int | tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Write a plain ViT with another stem fitted on `images`; returns what was fitted and what survives.

    `images` yields batches (b, 3, h, w) of uint8 pixels at the image size, and can be started again. Raises
    `DpnError` when the network already has a norm in its stem and for a stem that has no scales to fit, `DataError`
    when there are too few images.
    """
    if source.stem != "none":
        raise DpnError(f"{source.source} has stem {source.stem!r}; only a plain stem (none) can be fitted with norms")
    if stem not in FITTED:
        raise DpnError(f"--stem {stem}: has no norms to fit; use {', '.join(FITTED)}")
    plain = load_with_head(source, image_size)
    dual = convert_network(plain, replace(plain.config, stem=stem))
    fit = fit_stem(plain, dual, images)
    survival = {"fitted": fit.survives, "copied": fit.copied}
    digest = export_backbone(dual, target, {"origin": origin_metadata(plain), "retrofit": json.dumps(survival)})
    return {
        "path": str(target),
        "digest": digest,
        "patches": fit.patches,
        "contrast": fit.contrast,
        "brightness": fit.brightness,
        "survives": fit.survives,
        "survives_copied": fit.copied,
    }


def convert_network(model: Backbone, config: ViTConfig, seed: int = 0) -> Backbone:
    """Return a network of another configuration with every tensor of `model` that fits it by name and shape.

    The others are as `DPNViT.initialize` draws them: norms have scale 1 and bias 0. The report lists both.
    """
    report = LoadReport(model.report.source, model.report.format, model.report.digest, network=str(config))
    other = Backbone(config, model.mean, model.std, report)
    other.initialize(seed)
    other_state, state = other.state_dict(), model.state_dict()
    copied = {
        name: value for name, value in state.items() if name in other_state and other_state[name].shape == value.shape
    }
    other.load_state_dict({**other_state, **copied})
    report.new += [name for name in other_state if name not in copied]
    report.dropped += [name for name in state if name not in copied]
    report.parameters = sum(parameter.numel() for parameter in other.parameters())
    other.eval()
    return other


@torch.no_grad()
def fit_stem(plain: Backbone, other: Backbone, images: Batches) -> FittedStem:
    """Set scales and biases in the stem of `other` so that its tokens come near those of `plain`, whose W and b it has.

    The first norm is given the mean contrast and brightness of the patches, the last one is fitted by least squares,
    channel by channel (arXiv 2302.01327 names no such start; it is ours). Norms without scale stay as they are, and so
    does a stem that is a scale and a bias alone, which equals the plain one as it is. Raises `DataError` when there
    are too few images.
    """
    copied = _explained_variance(plain, other, images)
    contrast, brightness, rms, patches = _moments(plain, images)
    first = other.patch_embed.norm_in
    if isinstance(first, nn.LayerNorm) and first.elementwise_affine:
        nn.init.constant_(first.weight, contrast)
        nn.init.constant_(first.bias, brightness)
    elif isinstance(first, nn.RMSNorm):
        nn.init.constant_(first.weight, rms)
    last = other.norm_posemb if _norm_of_positions(other) else other.patch_embed.norm
    if isinstance(last, nn.RMSNorm) or (isinstance(last, nn.LayerNorm) and last.elementwise_affine):
        _least_squares(plain, other, last, images)
    return FittedStem(patches, contrast, brightness, _explained_variance(plain, other, images), copied)


def _norm_of_positions(model: Backbone) -> bool:
    return not isinstance(model.norm_posemb, nn.Identity)


def _tokens(model: Backbone, pixels: Tensor, *, with_positions: bool) -> Tensor:
    """Return what the stem makes of uint8 pixels (b, 3, h, w): tokens (b * n, d) in float64."""
    tokens = model.patch_embed(model.normalize(pixels))
    if with_positions:
        tokens = model.norm_posemb(tokens + model.pos_embed)
    flat: Tensor = tokens.flatten(0, 1).double()
    return flat


def _split(images: Batches, held_out: bool) -> Iterator[Tensor]:
    """Yield the images of one side: every fourth is held out."""
    count = 0
    for batch in images():
        index = torch.arange(count, count + len(batch))
        count += len(batch)
        chosen = batch[(index % HELD_OUT == HELD_OUT - 1) == held_out]
        if len(chosen):
            yield chosen


def _moments(model: Backbone, images: Batches) -> tuple[float, float, float, int]:
    """Return the means over patches of their contrast (standard deviation), brightness (mean) and root mean square.

    The last value is the number of patches.
    """
    contrast = brightness = rms = 0.0
    count = 0
    rows, columns = model.config.patch
    for pixels in _split(images, held_out=False):
        image = model.normalize(pixels)
        patches = rearrange(image, "b c (h p) (w q) -> (b h w) (p q c)", p=rows, q=columns)
        contrast += float((patches.var(-1, correction=0) + model.config.eps).sqrt().double().sum())
        brightness += float(patches.mean(-1).double().sum())
        rms += float((patches.square().mean(-1) + model.config.eps).sqrt().double().sum())
        count += len(patches)
    if count < 2:
        raise DataError(f"{count} patches to fit the stem on; pass more images (--data)")
    return contrast / count, brightness / count, rms / count, count


def _least_squares(plain: Backbone, other: Backbone, norm: nn.LayerNorm | nn.RMSNorm, images: Batches) -> None:
    """Fit scale and bias of the stem's last norm to the plain tokens t: t = scale * v + bias for each channel.

    A norm without bias is fitted with t = scale * v.
    """
    with_positions = _norm_of_positions(other)
    nn.init.ones_(norm.weight)
    bias = getattr(norm, "bias", None)
    if bias is not None:
        nn.init.zeros_(bias)
    sums: dict[str, Tensor] = {}
    count = 0
    for pixels in _split(images, held_out=False):
        t, v = (_tokens(model, pixels, with_positions=with_positions) for model in (plain, other))
        count += len(t)
        for name, value in (("t", t), ("v", v), ("tv", t * v), ("vv", v * v)):
            sums[name] = sums.get(name, 0) + value.sum(0)
    mean = {name: value / count for name, value in sums.items()}
    centre = mean["v"] if bias is not None else torch.zeros_like(mean["v"])
    variance = mean["vv"] - centre**2
    covariance = mean["tv"] - mean["t"] * centre
    # A channel that does not vary keeps the scale 1, which its bias makes up for.
    scale = torch.where(variance > 1e-12, covariance / variance.clamp(min=1e-12), torch.ones_like(variance))
    norm.weight.copy_(scale)
    if bias is not None:
        bias.copy_(mean["t"] - scale * mean["v"])


def _explained_variance(plain: Backbone, other: Backbone, images: Batches) -> float:
    """Return 1 - E|other - plain|^2 / E|plain - mean|^2 over the tokens of the held-out images."""
    with_positions = _norm_of_positions(other)
    count, squared_error, total, squares = 0, 0.0, torch.zeros(plain.embed_dim, dtype=torch.float64), 0.0
    for pixels in _split(images, held_out=True):
        tokens, other_tokens = (_tokens(model, pixels, with_positions=with_positions) for model in (plain, other))
        count += len(tokens)
        squared_error += float(((other_tokens - tokens) ** 2).sum())
        squares += float((tokens**2).sum())
        total += tokens.sum(0)
    if count == 0:
        raise DataError(
            f"fewer than {HELD_OUT} images to fit a stem on: none is left to measure what survives; pass more (--data)"
        )
    return 1 - squared_error / (squares - float((total**2).sum()) / count)
