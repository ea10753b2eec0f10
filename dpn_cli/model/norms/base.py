"""Base of all token norms: options, precision, and statistics over ranks.

Axes: b batch, t tokens, c features, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpn_cli.config.network import NormOptions as NormOptions
from dpn_cli.errors import DpnError
from dpn_cli.run.distributed import gather

NO_EPS = 1e-12  # only keeps the root of a variance of zero finite


@dataclass(frozen=True)
class Tokens:
    """Properties of the tokens that a norm may need besides their width."""

    heads: int = 1  # of the attention: the groups of gn, of dtn, and of powernorm with group_scale
    grid: tuple[int, int] | None = None  # rows and columns; None where a class token is among them


class TokenNorm(nn.Module):
    """A norm of tokens (b, t, c), computed in float32 whatever the autocast precision; in float64 of float64.

    The result has the type of the input. Weights and buffers are uninitialised until `reset_parameters` or a checkpoint
    fills them; `weight` and `bias` (c) start at one and zero.
    """

    def __init__(self, features: int, eps: float, *, affine: bool = True) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        if affine:
            self.weight = nn.Parameter(torch.empty(features))
            self.bias = nn.Parameter(torch.empty(features))

    def reset_parameters(self) -> None:
        """Set parameters and buffers to their start."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c)."""
        with torch.autocast(x.device.type, enabled=False):
            y = self.normalize(x.to(torch.promote_types(x.dtype, torch.float32)))
        return y.to(x.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        raise NotImplementedError

    def scaled(self, x: Tensor) -> Tensor:
        """Return ``weight * x + bias``."""
        return (x * self.weight).add_(self.bias)  # the gradient of addcmul takes twice as long

    def extra_repr(self) -> str:
        """Describe the norm as torch's do."""
        return f"{self.features}, eps={self.eps}"


class RunningNorm(TokenNorm):
    """A norm whose statistics over the batch are running ones in evaluation: buffers, which training updates.

    The batch is that of one forward pass: with micro-batches, a micro-batch. Over ranks it is all of theirs, of which
    each has equally many, so that they train as one process with the whole batch does. A `frozen` norm keeps its
    running statistics and uses them in training, too.
    """

    frozen = False

    def freeze(self, frozen: bool) -> None:
        """Keep the running statistics from now on, or no longer."""
        self.frozen = frozen
        self.train(self.training)

    def train(self, mode: bool = True) -> RunningNorm:
        """Set the mode, which for a frozen norm is evaluation always."""
        return super().train(mode and not self.frozen)

    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Return the scale and shift (c), float64, that the norm is in evaluation; None if the input decides too."""
        return self.scale_shift(torch.float64)

    def scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) in evaluation, computed in `dtype`."""
        raise NotImplementedError

    def evaluated(self, x: Tensor) -> Tensor:
        """Normalise with the running statistics."""
        scale, shift = self.scale_shift(x.dtype)
        return torch.addcmul(shift, x, scale)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, *axes: int | tuple[int, ...]) -> tuple[Tensor, ...]:
        means, variances = zip(*(_mean_and_variance(x, of_one) for of_one in axes), strict=True)
        context.save_for_backward(x, *means)
        return *means, *variances

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *means = context.saved_tensors
        of_means, of_variances = gradients[: len(means)], gradients[len(means) :]
        shares = [mean.numel() / x.numel() for mean in means]
        slopes = [of_variance * (2 * share) for of_variance, share in zip(of_variances, shares, strict=True)]
        of_x = x * sum(slopes)
        for mean, of_mean, slope, share in zip(means, of_means, slopes, shares, strict=True):
            of_x.add_(of_mean * share - slope * mean)
        return of_x, *(None for _ in means)


def _mean_and_variance(x: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if axes == x.ndim - 1:  # LN's in one pass, of which this takes what LN keeps for its gradient
        _, mean, root = torch.native_layer_norm(x, x.shape[-1:], None, None, NO_EPS)
        return mean, root.pow(-2) - NO_EPS
    mean = x.mean(axes, keepdim=True)
    return mean, (x - mean).square_().mean(axes, keepdim=True)


def moments(x: Tensor, *axes: int | tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return mean and biased variance of `x` over each of `axes`, which stay with length one.

    Each is ``torch.var_mean``, which takes ten times as long on a CPU.
    """
    parts = _Moments.apply(x, *axes)
    return list(zip(parts[: len(axes)], parts[len(axes) :], strict=True))


def standardised(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``weight * (x - mean) / sqrt(variance + eps) + bias`` for statistics that tokens share, ([b,] 1, c)."""
    scale = weight * torch.rsqrt(variance + eps)
    return (x * scale).add_(bias - mean * scale)


def moments_over_ranks(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (c) over all ranks' rows from those of this rank's, with gradients."""
    if not dist.is_initialized():
        return mean, variance
    ranks = gather(torch.stack([mean, variance])[None])
    means, variances = ranks.unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)


def check_heads(norm: str, features: int, heads: int) -> None:
    """Raise `DpnError` unless the heads divide the features."""
    if features % heads:
        raise DpnError(f"--norm {norm}: {heads} heads do not divide the {features} features; choose another --arch")


def head_rms(x: Tensor, heads: int, eps: float) -> Tensor:
    """Divide every head of tokens (b, t, c) by the root of its mean square."""
    y = x.reshape(*x.shape[:2], heads, -1)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(-2)
