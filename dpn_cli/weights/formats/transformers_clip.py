"""The image towers of Hugging Face transformers' CLIP, SigLIP and SigLIP 2, alone or in a model of two towers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dpn_cli.errors import DataError
from dpn_cli.weights.formats.state_dict import (
    CLIP_MEAN,
    CLIP_STD,
    Checkpoint,
    Contents,
    State,
    add_zero_bias,
    fuse_qkv,
    rename,
    rows_first,
    stem_of,
    unwrap,
)
from dpn_cli.weights.formats.transformers_vit import ACTS, apply_inputs, grid_of

_LEAF = r"(weight|bias)"
_LAYER = r"encoder\.layers\.(\d+)"
_RULES = (
    (r"embeddings\.class_embedding", "cls_token"),
    (r"embeddings\.position_embedding\.weight", "pos_embed"),
    (rf"embeddings\.patch_embedding\.{_LEAF}", r"patch_embed.proj.\1"),
    (rf"pre_layrnorm\.{_LEAF}", r"norm_pre.\1"),
    (rf"{_LAYER}\.self_attn\.q_proj\.{_LEAF}", r"blocks.\1.attn.query.\2"),
    (rf"{_LAYER}\.self_attn\.k_proj\.{_LEAF}", r"blocks.\1.attn.key.\2"),
    (rf"{_LAYER}\.self_attn\.v_proj\.{_LEAF}", r"blocks.\1.attn.value.\2"),
    (rf"{_LAYER}\.self_attn\.out_proj\.{_LEAF}", r"blocks.\1.attn.proj.\2"),
    (rf"{_LAYER}\.layer_norm([12])\.{_LEAF}", r"blocks.\1.norm\2.\3"),
    (rf"{_LAYER}\.mlp\.(fc[12])\.{_LEAF}", r"blocks.\1.mlp.\2.\3"),
    (rf"post_layernorm\.{_LEAF}", r"norm.\1"),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.in_proj_(weight|bias)", r"attn_pool.in_proj.\1"),
    (rf"head\.attention\.out_proj\.{_LEAF}", r"attn_pool.proj.\1"),
    (rf"head\.layernorm\.{_LEAF}", r"attn_pool.norm.\1"),
    (rf"head\.mlp\.(fc[12])\.{_LEAF}", r"attn_pool.mlp.\1.\2"),
    (r"visual_projection\.weight", "head.weight"),
)
# Defaults of CLIPVisionConfig and SiglipVisionConfig: a saved configuration states only what differs from them.
_CLIP: dict[str, Any] = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "image_size": 224, "patch_size": 32}
_SIGLIP: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": 224,
    "patch_size": 16,
}
_HEADS = 12
_TOWER = "vision_model."


def _inner(name: str) -> str:
    return unwrap(name).removeprefix(_TOWER)


def _is_of_tower(name: str) -> bool:
    """Return whether a tensor is of the image tower, or of its projection, in a model of two towers."""
    name = unwrap(name)
    return name.startswith(_TOWER) or name == "visual_projection.weight"


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of transformers' CLIP or SigLIP, or of its image tower."""
    inner = {_inner(name) for name in names}
    return {"embeddings.patch_embedding.weight", "embeddings.position_embedding.weight"} <= inner


def read(contents: Contents) -> Checkpoint:
    """Read an image tower; `config.json` decides eps, GELU and heads, `preprocessor_config.json` the input range."""
    nested = any(unwrap(name).startswith(_TOWER) for name in contents.tensors)
    tower = {
        name: value
        for name, value in contents.tensors.items()
        # Files of versions before 4.31 hold the numbers of the positions, which are no weights.
        if (not nested or _is_of_tower(name)) and not name.endswith(".position_ids")
    }
    state, renamed = rename(tower, _RULES, inner=_inner)
    is_clip = "cls_token" in state
    config = contents.config.get("vision_config", contents.config)
    facts = (_CLIP if is_clip else _SIGLIP) | config
    if facts["hidden_act"] not in ACTS:
        raise DataError(f"a transformers model with hidden_act {facts['hidden_act']!r}; dpn reads {', '.join(ACTS)}")
    for name in ("cls_token", "pos_embed"):
        if name in state:
            state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    if state["patch_embed.proj.weight"].ndim == 2:  # SigLIP 2 of any aspect ratio
        state["patch_embed.proj.weight"] = rows_first(state["patch_embed.proj.weight"])
        facts.pop("image_size")
    fuse_qkv(state, renamed)
    _split_pool(state, renamed)
    checkpoint = Checkpoint(
        state,
        "transformers CLIP" if is_clip else "transformers SigLIP",
        stem_of(state),
        eps=facts["layer_norm_eps"],
        act=ACTS[facts["hidden_act"]],
        heads=facts.get("num_attention_heads", _HEADS if config else None),
        grid=grid_of(facts) if config else None,
        pool="tok" if is_clip else "map" if "attn_pool.latent" in state else "gap",
        slots=("cls_token",) if is_clip else (),
        renamed=renamed,
        dropped=[name for name in contents.tensors if name not in tower],
        added=add_zero_bias(state, ["patch_embed.proj.weight", "head.weight"]),
        notes=list(contents.notes),
    )
    if is_clip:
        checkpoint.mean, checkpoint.std = CLIP_MEAN, CLIP_STD
    if "head.weight" in state:
        checkpoint.notes.append("the projection into the joint space is read as the head")
    if not config:
        owner = "CLIP's" if is_clip else "SigLIP's"
        checkpoint.assumed["eps"] = f"eps {checkpoint.eps:g}, {owner} default (no config.json next to the file)"
        checkpoint.assumed["act"] = f"{'QuickGELU' if is_clip else 'tanh GELU'}, {owner} default"
    if is_clip:
        apply_inputs(checkpoint, contents.inputs, "CLIP's mean and std")
    else:
        apply_inputs(checkpoint, contents.inputs)
    return checkpoint


def _split_pool(state: State, renamed: dict[str, str]) -> None:
    """Divide the pooling's joint matrix into the query's and that of key and value, as timm's AttentionPoolLatent."""
    for leaf in ("weight", "bias"):
        joint = state.pop(f"attn_pool.in_proj.{leaf}", None)
        if joint is None:
            continue
        width = len(joint) // 3
        state[f"attn_pool.q.{leaf}"], state[f"attn_pool.kv.{leaf}"] = joint[:width], joint[width:]
        new = f"attn_pool.q.{leaf} and attn_pool.kv.{leaf}"
        renamed.update({theirs: new for theirs, ours in renamed.items() if ours == f"attn_pool.in_proj.{leaf}"})
