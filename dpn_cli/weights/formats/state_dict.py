"""Result of every reader, and the conversion steps that several formats share.

The layout is timm's names and shapes plus the stem's norms. A reader renames and reshapes; it decides nothing
about the network to build, and it drops no weight silently: what it does not know stays in the state dict under
its own name, and loading refuses it (`dpn_cli.weights.backbone`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dpn_cli.arch import Act, Norm, Placement, Pool, Posemb, Stem
from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DataError

State = dict[str, Tensor]
Rgb = tuple[float, float, float]
Rules = Sequence[tuple[str, str]]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# Tokens in front of those of the patches, in the order of `dpn_cli.model.vit`, with what a report calls them.
PREFIX_TOKENS = {"cls_token": "class token", "dist_token": "distillation token", "reg_token": "registers"}

# Modules that wrap a network when it is saved from inside a training loop.
WRAPPERS = ("module.", "_orig_mod.", "model.")


@dataclass
class Contents:
    """A weight file as it lies on the disk: its tensors, and the descriptions in it and next to it."""

    tensors: State
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Checkpoint:
    """A weight file in our layout, with what its format fixes about the network.

    `mean` and `std` are those of the inputs it was trained with, on pixels in [0, 1]. `heads`, `grid` and `pool` are
    None where the file does not say; a class token next to ``pool="gap"`` is left out of the mean. `slots` are the
    tokens in front of the patches' that have an entry in the position embedding, before `split_positions`; None where
    the format allows all or none of them. `renamed` maps names of the file to ours, `dropped` lists tensors outside the
    image tower, `added` those that the format lacks and ours has, with the value that leaves the function as it is.
    `assumed` holds, by fact, what the file does not state; `notes` the rest. `about` is what a file of ours says of
    more than the network: its kind, and the description of that kind.
    """

    state: State
    format: str
    stem: Stem
    eps: float
    act: Act
    heads: int | None = None
    grid: tuple[int, int] | None = None
    pool: Pool | None = None
    slots: tuple[str, ...] | None = ()
    mean: Rgb = (0.5, 0.5, 0.5)
    std: Rgb = (0.5, 0.5, 0.5)
    posemb: Posemb = "learn"
    norm: Norm = "ln"
    placement: Placement = "pre,pre"
    norm_options: NormOptions = field(default_factory=NormOptions)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    source: str = ""

    def copy(self) -> Checkpoint:
        """Return a checkpoint whose lists and state can be used up; the tensors are shared."""
        lists: dict[str, Any] = {
            item.name: copy(value)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), dict | list)
        }
        return replace(self, **lists)


@dataclass(frozen=True)
class Format:
    """One way to store a ViT: the names that give it away, and the function that reads it."""

    name: str
    matches: Callable[[Collection[str]], bool]
    read: Callable[[Contents], Checkpoint]


def unwrap(name: str) -> str:
    """Remove the prefixes of wrapping modules, in whatever order they were put on."""
    while wrapper := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(wrapper)
    return name


def rename(tensors: State, rules: Rules = (), *, inner: Callable[[str], str] = unwrap) -> tuple[State, dict[str, str]]:
    """Rename tensors by the first rule whose pattern is the whole `inner` name; keep names that no rule knows.

    Returns the state and the renaming. Raises `ValueError` when two tensors would get one name.
    """
    state: State = {}
    renamed: dict[str, str] = {}
    for name, value in tensors.items():
        match = next(((m, new) for pattern, new in rules if (m := re.fullmatch(pattern, inner(name)))), None)
        our_name = match[0].expand(match[1]) if match else inner(name)
        if our_name in state:
            raise ValueError(f"two tensors are called {our_name}, one of them {name}")
        state[our_name] = value
        if our_name != name:
            renamed[name] = our_name
    return state, renamed


def fuse_qkv(state: State, renamed: dict[str, str]) -> None:
    """Stack q, k and v of every block into timm's qkv, where all three are present."""
    for first in [name for name in state if ".attn.query." in name]:
        parts = [first.replace("query", part) for part in ("query", "key", "value")]
        if all(part in state for part in parts):
            fused = first.replace("query", "qkv")
            state[fused] = torch.cat([state.pop(part) for part in parts])
            renamed.update({their_name: fused for their_name, our_name in renamed.items() if our_name in parts})


def split_positions(checkpoint: Checkpoint) -> None:
    """Add the position entries of the tokens in front of the patches' to these; give the rest of the table its grid.

    Equivalent; idempotent. Without a stated grid the patches form a square. Raises `DataError` when they cannot, and
    for the entry of a missing class token.
    """
    state, posemb = checkpoint.state, checkpoint.state.get("pos_embed")
    if posemb is None or posemb.ndim != 3:
        if checkpoint.posemb != "learn" and checkpoint.grid is None:
            checkpoint.assumed["grid"] = "224 pixels (positions are computed, so the file does not say its size)"
        return
    entries, grid = posemb.shape[1], checkpoint.grid
    slots = checkpoint.slots
    if slots is None:
        are_patches_alone = entries == grid[0] * grid[1] if grid else _square(entries)
        slots = () if are_patches_alone else tuple(name for name in PREFIX_TOKENS if name in state)
    first = 0
    for name in slots:
        if name not in state:
            raise DataError(f"its positions have an entry for a {PREFIX_TOKENS[name]}, and it has none")
        last = first + state[name].shape[1]
        state[name] = state[name].float() + posemb[:, first:last].float()
        checkpoint.notes.append(
            f"the position {'entries' if last - first > 1 else 'entry'} of the {PREFIX_TOKENS[name]} "
            f"{'were' if last - first > 1 else 'was'} added to it"
        )
        first = last
    if first:
        state["pos_embed"] = posemb[:, first:]
        entries -= first
    checkpoint.slots = ()
    if grid is None:
        if not _square(entries):
            raise DataError(
                f"its {entries} positions do not form a square grid: other tokens are among them, or the grid has "
                "to be stated (dpn checkpoint convert --grid ROWSxCOLUMNS)"
            )
        checkpoint.grid = (int(entries**0.5),) * 2
        checkpoint.assumed["grid"] = "a square grid"


def _square(number: int) -> bool:
    return number > 0 and int(number**0.5) ** 2 == number


def pack_swiglu(state: State, renamed: dict[str, str], gate: str, value: str) -> None:
    """Stack gate and values of every block's SwiGLU, separate layers of its MLP, as timm's SwiGLUPacked does."""
    for name in [name for name in state if re.fullmatch(rf"blocks\.\d+\.mlp\.{gate}\.(weight|bias)", name)]:
        mlp, _, leaf = name.rsplit(".", 2)
        parts = name, f"{mlp}.{value}.{leaf}"
        fused = f"{mlp}.fc1.{leaf}"
        state[fused] = torch.cat([state.pop(part) for part in parts])
        renamed.update({their_name: fused for their_name, our_name in renamed.items() if our_name in parts})
        renamed.update(dict.fromkeys((part for part in parts if part not in renamed.values()), fused))


def add_zero_bias(state: State, weights: Iterable[str]) -> list[str]:
    """Give the named linear layers a zero bias where they have none; returns what was added."""
    added = []
    for weight in weights:
        bias = f"{weight.removesuffix('weight')}bias"
        if weight in state and bias not in state:
            state[bias] = torch.zeros(len(state[weight]))
            added.append(f"{bias} (zero)")
    return added


def rows_first(weight: Tensor) -> Tensor:
    """Turn a linear patch projection (d, p*q*c), channels last, into a convolution (d, c, p, q).

    Raises `DataError` unless the patches are squares of three channels.
    """
    side = patch_side(weight.shape[1])
    return weight.reshape(len(weight), side, side, 3).permute(0, 3, 1, 2)


def patch_side(values: int) -> int:
    """Return the side of a square patch of that many values. Raises `DataError` when there is none."""
    side = int((values / 3) ** 0.5)
    if side * side * 3 != values:
        raise DataError(f"its patches have {values} values, which no square patch of 3 channels has")
    return side


def stem_of(state: State) -> Stem:
    """Tell the stem by the names of its norms, never by their shapes: for B/16 both have 768 features."""
    first, second = "patch_embed.norm_in.weight" in state, "patch_embed.norm.weight" in state
    if first and second:
        centred = "patch_embed.norm_in.bias" in state or "patch_embed.norm.bias" in state
        return "dpn" if centred else "rms"
    if "norm_posemb.weight" in state:
        return "post_posemb"
    return "pre" if first else "post" if second else "none"
