"""Norms of tokens by a running second moment, with custom gradients: PowerNorm and UN.

Axes: b batch, t tokens, c features, h heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpn_cli.model.norms.base import NormOptions, RunningNorm, Tokens, check_heads, head_rms
from dpn_cli.run.distributed import gather

ALPHA = 0.9  # decay of both papers' running statistics
WINDOW = 4  # M of UN: the steps whose statistics are averaged
GAIN_START = 1000  # steps of UN without gain: the second moment is not stable before


class _Smoothed(torch.autograd.Function):
    """``weight * x * scale + bias``, with a gradient that subtracts a smoothed projection instead of this batch's.

    With z = x * scale, g = gradient * weight * gain, and the mean (c) of g * z over all rows, the gradient of x is
    ``scale * (g - smooth(mean) * z)``. `scale` and `gain` (c) are constants. The mean is over the rows of all ranks;
    each rank's loss is the mean over its rows.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        gain: Tensor,
        smooth: Callable[[Tensor], Tensor],
    ) -> Tensor:
        context.save_for_backward(x, weight, scale, gain)
        context.smooth = smooth
        return torch.addcmul(bias, x, scale * weight)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, gain = context.saved_tensors
        grad_weight = (gradient * x).sum((0, 1)) * (scale * gain)
        ranks = gather((grad_weight * weight / (x.shape[0] * x.shape[1]))[None])
        # A rank's gradients are of the mean over its rows: larger than those of the mean over all by the world size.
        projection = context.smooth(ranks.mean(0) / len(ranks)) * len(ranks)
        grad_x = gradient * (weight * gain * scale) - x * (projection * scale.square())
        return grad_x, grad_weight, gradient.sum((0, 1)), None, None, None


class _Power(RunningNorm):
    """Base of PowerNorm and UN: the running second moment (c), and a count of the training's forward passes.

    torch.compile is off for their training: its backward pass would recompute values of the forward pass from buffers
    that have changed since.
    """

    running_var: Tensor
    steps: Tensor

    def __init__(self, features: int, eps: float, warmup: int) -> None:
        super().__init__(features, eps)
        self.warmup = warmup
        self.register_buffer("running_var", torch.empty(features))
        self.register_buffer("steps", torch.empty(()))

    def reset_parameters(self) -> None:
        """Set scale and running second moment to one, the bias and all other buffers to zero."""
        super().reset_parameters()
        for buffer in self.buffers():
            nn.init.zeros_(buffer)
        nn.init.ones_(self.running_var)

    def running_scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) in evaluation, computed in `dtype`."""
        return self.weight.to(dtype) * torch.rsqrt(self.running_var.to(dtype) + self.eps), self.bias.to(dtype)

    @staticmethod
    def second_moment(x: Tensor) -> Tensor:
        """Return the mean of x^2 over all ranks' rows (c), without gradients."""
        return gather(x.detach().square().mean((0, 1))[None]).mean(0)


class PowerNorm(_Power):
    """PowerNorm (arXiv 2003.07845): divide each feature by the root of a running second moment phi, without centring.

    With z = x / sqrt(phi + eps) and g the gradient of z, the gradient of x is ``(g - nu * z) / sqrt(phi + eps)``, with
    phi and nu from before this step. Then ``nu += 0.1 * (mean(g * z) - nu * mean(z^2))`` and
    ``phi += 0.1 * (mean(x^2) - phi)``. In the first `NormOptions.power_warmup` steps the batch's mean of x^2 replaces
    phi in both passes, as in the released code. With `NormOptions.group_scale` an RMS of every head comes first.
    """

    nu: Tensor

    def __init__(self, features: int, eps: float, tokens: Tokens, options: NormOptions) -> None:
        super().__init__(features, eps, options.power_warmup)
        self.register_buffer("nu", torch.empty(features))
        self.heads = tokens.heads if options.group_scale else 0
        if self.heads:
            check_heads("powernorm", features, self.heads)

    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Return scale and shift (c), float64, in evaluation; None with `group_scale`."""
        return None if self.heads else super().affine()

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        if self.heads:
            x = head_rms(x, self.heads, self.eps)
        return self.normalize_by_smoothed(x) if self.training else self.normalize_by_running(x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def normalize_by_smoothed(self, x: Tensor) -> Tensor:
        """Normalise with the running statistics, and update them here and in the backward pass."""
        with torch.no_grad():
            self.steps += 1
            batch = self.second_moment(x)
            phi = torch.where(self.steps <= self.warmup, batch, self.running_var) + self.eps
            self.running_var.lerp_(batch, 1 - ALPHA)
            unit = batch / phi  # the mean of z^2

        def smooth(mean: Tensor) -> Tensor:
            nu = self.nu.clone()
            self.nu.add_(mean - nu * unit, alpha=1 - ALPHA)
            return nu

        y: Tensor = _Smoothed.apply(x, self.weight, self.bias, torch.rsqrt(phi), torch.ones_like(phi), smooth)
        return y


class UnifiedNorm(_Power):
    """Unified Normalization (arXiv 2208.01313): divide each feature by the root of its smoothed second moment.

    In training, this second moment is the geometric mean of mean(x^2) over the last M = 4 steps. The gradient has an
    exponential average (0.9) of the arithmetic mean over M steps of mean(g * z). In the first `NormOptions.un_warmup`
    steps both are the batch's. After 1000 steps and the warm-up, the gradient is scaled by the root of the ratio of
    that second moment to the running one, within [1/5, 5].

    The outlier filter (`NormOptions.un_filter`) compares, for every feature, the arithmetic and the geometric mean of
    the last M values. If they differ by more than M times the variance of the roots of the recorded values, the step
    uses the batch's statistics and records the running value. Numbers and order are those of the released code.
    """

    squares: Tensor
    projections: Tensor
    running_projection: Tensor

    def __init__(self, features: int, eps: float, options: NormOptions) -> None:
        super().__init__(features, eps, options.un_warmup)
        self.filter = options.un_filter
        self.register_buffer("squares", torch.empty(WINDOW, features))
        self.register_buffer("projections", torch.empty(WINDOW, features))
        self.register_buffer("running_projection", torch.empty(features))

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        return self.normalize_by_smoothed(x) if self.training else self.normalize_by_running(x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def normalize_by_smoothed(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of the last steps, and update them here and in the backward pass."""
        with torch.no_grad():
            self.steps += 1
            slot = (torch.arange(WINDOW, device=x.device) == self.steps % WINDOW)[:, None]
            use_batch, outlier = self.steps < max(self.warmup, WINDOW + 1), self.steps < 0
            batch, root_variance = self.second_moment(x), self.squares.sqrt().var()
            recent = torch.where(slot, batch, self.squares)
            geometric = recent.log().mean(0).exp()
            if self.filter:
                outlier = (self.steps >= self.warmup) & (recent.mean(0) - geometric > WINDOW * root_variance).any()
            self.squares.copy_(torch.where(slot & outlier, self.running_var, recent))
            use_batch = use_batch | outlier
            power = torch.where(use_batch, batch, geometric) + self.eps
            gain = (power / (self.running_var + self.eps)).sqrt().clamp(1 / 5, 5)
            gain = torch.where(outlier | (self.steps <= max(GAIN_START, self.warmup)), 1.0, gain)
            self.running_var.lerp_(power - self.eps, 1 - ALPHA)

        def smooth(mean: Tensor) -> Tensor:
            recorded = torch.where(outlier, self.running_projection, mean)
            self.projections.copy_(torch.where(slot, recorded, self.projections))
            smoothed = torch.where(use_batch, mean, self.projections.mean(0))
            self.running_projection.lerp_(smoothed, 1 - ALPHA)
            return torch.where(outlier, smoothed, self.running_projection)

        y: Tensor = _Smoothed.apply(x, self.weight, self.bias, torch.rsqrt(power), gain, smooth)
        return y
