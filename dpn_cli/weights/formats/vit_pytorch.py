"""lucidrains' vit-pytorch: `ViT` and `SimpleViT`, Dual PatchNorm since version 1.0, plain before."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from dpn_cli.weights.formats.state_dict import (
    Checkpoint,
    Contents,
    State,
    add_zero_bias,
    rename,
    rows_first,
    stem_of,
    unwrap,
)

HEAD_WIDTH = 64  # the library's default dim_head; the file holds heads x dim_head only

# The stem is an index-named Sequential: (0) rearrange, 1 LN, 2 Linear, 3 LN since version 1.0; 1 Linear before.
_DUAL = (
    (r"to_patch_embedding\.1\.(weight|bias)", r"patch_embed.norm_in.\1"),
    (r"to_patch_embedding\.2\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"to_patch_embedding\.3\.(weight|bias)", r"patch_embed.norm.\1"),
)
_PLAIN = ((r"to_patch_embedding\.1\.(weight|bias)", r"patch_embed.proj.\1"),)
_LAYER = r"transformer\.layers\.(\d+)"
_TRUNK = (
    (r"cls_token", "cls_token"),
    (r"pos_embedding", "pos_embed"),
    # Since 0.45 each sub-layer holds its own norm; before, PreNorm wrapped it as `norm` and `fn`.
    (_LAYER + r"\.0\.norm\.(weight|bias)", r"blocks.\1.norm1.\2"),
    (_LAYER + r"\.0\.(?:fn\.)?to_qkv\.weight", r"blocks.\1.attn.qkv.weight"),
    (_LAYER + r"\.0\.(?:fn\.)?to_out\.(?:0\.)?(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_LAYER + r"\.1\.norm\.(weight|bias)", r"blocks.\1.norm2.\2"),
    (r"transformer\.norm\.(weight|bias)", r"norm.\1"),
    (r"(?:mlp|linear)_head\.(weight|bias)", r"head.\1"),
    # Before the final norm moved into the trunk, it followed the pooling: the class token's, or the mean.
    (r"mlp_head\.0\.(weight|bias)", r"norm.\1"),
    (r"linear_head\.0\.(weight|bias)", r"fc_norm.\1"),
    (r"(?:mlp|linear)_head\.1\.(weight|bias)", r"head.\1"),
)
# The MLP is a Sequential too: with its norm inside at 0, SimpleViT without dropout layers.
_MLP_WITH_NORM = ((_LAYER + r"\.1\.net\.0\.(weight|bias)", r"blocks.\1.norm2.\2"),)


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of vit-pytorch's ViT or SimpleViT."""
    inner = {unwrap(name) for name in names}
    return "to_patch_embedding.1.weight" in inner and any(
        re.fullmatch(r"transformer\.layers\.0\.0\.(fn\.)?to_qkv\.weight", name) for name in inner
    )


def read(contents: Contents) -> Checkpoint:
    """Read a ViT or SimpleViT: eps 1e-5, erf GELU, patches flattened as (row, column, channel)."""
    names = {unwrap(name) for name in contents.tensors}
    stem = _DUAL if "to_patch_embedding.2.weight" in names else _PLAIN
    state, renamed = rename(contents.tensors, (*stem, *_TRUNK, *_mlp_rules(names)))
    state["patch_embed.proj.weight"] = rows_first(state["patch_embed.proj.weight"])
    for name in ("cls_token", "pos_embed"):
        if name in state and state[name].ndim == 2:
            state[name] = state[name][None]
    if "cls_token" in state and state["cls_token"].shape[1] == 0:
        del state["cls_token"]  # pool="mean" since 1.16: a class token of no rows
    assumed = {"mean": "mean = std = 0.5 on pixels in [0, 1] (the library normalises nothing)"}
    if "cls_token" in state:
        assumed["pool"] = "pool=cls (a file of pool=mean looks the same in versions that kept the class token)"
    added = _complete_attention(state)
    inner, heads = state["blocks.0.attn.qkv.weight"].shape[0] // 3, None
    if inner % HEAD_WIDTH == 0:
        heads = inner // HEAD_WIDTH
        assumed["heads"] = f"{heads} heads of dim_head {HEAD_WIDTH}"
    return Checkpoint(
        state,
        "vit-pytorch",
        stem_of(state),
        eps=1e-5,
        act="gelu",
        heads=heads,
        renamed=renamed,
        added=added,
        assumed=assumed,
        slots=("cls_token",) if "cls_token" in state else (),
        notes=contents.notes,
        posemb="learn" if "pos_embed" in state else "sincos2d",
    )


def _mlp_rules(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Number the MLP's layers: the norm and the dropouts take places in the Sequential, or not."""
    pattern = re.compile(r"transformer\.layers\.0\.1\.(?:fn\.)?net\.(\d+)\.weight")
    net = sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
    linear = net[-2:]
    rules = tuple(
        (_LAYER + rf"\.1\.(?:fn\.)?net\.{index}\.(weight|bias)", rf"blocks.\1.mlp.{layer}.\2")
        for index, layer in zip(linear, ("fc1", "fc2"), strict=True)
    )
    return (*(_MLP_WITH_NORM if len(net) == 3 else ()), *rules)


def _complete_attention(state: State) -> list[str]:
    """Give q, k, v a zero bias, and one head of full width the identity projection that the library leaves out."""
    added = add_zero_bias(state, [name for name in state if name.endswith("attn.qkv.weight")])
    for qkv in [name for name in state if name.endswith("attn.qkv.weight")]:
        proj = qkv.replace("qkv", "proj")
        if proj not in state and state[qkv].shape[0] == 3 * state[qkv].shape[1]:
            state[proj] = torch.eye(state[qkv].shape[1])
            added.append(f"{proj} (identity)")
    return added + add_zero_bias(state, [name for name in state if name.endswith("attn.proj.weight")])
