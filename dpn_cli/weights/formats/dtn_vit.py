"""Dynamic Token Normalization's own code (arXiv 2112.02624): the networks of its ``vit_norm_mix.py``.

They have timm's names. DTN is in both norms of the first blocks, the class token joins after those, and it has no
position.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DataError
from dpn_cli.model.config import default_dtn_blocks
from dpn_cli.weights.formats.state_dict import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Checkpoint,
    Contents,
    State,
    add_zero_bias,
    rename,
    stem_of,
    unwrap,
)

JOINS_AT = 10  # the code's default of local_up_to_layer
# By width, where all networks of the code have one number; there are two of 768, with 12 and 16 heads.
_HEADS = {192: 4, 384: 6, 432: 9}


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of a network with DTN."""
    own_names = {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.norm1.pos_proj.bias"}
    return own_names <= {unwrap(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a network with DTN: how many of its blocks have it, and in which form, is in the names.

    Raises `DataError` when the class token would join after the last block.
    """
    state, renamed = rename(contents.tensors)
    uninitialized = [name for name in state if re.fullmatch(r"blocks\.\d+\.norm[12]\.pos_proj\.bias", name)]
    for name in uninitialized:
        del state[name]
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    blocks = sum(f"blocks.{index}.norm1.var_norm_weight" in state for index in range(depth))
    if blocks == depth:
        raise DataError(
            "DTN is in all of its blocks, and the class token joins after those: its head reads the first patch alone"
        )
    options = NormOptions(
        dtn="released",
        dtn_statistics="both" if "blocks.0.norm1.mean_norm_weight" in state else "variance",
        dtn_blocks=None if blocks == default_dtn_blocks(depth) else blocks,
    )
    checkpoint = _checkpoint(state, contents)
    checkpoint.norm, checkpoint.norm_options = "dtn", options
    checkpoint.heads = len(state["blocks.0.norm1.var_norm_weight"])
    checkpoint.renamed, checkpoint.dropped = renamed, uninitialized
    checkpoint.notes.append("the biases of pos_proj were dropped, which the softmax over positions does not see")
    return checkpoint


def is_baseline(state: State) -> bool:
    """Tell a network of this code with LayerNorm, in timm's names, from timm's own.

    It has a class token without a position, no bias of q, k and v, and blocks behind the one where that token joins.
    """
    posemb = state.get("pos_embed")
    rows = 0 if posemb is None or posemb.ndim != 3 else posemb.shape[1]
    biased = any(name.endswith(".attn.qkv.bias") for name in state)
    required = {"cls_token", f"blocks.{JOINS_AT}.attn.qkv.weight"} <= state.keys()
    return required and not biased and rows > 0 and int(rows**0.5) ** 2 == rows


def read_baseline(contents: Contents) -> Checkpoint:
    """Read a network with LayerNorm. The file does not say at which block its class token joins."""
    state, renamed = rename(contents.tensors)
    checkpoint = _checkpoint(state, contents)
    checkpoint.renamed = renamed
    checkpoint.norm_options = NormOptions(class_token_at=JOINS_AT)
    checkpoint.assumed |= {
        "class_token_at": f"the class token joins at block {JOINS_AT} (default of DTN's code)",
        "norm": "LayerNorm (the code's instance and group norm have the same names)",
    }
    width = state["patch_embed.proj.weight"].shape[0]
    checkpoint.heads = _HEADS.get(width)
    if checkpoint.heads:
        checkpoint.assumed["heads"] = f"{checkpoint.heads} heads (of the code's network {width} wide)"
    return checkpoint


def _checkpoint(state: State, contents: Contents) -> Checkpoint:
    return Checkpoint(
        state,
        "DTN",
        stem_of(state),
        eps=1e-5,
        act="gelu",
        pool="tok",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        added=add_zero_bias(state, [name for name in state if name.endswith("attn.qkv.weight")]),
        assumed={"mean": "ImageNet's mean and std (timm's default, with which the code trains)"},
        notes=contents.notes,
    )
