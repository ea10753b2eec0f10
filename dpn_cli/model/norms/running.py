"""Norms of tokens with batch norm's running statistics: BN, SN, and PRepBN.

Axes: b batch, t tokens, c features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpn_cli.model.norms.base import NormOptions, RunningNorm, moments, moments_over_ranks, standardize

MOMENTUM = 0.1  # torch.nn.BatchNorm1d's: the weight of the batch in the running statistics


class BatchNorm(RunningNorm):
    """Batch norm per feature over batch and tokens: torch.nn.BatchNorm1d on (b * t, c).

    ``running_var`` averages the unbiased variance of the batch, the output has the biased one, as in torch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float) -> None:
        super().__init__(features, eps)
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))

    def reset_parameters(self) -> None:
        """Set scale and running variance to one, shift and running mean to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def running_scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) in evaluation, computed in `dtype`."""
        scale = self.weight.to(dtype) * torch.rsqrt(self.running_var.to(dtype) + self.eps)
        return scale, self.bias.to(dtype) - self.running_mean.to(dtype) * scale

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        return self.normalize_by_batch(x, self.weight, self.bias) if self.training else self.normalize_by_running(x)

    def normalize_by_batch(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise with the statistics of the batch, and update the running ones."""
        if not dist.is_initialized():
            rows = x.flatten(0, 1)
            running = self.running_mean, self.running_var
            return F.batch_norm(rows, *running, weight, bias, True, MOMENTUM, self.eps).view_as(x)
        local = x.mean((0, 1))
        mean, variance = moments_over_ranks(local, (x - local).square().mean((0, 1)))
        with torch.no_grad():
            total_rows = x.shape[0] * x.shape[1] * dist.get_world_size()
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(variance * (total_rows / (total_rows - 1)), MOMENTUM)
        return standardize(x, mean, variance, weight, bias, self.eps)


class PRepBN(BatchNorm):
    """Progressive re-parameterised batch norm (SLAB, arXiv 2405.11582).

    In training ``lambda * LN(x) + (1 - lambda) * RepBN(x)`` with ``RepBN(x) = BN(x) + eta * x``, where lambda falls
    from one to zero as `progress` rises (`model.norms.set_progress`): from 0 at the start of the training to 1 after
    the fraction `NormOptions.prepbn_share` of it. Evaluation uses RepBN alone, at any progress. `weight` and `bias` are
    batch norm's; `eta` starts at one. A training that starts from other weights continues from their `progress`, saved
    as `start_progress`.
    """

    progress: Tensor
    start_progress = 0.0

    def __init__(self, features: int, eps: float, options: NormOptions) -> None:
        super().__init__(features, eps)
        self.share = options.prepbn_share
        self.ln = nn.LayerNorm(features, eps=eps)
        self.eta = nn.Parameter(torch.empty(1))
        self.register_buffer("progress", torch.empty(()))

    def reset_parameters(self) -> None:
        """Set scales, eta and running variance to one, shifts, running mean and progress to zero."""
        super().reset_parameters()
        self.ln.reset_parameters()
        nn.init.ones_(self.eta)
        nn.init.zeros_(self.progress)

    def running_scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) of RepBN in evaluation, computed in `dtype`."""
        scale, shift = super().running_scale_shift(dtype)
        return scale + self.eta.to(dtype), shift

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        if not self.training:
            return self.normalize_by_running(x)
        bn_weight, ln_weight = self.progress, 1 - self.progress  # they scale parameters, which are smaller than tokens
        ln = F.layer_norm(x, (self.features,), self.ln.weight * ln_weight, self.ln.bias * ln_weight, self.eps)
        return ln.add_(self.normalize_by_batch(x, self.weight * bn_weight, self.bias * bn_weight)).addcmul_(
            x, self.eta * bn_weight
        )


class _Mixture(torch.autograd.Function):
    """``weight * (x - mean) / sqrt(variance) + bias`` of x (b, t, c), with mean and variance as sums of two terms.

    One term is per feature (b, 1, c), the other per token (b, t, 1). The backward pass recomputes values of the size of
    x, which on a CPU takes less time than saving them.
    """

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        mean_feature: Tensor,
        mean_token: Tensor,
        var_feature: Tensor,
        var_token: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        context.save_for_backward(x, mean_feature, mean_token, var_feature, var_token, weight)
        y = (x - mean_feature).sub_(mean_token).mul_((var_feature + var_token).rsqrt_())
        return torch.addcmul(bias, y, weight)  # not in place: see norm_dtn

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, mean_feature, mean_token, var_feature, var_token, weight = context.saved_tensors
        root = (var_feature + var_token).rsqrt_()
        scratch = (x - mean_feature).sub_(mean_token).mul_(root).mul_(gradient)
        grad_weight = scratch.sum((0, 1))
        scratch.mul_(root).mul_(root)
        grad_variances = scratch.sum(1, True) * weight / -2, (scratch @ weight)[..., None] / -2
        scratch = root.mul_(gradient)
        grad_means = -scratch.sum(1, True) * weight, -(scratch @ weight)[..., None]
        return scratch.mul_(weight), *grad_means, *grad_variances, grad_weight, gradient.sum((0, 1))


class SwitchableNorm(BatchNorm):
    """Switchable norm (arXiv 1806.10779): mean and variance are mixtures of those of IN, LN and BN.

    ``mean_weight`` and ``var_weight`` are the logits (3) of two softmaxes over (IN, LN, BN), equal at the start. All
    variances are biased, the running one too. In evaluation the input still decides, through IN and LN.
    """

    def __init__(self, features: int, eps: float) -> None:
        super().__init__(features, eps)
        self.mean_weight = nn.Parameter(torch.empty(3))
        self.var_weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        """Set scale, logits and running variance to one, shift and running mean to zero."""
        super().reset_parameters()
        nn.init.ones_(self.mean_weight)
        nn.init.ones_(self.var_weight)

    def affine(self) -> None:
        """Return None: scale and shift depend on the input."""
        return

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        (mean_in, var_in), (mean_ln, var_ln) = moments(x, 1, 2)
        if self.training:
            local = mean_in.mean((0, 1))
            # A feature varies within the images, and from image to image.
            mean_bn, var_bn = moments_over_ranks(local, (var_in + (mean_in - local).square()).mean((0, 1)))
            with torch.no_grad():
                self.running_mean.lerp_(mean_bn, MOMENTUM)
                self.running_var.lerp_(var_bn, MOMENTUM)
        else:
            mean_bn, var_bn = self.running_mean, self.running_var
        means, variances = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mixed_means = means[0] * mean_in + means[2] * mean_bn, means[1] * mean_ln
        mixed_variances = variances[0] * var_in + variances[2] * var_bn + self.eps, variances[1] * var_ln
        y: Tensor = _Mixture.apply(x, *mixed_means, *mixed_variances, self.weight, self.bias)
        return y
