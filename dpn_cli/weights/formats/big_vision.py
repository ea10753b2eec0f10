"""big_vision's `.npz` files: the paper's own spelling, today's, AugReg's, scanned blocks, NaFlex, two-tower models."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor

from dpn_cli.weights.formats.state_dict import Checkpoint, Contents, State, fuse_qkv, rows_first, stem_of

# Trees that hold the parameters, and the image tower inside them (SigLIP, LiT), in the order in which they nest.
_TREES = ("params/", "opt/target/")
_TOWER = "img/"

# Module names inside a block and inside the attention-pooling head; the second of a pair is AugReg's, which was
# saved before flax linen numbered modules per kind.
_MODULE = {
    "LayerNorm_0": "norm1",
    "MultiHeadDotProductAttention_0": "attn",
    "MultiHeadDotProductAttention_1": "attn",
    "LayerNorm_1": "norm2",
    "LayerNorm_2": "norm2",
    "MlpBlock_0": "mlp",
    "MlpBlock_3": "mlp",
    "Dense_0": "fc1",
    "Dense_1": "fc2",
    "out": "proj",
    "query": "query",
    "key": "key",
    "value": "value",
}
# The stem: the paper's listing names its modules ln0, dense and ln1; public code has `embedding`, and for NaFlex
# patchln_pre and patchln_post around it.
_STEM = {
    "ln0": "patch_embed.norm_in",
    "ln1": "patch_embed.norm",
    "patchln_pre": "patch_embed.norm_in",
    "patchln_post": "patch_embed.norm",
    "dense": "patch_embed.proj",
    "embedding": "patch_embed.proj",
}
_LEAF = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_POSITIONS = {"pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding"}


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of a big_vision ViT."""
    return any(re.search(r"(^|/)Transformer/encoderblock(_\d+)?/", name) for name in names)


def read(contents: Contents) -> Checkpoint:
    """Read big_vision's parameters, from wherever in the file's tree they are."""
    prefix = next((tree for tree in _TREES if any(name.startswith(tree) for name in contents.tensors)), "")
    if any(name.startswith(prefix + _TOWER) for name in contents.tensors):
        prefix += _TOWER
    dropped = [name for name in contents.tensors if not name.startswith(prefix)]
    arrays = _unscan(
        {name.removeprefix(prefix): value for name, value in contents.tensors.items() if name.startswith(prefix)}
    )
    state: State = {}
    renamed: dict[str, str] = {}
    heads = None
    for name, value in arrays.items():
        our_name = _our_name(name)
        if our_name is None or our_name in state:
            state[name] = value
            continue
        if re.search(r"/(query|key|value)/kernel$", name):
            heads = value.shape[1]
        state[our_name], renamed[prefix + name] = _our_layout(our_name, value), our_name
    fuse_qkv(state, renamed)
    _fuse_pool(state, renamed)
    grid = _flatten_positions(state)
    return Checkpoint(
        state,
        "big_vision",
        stem_of(state),
        eps=1e-6,
        act="gelu_tanh",
        heads=heads,
        grid=grid,
        renamed=renamed,
        dropped=dropped,
        slots=None if grid is None else (),
        posemb="learn" if "pos_embed" in state else "sincos2d",
    )


def _unscan(arrays: State) -> State:
    """Give every block its own arrays where all blocks are stacked along a leading axis (flax's nn.scan)."""
    single: State = {}
    for name, value in arrays.items():
        if name.startswith("Transformer/encoderblock/"):
            for index, part in enumerate(value):
                single[name.replace("encoderblock", f"encoderblock_{index}", 1)] = part
        else:
            single[name] = value
    return single


def _our_name(name: str) -> str | None:
    """Return our name of an array (q, k and v still apart), or None for an unknown one."""
    if name == "MAPHead_0/probe":
        return "attn_pool.latent"
    if name == "cls" or name in _POSITIONS:
        return "cls_token" if name == "cls" else "pos_embed"
    *modules, last = name.split("/")
    leaf = _LEAF.get(last)
    if leaf is None:
        return None
    match modules:
        case ["Transformer", "encoder_norm"]:
            return f"norm.{leaf}"
        case ["pre_logits" | "head" as module]:
            return f"{module}.{leaf}"
        case [module] | ["embedding" | "stem" | "patch_embed", module] if module in _STEM:
            return f"{_STEM[module]}.{leaf}"
        case ["Transformer", block, *inner] if block.startswith("encoderblock_") and set(inner) <= set(_MODULE):
            path = ".".join(_MODULE[part] for part in inner)
            return f"blocks.{block.removeprefix('encoderblock_')}.{path}.{leaf}"
        case ["MAPHead_0", "LayerNorm_0"]:
            return f"attn_pool.norm.{leaf}"
        case ["MAPHead_0", kind, *inner] if set(inner) <= set(_MODULE) and kind in _MODULE:
            path = ".".join(_MODULE[part] for part in inner)
            return f"attn_pool.{'mlp.' if _MODULE[kind] == 'mlp' else ''}{path}.{leaf}"
    return None


def _our_layout(our_name: str, value: Tensor) -> Tensor:
    """Turn a flax array into PyTorch's layout: kernels are (in, out), attention keeps its heads apart."""
    if our_name == "patch_embed.proj.weight":
        return value.permute(3, 2, 0, 1) if value.ndim == 4 else rows_first(value.T)  # p q c d -> d c p q
    if re.search(r"\.(query|key|value)\.weight$", our_name):
        return value.flatten(1).T  # d heads k -> (heads k) d
    if re.search(r"\.(query|key|value)\.bias$", our_name):
        return value.flatten()
    if re.search(r"attn(_pool)?\.proj\.weight$", our_name):
        return value.flatten(0, 1).T  # heads k d -> d (heads k)
    return value.T if our_name.endswith(".weight") and value.ndim == 2 else value


def _fuse_pool(state: State, renamed: dict[str, str]) -> None:
    """Name the pooling head's query q, and stack its key and value, as timm's AttentionPoolLatent has them."""
    for leaf in ("weight", "bias"):
        query, key, value = (f"attn_pool.{part}.{leaf}" for part in ("query", "key", "value"))
        new = {query: f"attn_pool.q.{leaf}", key: f"attn_pool.kv.{leaf}", value: f"attn_pool.kv.{leaf}"}
        if all(name in state for name in new):
            state[new[query]] = state.pop(query)
            state[new[key]] = torch.cat([state.pop(key), state.pop(value)])
            renamed.update({their_name: new[our_name] for their_name, our_name in renamed.items() if our_name in new})


def _flatten_positions(state: State) -> tuple[int, int] | None:
    """Flatten NaFlex's position embedding (h, w, d) to (1, h*w, d); returns its grid."""
    posemb = state.get("pos_embed")
    if posemb is None or posemb.ndim != 3 or posemb.shape[0] == 1:
        return None
    state["pos_embed"] = posemb.flatten(0, 1)[None]
    return posemb.shape[0], posemb.shape[1]
