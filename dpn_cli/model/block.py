"""A transformer block with any norm before, after or inside its attention and MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dpn_cli.model.config import ViTConfig
from dpn_cli.model.norms import Tokens, token_norm


@dataclass(frozen=True)
class NormSlots:
    """Positions of the norms around one branch f of a block, attention or MLP.

    pre: a norm of its input.
    post: a norm of its output: norm(x + f(x)), or with `on_branch` x + norm(f(x)).
    """

    pre: bool
    post: bool
    on_branch: bool = False


class HeadScale(nn.Module):
    """One learned scale per attention head, for tokens (b, n, heads * c) (NormFormer, arXiv 2110.09456)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scales to one."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled heads, of the same shape."""
        return x * self.scale.repeat_interleave(x.shape[-1] // len(self.scale))


class NormBlock(Block):  # type: ignore[misc]  # timm has no types
    """timm's `Block` with other norms, which `set_norms` builds.

    The names are timm's where timm has the module. ``norm1`` and ``norm2`` are the norms before attention and MLP; with
    post-norms only, they are the norms after them (`ResPostBlock`). ``attn.norm`` and ``mlp.norm`` come before the last
    layer of each (``scale_attn_norm``, ``scale_mlp_norm``). With norms before and after, ``post_norm1`` and
    ``post_norm2`` are the norms after.
    """

    res_scale: nn.Parameter | None

    def __init__(self, *args: Any, **timm: Any) -> None:
        super().__init__(*args, **timm)
        self.post_norm1: nn.Module = nn.Identity()
        self.post_norm2: nn.Module = nn.Identity()
        self.register_parameter("res_scale", None)
        self.norm_slots = NormSlots(True, False), NormSlots(True, False)

    def set_norms(self, config: ViTConfig, index: int) -> None:
        """Build the norms of block `index` of a network."""
        size, options = config.size, config.norm_options
        grid = None if config.prefix_tokens and index >= config.class_token_at else config.grid
        norm = partial(
            token_norm,
            config.norm_of(index),
            eps=config.norm_eps,
            tokens=Tokens(size.heads, grid),
            options=options,
        )
        self.norm_slots = _norm_slots(config)
        self.norm1, self.norm2 = norm(size.width), norm(size.width)
        if self.norm_slots[0].pre and self.norm_slots[0].post:
            self.post_norm1 = norm(size.width)
        if self.norm_slots[1].pre and self.norm_slots[1].post:
            self.post_norm2 = norm(size.width)
        if config.placement == "subln":
            self.attn.norm = norm(config.attn_width or size.width)
        if config.placement in ("subln", "normformer"):
            self.mlp.norm = norm(size.mlp)
        if config.placement == "normformer" and options.head_scale:
            self.attn.norm = HeadScale(size.heads)
        if config.placement == "normformer" and options.res_scale:
            self.res_scale = nn.Parameter(torch.ones(size.width))

    def forward(self, x: Tensor, **mask: Any) -> Tensor:
        """Map tokens (b, n, d) to tokens of the same shape."""
        attention, mlp = self.norm_slots
        y = self.ls1(self.attn(self.norm1(x) if attention.pre else x, **mask))
        x = _add_residual(x, y, self.post_norm1 if attention.pre else self.norm1, self.drop_path1, attention)
        y = self.ls2(self.mlp(self.norm2(x) if mlp.pre else x))
        x = x if self.res_scale is None else x * self.res_scale
        return _add_residual(x, y, self.post_norm2 if mlp.pre else self.norm2, self.drop_path2, mlp)

    @torch.no_grad()
    def scale_for_sub_ln(self, depth: int) -> None:
        """Scale the weights of v, of the projection and of the MLP by sqrt(log(2 depth)) (arXiv 2210.06423)."""
        value = self.attn.qkv.weight.chunk(3)[2]
        for weight in (value, self.attn.proj.weight, self.mlp.fc1.weight, self.mlp.fc2.weight):
            weight.mul_(math.sqrt(math.log(2 * depth)))


def _norm_slots(config: ViTConfig) -> tuple[NormSlots, NormSlots]:
    if config.placement == "subln":
        return NormSlots(True, False), NormSlots(True, False)
    if config.placement == "normformer":
        return NormSlots(True, True, on_branch=True), NormSlots(True, False)
    on_branch = config.norm_options.post == "branch"
    attention, mlp = (NormSlots("pre" in text, "post" in text, on_branch) for text in config.placement.split(","))
    return attention, mlp


def _add_residual(x: Tensor, y: Tensor, norm: nn.Module, drop: nn.Module, slots: NormSlots) -> Tensor:
    """Add the output `y` of a branch to the residual stream `x`, with the norm after it if it has one."""
    output: Tensor
    if not slots.post:
        output = x + drop(y)
    elif slots.on_branch:
        output = x + drop(norm(y))
    else:
        output = norm(x + drop(y))
    return output
