"""timm's VisionTransformer and NaFlexViT: state dicts, saved folders, and models that timm builds itself."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dpn_cli.checkpoints.layout import (
    Act,
    Checkpoint,
    Contents,
    add_zero_bias,
    fold_layer_scale,
    rename,
    rows_first,
    split_class_position,
    stem_of,
    unwrap,
)
from dpn_cli.errors import DataError

# Where `dpn_cli.convert` puts the description that timm keeps in a config.json.
KEY = "timm"

_ACTS: dict[str, Act] = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
# NaFlexViT's embedding, as classic names. Its position embedding covers patches only.
_NAFLEX = (
    (r"embeds\.norm_input\.(weight|bias)", r"patch_embed.norm_in.\1"),
    (r"embeds\.(proj|norm)\.(weight|bias)", r"patch_embed.\1.\2"),
    (r"embeds\.(pos_embed|cls_token)", r"\1"),
)


def matches(names: Collection[str]) -> bool:
    """Tell whether these are the names of timm's VisionTransformer."""
    return {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= {unwrap(name) for name in names}


def matches_naflex(names: Collection[str]) -> bool:
    """Tell whether these are the names of timm's NaFlexViT."""
    return {"embeds.proj.weight", "blocks.0.attn.qkv.weight"} <= {unwrap(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a VisionTransformer's state dict; a `config.json` beside it says what the tensors do not."""
    state, renamed = rename(contents.tensors)
    notes = fold_layer_scale(state)
    checkpoint = Checkpoint(state, "timm", stem_of(state), 1e-6, "gelu", renamed=renamed, notes=notes)
    return place_class_token(_described(checkpoint, contents))


def place_class_token(checkpoint: Checkpoint) -> Checkpoint:
    """Give the class token its position, where the table has an entry more than the grid (or than a square)."""
    has_slot = None
    if checkpoint.grid is not None and "pos_embed" in checkpoint.state:
        has_slot = checkpoint.state["pos_embed"].shape[1] == checkpoint.grid[0] * checkpoint.grid[1] + 1
    checkpoint.notes += split_class_position(checkpoint.state, has_slot)
    return checkpoint


def read_naflex(contents: Contents) -> Checkpoint:
    """Read a NaFlexViT's state dict; its linear projection takes patches with the channel last."""
    state, renamed = rename(contents.tensors, _NAFLEX)
    notes = []
    if state["patch_embed.proj.weight"].ndim == 2:
        state["patch_embed.proj.weight"] = rows_first(state["patch_embed.proj.weight"])
        notes.append("patches are read as (row, column, channel), timm's default for its linear projection")
    rows, columns = (state.pop(f"embeds.pos_embed_{axis}", None) for axis in "yx")
    if rows is not None and columns is not None:
        state["pos_embed"] = rows[:, :, None] + columns[:, None]
        notes.append("the factorized position embedding was summed into one table")
    grid = None
    if "pos_embed" in state:
        _, height, width, _ = state["pos_embed"].shape
        grid, state["pos_embed"] = (height, width), state["pos_embed"].flatten(1, 2)
    notes += fold_layer_scale(state)
    return _described(
        Checkpoint(state, "timm NaFlexViT", stem_of(state), 1e-6, "gelu", grid=grid, renamed=renamed, notes=notes),
        contents,
    )


def _described(checkpoint: Checkpoint, contents: Contents) -> Checkpoint:
    """Take from `config.json` what it says about the network; say what is assumed where it says nothing."""
    checkpoint.notes += contents.notes
    config = contents.config or json.loads(contents.metadata.get(KEY, "{}"))
    if "norm_pre.weight" in checkpoint.state:
        checkpoint.added += add_zero_bias(checkpoint.state, ["patch_embed.proj.weight"])
    if name := config.get("architecture"):
        apply_facts(checkpoint, build_empty(name, config.get("model_args") or {}))
        checkpoint.eps = config.get("norm_eps", checkpoint.eps)
        checkpoint.notes.append(f"eps, GELU and heads are those of timm's {name}, which the description names")
    else:
        if "norm_pre.weight" in checkpoint.state:
            checkpoint.eps = 1e-5  # timm's CLIP models, the only ones with this norm, use torch's default
        checkpoint.assumed.append(f"eps {checkpoint.eps:g} and erf GELU (a bare timm file does not say)")
    inputs = config.get("pretrained_cfg", config)
    if "mean" in inputs and "std" in inputs:
        checkpoint.mean, checkpoint.std = tuple(inputs["mean"]), tuple(inputs["std"])
    else:
        checkpoint.assumed.append("mean = std = 0.5 on pixels in [0, 1]")
    return checkpoint


def build_empty(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a timm model without memory for its weights. Raises `DataError` when timm has no such ViT."""
    import timm

    if not timm.is_model(name):
        raise DataError(
            f"its config.json names {name!r}, which timm does not have; pass a copy of the weight file alone"
        )
    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    return model


def apply_facts(checkpoint: Checkpoint, model: Any) -> None:
    """Take eps, GELU, heads and grid from a timm model's own modules. Raises `DataError` for another kind of model."""
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import Block, VisionTransformer

    kind = type(model)
    if kind not in (VisionTransformer, NaFlexVit) or type(model.blocks[0]) is not Block:
        what = f"a {kind.__name__}" + (f" of {type(model.blocks[0]).__name__}s" if kind is VisionTransformer else "")
        raise DataError(f"{what}; dpn reads timm's VisionTransformer and NaFlexVit of pre-norm Blocks")
    act = _ACTS.get(type(model.blocks[0].mlp.act).__name__)
    if act is None:
        raise DataError(f"its activation is {type(model.blocks[0].mlp.act).__name__}; dpn reads {', '.join(_ACTS)}")
    checkpoint.act, checkpoint.eps = act, model.blocks[0].norm1.eps
    checkpoint.heads = model.blocks[0].attn.num_heads
    if kind is VisionTransformer:
        checkpoint.grid = tuple(model.patch_embed.grid_size)
