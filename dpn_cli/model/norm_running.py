"""Norms of tokens with batch norm's running statistics: BN, SN, and PRepBN.

Axes: b batch, t tokens, c features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dpn_cli.model.norm_base import RunningNorm, moments, moments_over_ranks, standardised

MOMENTUM = 0.1  # torch.nn.BatchNorm1d's: the share of the batch in the running statistics


class BatchNorm(RunningNorm):
    """Batch norm per feature over batch and tokens: torch.nn.BatchNorm1d on (b * t, c).

    ``running_var`` takes the unbiased variance of the batch, the output the biased one, as torch has it.
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

    def scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) in evaluation, computed in `dtype`."""
        scale = self.weight.to(dtype) * torch.rsqrt(self.running_var.to(dtype) + self.eps)
        return scale, self.bias.to(dtype) - self.running_mean.to(dtype) * scale

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        return self.by_batch(x) if self.training else self.evaluated(x)

    def by_batch(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of the batch, and update the running ones."""
        if not dist.is_initialized():
            rows = x.flatten(0, 1)
            running = self.running_mean, self.running_var
            return F.batch_norm(rows, *running, self.weight, self.bias, True, MOMENTUM, self.eps).view_as(x)
        local = x.mean((0, 1))
        mean, variance = moments_over_ranks(local, (x - local).square().mean((0, 1)))
        with torch.no_grad():
            rows_of_all = x.shape[0] * x.shape[1] * dist.get_world_size()
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(variance * (rows_of_all / (rows_of_all - 1)), MOMENTUM)
        return self.scaled((x - mean) * torch.rsqrt(variance + self.eps))


class PRepBN(BatchNorm):
    """Progressive re-parameterised batch norm (SLAB, arXiv 2405.11582).

    In training ``lambda * LN(x) + (1 - lambda) * RepBN(x)`` with ``RepBN(x) = BN(x) + eta * x``, where lambda falls
    from one to zero as `progress`, the share of the training that is done, rises (`model.norms.set_progress`). In
    evaluation RepBN alone, however far the training is. `weight` and `bias` are batch norm's; `eta` starts at one.
    """

    progress: Tensor

    def __init__(self, features: int, eps: float) -> None:
        super().__init__(features, eps)
        self.ln = nn.LayerNorm(features, eps=eps)
        self.eta = nn.Parameter(torch.empty(1))
        self.register_buffer("progress", torch.empty(()))

    def reset_parameters(self) -> None:
        """Set scales, eta and running variance to one, shifts, running mean and progress to zero."""
        super().reset_parameters()
        self.ln.reset_parameters()
        nn.init.ones_(self.eta)
        nn.init.zeros_(self.progress)

    def scale_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scale and shift (c) of RepBN in evaluation, computed in `dtype`."""
        scale, shift = super().scale_shift(dtype)
        return scale + self.eta.to(dtype), shift

    def by_batch(self, x: Tensor) -> Tensor:
        """Mix LN with RepBN of the batch's statistics."""
        rep = super().by_batch(x) + self.eta * x
        return torch.lerp(self.ln(x), rep, self.progress)


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
        """Return None: the input decides."""
        return

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise tokens (b, t, c) of full precision."""
        (mean_in, var_in), (mean_ln, var_ln) = moments(x, 1), moments(x, 2)
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
        mean = (means[0] * mean_in + means[2] * mean_bn) + means[1] * mean_ln
        variance = (variances[0] * var_in + variances[2] * var_bn) + variances[1] * var_ln
        return self.scaled(standardised(x, mean, variance, self.eps))
