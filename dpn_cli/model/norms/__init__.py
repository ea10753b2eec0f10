"""Norms inside the blocks of a ViT, one line each in a table.

Axes: b batch, t tokens, c features.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpn_cli.arch import Norm
from dpn_cli.model.norms.base import NormOptions as NormOptions
from dpn_cli.model.norms.base import RunningNorm as RunningNorm
from dpn_cli.model.norms.base import TokenNorm, check_heads, moments, standardize
from dpn_cli.model.norms.base import Tokens as Tokens
from dpn_cli.model.norms.dtn import DynamicTokenNorm
from dpn_cli.model.norms.power import PowerNorm, UnifiedNorm
from dpn_cli.model.norms.running import BatchNorm, PRepBN, SwitchableNorm


class InstanceNorm(TokenNorm):
    """Instance norm: per image and feature over the tokens. The variance is biased unless `in_unbiased`."""

    def __init__(self, features: int, eps: float, options: NormOptions) -> None:
        super().__init__(features, eps)
        self.unbiased = options.in_unbiased

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        ((mean, variance),) = moments(x, 1)
        if self.unbiased:
            variance = variance * (x.shape[1] / (x.shape[1] - 1))
        return standardize(x, mean, variance, self.weight, self.bias, self.eps)


class GroupNorm(TokenNorm):
    """Group norm: per image and head over the tokens and the head's features; torch.nn.GroupNorm on (b, c, t).

    Raises `DpnError` when the heads do not divide the features.
    """

    def __init__(self, features: int, eps: float, tokens: Tokens) -> None:
        super().__init__(features, eps)
        check_heads("gn", features, tokens.heads)
        self.groups = tokens.heads

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        groups = x.reshape(*x.shape[:2], self.groups, -1)
        mean, variance = (
            moment.expand(-1, -1, -1, groups.shape[-1]).flatten(2) for moment in moments(groups, (1, 3))[0]
        )
        return standardize(x, mean, variance, self.weight, self.bias, self.eps)


class ScaleNorm(TokenNorm):
    """ScaleNorm (arXiv 1910.05895): ``g * x / max(|x|, eps)`` over the features, with one scalar g, sqrt(c) at first.

    The code behind DTN's table has a g per feature, which is RMSNorm with another place for eps.
    """

    def __init__(self, features: int, eps: float) -> None:
        super().__init__(features, eps, affine=False)
        self.weight = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """Set g to the root of the number of features."""
        nn.init.constant_(self.weight, math.sqrt(self.features))

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        return self.weight * F.normalize(x, dim=-1, eps=self.eps)


_NORMS: dict[Norm, Callable[[int, float, Tokens, NormOptions], nn.Module]] = {
    "ln": lambda features, eps, tokens, options: nn.LayerNorm(features, eps=eps),
    "bn": lambda features, eps, tokens, options: BatchNorm(features, eps),
    "in": lambda features, eps, tokens, options: InstanceNorm(features, eps, options),
    "gn": lambda features, eps, tokens, options: GroupNorm(features, eps, tokens),
    "sn": lambda features, eps, tokens, options: SwitchableNorm(features, eps),
    "scalenorm": lambda features, eps, tokens, options: ScaleNorm(features, eps),
    "powernorm": lambda features, eps, tokens, options: PowerNorm(features, eps, tokens, options),
    "un": lambda features, eps, tokens, options: UnifiedNorm(features, eps, options),
    "prepbn": lambda features, eps, tokens, options: PRepBN(features, eps, options),
    "rms": lambda features, eps, tokens, options: nn.RMSNorm(features, eps=eps),
    "dtn": lambda features, eps, tokens, options: DynamicTokenNorm(features, eps, tokens, options),
    "none": lambda features, eps, tokens, options: nn.Identity(),
}


def token_norm(
    name: Norm, features: int, *, eps: float, tokens: Tokens | None = None, options: NormOptions | None = None
) -> nn.Module:
    """Build a norm of tokens (b, t, features).

    Raises `DpnError` when `name` cannot normalise such `tokens`: dtn without a grid, or dtn, gn or powernorm with
    group_scale with heads that do not divide the features.
    """
    norm = _NORMS[name](features, eps, tokens or Tokens(), options or NormOptions())
    if isinstance(norm, TokenNorm):
        norm.reset_parameters()
    return norm


def has_running_norms(model: nn.Module) -> bool:
    """Return whether a norm of `model` takes its statistics over all rows of a forward pass."""
    return any(isinstance(module, RunningNorm) for module in model.modules())


class GradualNorm(nn.Module):
    """A norm that is blended into a trained network: ``(1 - progress) * x + progress * norm(x)``.

    `progress` rises from 0 at the start of the training, where the network is unchanged, to 1 after the fraction
    `share` of the training (`set_progress`).
    """

    progress: Tensor
    start_progress = 0.0

    def __init__(self, norm: nn.Module, share: float) -> None:
        super().__init__()
        self.norm, self.share = norm, share
        self.register_buffer("progress", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Blend x (..., c) with the normalised x by the progress of the training."""
        return torch.lerp(x, self.norm(x), self.progress)


def set_progress(model: nn.Module, share: float) -> None:
    """Set the finished fraction of the training, from 0 to 1, in the norms of `model` that depend on it."""
    for module in model.modules():
        if isinstance(module, PRepBN | GradualNorm):
            module.progress.fill_(module.start_progress + (1 - module.start_progress) * min(1.0, share / module.share))


def set_start_progress(model: nn.Module) -> None:
    """Start the next training of `model` from the progress that its weights were loaded with."""
    for module in model.modules():
        if isinstance(module, PRepBN):
            module.start_progress = float(module.progress)
