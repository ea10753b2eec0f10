"""The optimizer step: learning rate, weight decay, clipping and update, as in big_vision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.optim import SGDW
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpn_cli.config.schema import Optim, Schedule
from dpn_cli.engine.fsdp import local
from dpn_cli.model.freeze import POSITIONS, STEM
from dpn_cli.run import distributed

# Weights that big_vision does not call "/kernel", although they have more than one axis.
NO_KERNEL = ("pos_embed", "cls_token", "dist_token", "reg_token", "positional_embedding", "token_embedding.weight")


def lr_factor(schedule: Schedule, step: int) -> float:
    """Return the factor of the peak learning rate in the update of `step`, counted from 0.

    big_vision's create_learning_rate_schedule: linear warm-up times a decay over the steps after it. With
    ``decay_from=0`` the decay covers the warm-up too, which is Scenic's compound schedule. As in timm, the warm-up may
    begin at a share `start` of the peak, and the cosine come down to the share `end`; both are 0 in big_vision.
    """
    start = schedule.warmup if schedule.decay_from is None else schedule.decay_from
    progress = min(max((step - start) / (schedule.steps - start), 0.0), 1.0)
    match schedule.decay:
        case "cosine":
            factor = schedule.end + (1 - schedule.end) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            factor = schedule.end + (1 - schedule.end) * (1 - progress)
        case "polynomial":
            factor = schedule.end + (1 - schedule.end) * (1 - progress) ** schedule.power
        case "rsqrt":
            factor = math.sqrt(schedule.timescale / (schedule.timescale + max(step - start, 0)))
        case "stair":
            factor = next((value for stair_step, value in reversed(schedule.stairs) if step >= stair_step), 1.0)
    if schedule.warmup:
        factor *= min(1.0, schedule.start + (1 - schedule.start) * step / schedule.warmup)
    if schedule.cooldown:
        factor *= min(1.0, (schedule.steps - step) / schedule.cooldown)
    return factor


def is_decayed(name: str, parameter: Tensor, mask: str) -> bool:
    """Return whether weight decay applies to a parameter.

    "kernels" is big_vision's rule, "not_1d" Scenic's; "all" is what torch's optimizers do by themselves.
    """
    if mask == "all":
        return True
    if mask == "not_1d":
        return parameter.ndim != 1
    return parameter.ndim > 1 and not name.endswith(NO_KERNEL)


def layer_of(name: str) -> int | None:
    """Return the layer of a ViT's parameter: 0 before the blocks, i + 1 for block i, None for all after them."""
    if name.startswith((*STEM, *POSITIONS)):
        return 0
    return 1 + int(name.split(".")[1]) if name.startswith("blocks.") else None


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; `lr` is the peak of the schedule.

    Weight decay is decoupled. Its unit is ``lr`` (torch's AdamW: lr x decay is taken off per step) or ``schedule``
    (big_vision: schedule factor x decay, whatever the lr). With ``gradient`` it is not decoupled but a part of the
    gradient, as in torch's Adam and SGD. With ``layer_decay`` the parameters behind the blocks get
    the whole lr and each layer before them that share of the next one's (BEiT, arXiv 2106.08254).
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    decay = optim.weight_decay / lr if optim.decay_unit == "schedule" and lr else optim.weight_decay
    members: dict[tuple[int, bool], list[nn.Parameter]] = {}
    layers = {name: layer_of(name) if optim.layer_decay < 1 else 0 for name, _ in trainable}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    for name, parameter in trainable:
        layer = layers[name]
        key = top if layer is None else layer, is_decayed(name, parameter, optim.decay_mask)
        members.setdefault(key, []).append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": members[layer, decayed],
            "weight_decay": decay if decayed else 0.0,
            "lr_scale": optim.layer_decay ** (top - layer) if optim.layer_decay < 1 else 1.0,
        }
        for layer, decayed in sorted(members, key=lambda key: (-key[0], not key[1]))
    ]
    if optim.state_dtype == "bfloat16":
        return Bfloat16State(groups, lr, optim)
    if optim.name == "adam":
        adam = torch.optim.Adam if optim.decay_unit == "gradient" else torch.optim.AdamW
        return adam(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)
    if decay and optim.decay_unit != "gradient":
        optimizer: torch.optim.Optimizer = SGDW(groups, lr=lr, momentum=optim.momentum)  # torch's SGD couples it
        return optimizer
    # torch has no fused step for gradients in parts.
    fused = not any(isinstance(parameter, DTensor) for _, parameter in trainable)
    return torch.optim.SGD(groups, lr=lr, momentum=optim.momentum, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update in every group, scaled by its layer decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, norms: Tensor | None = None) -> Tensor:
    """Scale all gradients by max_norm / norm where their global norm is above max_norm; returns the norm, a scalar.

    `norms` holds the norm of each gradient (gradients,) where that is known already.

    big_vision divides by the norm itself; torch adds 1e-6 to it first, which is taken off here.
    """
    trainable = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trainable if parameter.grad is not None]
    if norms is None and any(isinstance(gradient, DTensor) for gradient in gradients):
        norms = gradient_norms(gradients)
    norm = nn.utils.get_total_norm(gradients) if norms is None else torch.linalg.vector_norm(norms)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(trainable, max_norm, norm - 1e-6)
    return norm


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each gradient (gradients,), float32: over all ranks where each has a part of it."""
    norms = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).float()
    in_parts = [isinstance(gradient, DTensor) for gradient in gradients]
    if not any(in_parts):
        return norms
    over_ranks = distributed.reduce_over_ranks(norms.square()).sqrt()
    return torch.where(torch.tensor(in_parts, device=norms.device), over_ranks, norms)


class Bfloat16State(torch.optim.Optimizer):
    """Momentum or Adam with the first moment kept in bfloat16, as big_vision keeps it on TPU.

    A parity switch: the decay of the moment is computed in bfloat16 (0.9 is 0.8984375 there), the update itself in
    float32. The second moment of Adam is float32.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, optim: Optim) -> None:
        self.optim = optim
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(parameter, self.state[parameter])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def _update(self, parameter: nn.Parameter, state: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        if not state:
            state["moment"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            if self.optim.name == "adam":
                state["square"], state["step"] = torch.zeros_like(parameter), torch.tensor(0.0)
        gradient, moment = parameter.grad, state["moment"].bfloat16()  # loading a state dict makes it float32
        if self.optim.name == "momentum":
            update: Tensor = gradient + (moment * self._rounded(self.optim.momentum)).float()
            state["moment"] = update.bfloat16()
            return update
        beta, beta_square = self.optim.betas
        state["step"] += 1
        mean = (1 - beta) * gradient + (moment * self._rounded(beta)).float()
        state["moment"] = mean.bfloat16()
        square = state["square"].mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
        count = float(state["step"])
        adam: Tensor = mean / (1 - beta**count) / ((square / (1 - beta_square**count)).sqrt() + self.optim.eps)
        return adam

    @staticmethod
    def _rounded(decay: float) -> Tensor:
        return torch.tensor(decay, dtype=torch.bfloat16)
