"""SLAB's DeiTs with PRepBN (arXiv 2405.11582): timm's names around norms of their own, the final one included.

Its ``LinearNorm`` goes from LayerNorm (`norm1`) to ``RepBN`` (`norm2`) in training; some networks have RepBN alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from dpn_cli.config.network import NormOptions
from dpn_cli.weights.formats.state_dict import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Checkpoint,
    Contents,
    State,
    rename,
    stem_of,
    unwrap,
)

_NORM = r"(blocks\.\d+\.norm[12]|norm)"
_RULES = (
    (_NORM + r"\.norm1\.(weight|bias)", r"\1.ln.\2"),
    (_NORM + r"\.(?:norm2\.)?alpha", r"\1.eta"),
    (_NORM + r"\.(?:norm2\.)?bn\.(weight|bias|running_mean|running_var)", r"\1.\2"),
)
_COUNTS = re.compile(_NORM + r"\.(?:warm|iter|total_step|(?:norm2\.)?bn\.num_batches_tracked)")


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of such a DeiT with softmax attention."""
    inner = {unwrap(name) for name in names}
    rep = {"blocks.0.norm1.alpha", "blocks.0.norm1.norm2.alpha"}
    return {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= inner and not (
        rep.isdisjoint(inner) or any(name.endswith(".attn.positional_encoding") for name in inner)
    )


def read(contents: Contents) -> Checkpoint:
    """Read a DeiT with `LinearNorm` or `RepBN`; how far its training went is in the counters of the former."""
    state, renamed = rename(contents.tensors, _RULES)
    counters = {name: value for name, value in state.items() if _COUNTS.fullmatch(name)}
    state = {name: value for name, value in state.items() if name not in counters}
    added: list[str] = []
    for eta in [name for name in state if name.endswith(".eta")]:
        norm = eta.removesuffix(".eta")
        state[f"{norm}.progress"] = _progress(norm, counters)
        if f"{norm}.ln.weight" not in state:
            features = state[f"{norm}.weight"].shape
            state[f"{norm}.ln.weight"], state[f"{norm}.ln.bias"] = torch.ones(features), torch.zeros(features)
            added.append(f"{norm}.ln (an untrained LayerNorm)")
    return Checkpoint(
        state,
        "SLAB",
        stem_of(state),
        eps=1e-5,
        act="gelu",
        pool="tok",
        slots=("cls_token",),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        norm="prepbn",
        norm_options=NormOptions(final="same"),
        renamed=renamed,
        dropped=list(counters),
        added=added,
        assumed={"mean": "ImageNet's mean and std (with which the code trains)"},
        notes=[*contents.notes, *([] if added else ["eps is batch norm's; LayerNorm, for training only, had 1e-6"])],
    )


def _progress(norm: str, counters: State) -> torch.Tensor:
    """Return the share of RepBN in a norm, by its counters of steps; one where it was RepBN from the start."""
    left, total, warm = (counters.get(f"{norm}.{name}") for name in ("iter", "total_step", "warm"))
    if left is None or total is None:
        return torch.tensor(1.0)
    has_started = warm is None or not warm > 0
    return (1 - left / total).float() if has_started else torch.tensor(0.0)
