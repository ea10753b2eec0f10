"""Freeze groups of a ViT's parameters."""

from __future__ import annotations

import re

from torch import nn

from dpn_cli.errors import DpnError
from dpn_cli.model.norms import RunningNorm

STEM, POSITIONS = ("patch_embed.", "norm_posemb.", "norm_pre."), ("pos_embed", "cls_token", "dist_token", "reg_token")
# Prefixes of the parameters that a word of --freeze names; it takes "blocks:0-5", too.
GROUPS = {
    "stem": STEM,
    "positions": POSITIONS,
    "blocks": ("blocks.",),
    "norm": ("norm.", "fc_norm."),
    "backbone": (*STEM, *POSITIONS, "blocks.", "norm.", "fc_norm.", "attn_pool.", "pre_logits."),
}


def freeze(model: nn.Module, groups: tuple[str, ...]) -> int:
    """Freeze groups of a ViT's parameters, running statistics included; returns the number of frozen weights.

    Raises `DpnError` for an unknown group, a block that the network does not have, and when nothing is left to train.
    """
    depth = len(getattr(model, "blocks", []))
    prefixes: list[str] = []
    for group in groups:
        blocks = re.fullmatch(r"blocks:(\d{1,6})(?:-(\d{1,6}))?", group)
        if blocks:
            first, last = int(blocks[1]), int(blocks[2] or blocks[1])
            if not first <= last < depth:
                raise DpnError(f"--freeze {group}: the network has the blocks 0 to {depth - 1}")
            prefixes += [f"blocks.{block}." for block in range(first, last + 1)]
        elif group in GROUPS:
            prefixes += GROUPS[group]
        else:
            raise DpnError(f"--freeze {group}: choose from {', '.join(GROUPS)}, blocks:N or blocks:FIRST-LAST")
    frozen = 0
    for name, parameter in model.named_parameters():
        if prefixes and name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm):
            module.freeze(bool(prefixes) and f"{name}.".startswith(tuple(prefixes)))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DpnError(f"--freeze {','.join(groups)}: nothing is left to train")
    return frozen


def train_only(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Freeze all parameters of a ViT but those with names that start with `prefixes`, running statistics included."""
    for name, parameter in model.named_parameters():
        if not name.startswith(prefixes):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm):
            module.freeze(not f"{name}.".startswith(prefixes))
