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
    """Shape of the tokens of a norm, without their width."""

    heads: int = 1  # of the attention: the groups of gn, of dtn, and of powernorm with group_scale
    grid: tuple[int, int] | None = None  # rows and columns; None with a class token


class TokenNorm(nn.Module):
    """A norm of tokens (b, t, c), computed in float32 at any autocast precision; in float64 for float64 input.

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
        """Set parameters and buffers to their initial values."""
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

    def scale_and_shift(self, x: Tensor) -> Tensor:
        """Return ``weight * x + bias``."""
        return (x * self.weight).add_(self.bias)  # the gradient of addcmul takes twice as long

    def extra_repr(self) -> str:
        """Describe the norm as torch's do."""
        return f"{self.features}, eps={self.eps}"


class RunningNorm(TokenNorm):
    """A norm with batch statistics in training and running statistics, which are buffers, in evaluation.

    The batch is that of one forward pass: with micro-batches, a micro-batch. It includes the rows of all ranks, which
    have equally many, so several ranks train as one process with the full batch does. A `frozen` norm does not update
    its running statistics and uses them in training, too.
    """

    frozen = False

    def freeze(self, frozen: bool) -> None:
        """Freeze or unfreeze the running statistics."""
        self.frozen = frozen
        self.train(self.training)

    def train(self, mode: bool = True) -> RunningNorm:
        """Set the mode; a frozen norm stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Return the scale and shift (c) of evaluation in float64; None if they depend on the input."""
        return self.running_scale_shift(torch.float64)

    def running_scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) in evaluation, computed in `dtype`."""
        raise NotImplementedError

    def normalize_by_running(self, x: Tensor) -> Tensor:
        """Normalise with the running statistics."""
        scale, shift = self.running_scale_shift(x.dtype)
        return torch.addcmul(shift, x, scale)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, *axes: int | tuple[int, ...]) -> tuple[Tensor, ...]:
        means, variances = zip(*(_mean_and_variance(x, axis) for axis in axes), strict=True)
        context.save_for_backward(x, *means)
        return *means, *variances

    @staticmethod
    @once_differentiable
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *means = context.saved_tensors
        grad_means, grad_variances = grads[: len(means)], grads[len(means) :]
        shares = [mean.numel() / x.numel() for mean in means]
        slopes = [grad_variance * (2 * share) for grad_variance, share in zip(grad_variances, shares, strict=True)]
        grad_x = x * sum(slopes)
        for mean, grad_mean, slope, share in zip(means, grad_means, slopes, shares, strict=True):
            grad_x.add_(grad_mean * share - slope * mean)
        return grad_x, *(None for _ in means)


def _mean_and_variance(x: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if axes == x.ndim - 1:  # one pass, with the moments that LN saves for its gradient
        _, mean, root = torch.native_layer_norm(x, x.shape[-1:], None, None, NO_EPS)
        return mean, root.pow(-2) - NO_EPS
    mean = x.mean(axes, keepdim=True)
    return mean, (x - mean).square_().mean(axes, keepdim=True)


def moments(x: Tensor, *axes: int | tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return mean and biased variance of `x` over each of `axes`, which remain with length one.

    Equals ``torch.var_mean``, which takes ten times as long on a CPU.
    """
    outputs = _Moments.apply(x, *axes)
    return list(zip(outputs[: len(axes)], outputs[len(axes) :], strict=True))


def standardize(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``weight * (x - mean) / sqrt(variance + eps) + bias`` for statistics ([b,] 1, c) of all tokens."""
    scale = weight * torch.rsqrt(variance + eps)
    return (x * scale).add_(bias - mean * scale)


def moments_over_ranks(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (c) over all ranks' rows, with gradients, from the values of this rank's rows."""
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
