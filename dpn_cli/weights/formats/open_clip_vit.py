"""open_clip's image towers: alone, or inside a full CLIP whose text tower is left aside."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from einops import rearrange

from dpn_cli.errors import DataError
from dpn_cli.weights.formats import timm_vit
from dpn_cli.weights.formats.state_dict import (
    CLIP_MEAN,
    CLIP_STD,
    Checkpoint,
    Contents,
    State,
    add_zero_bias,
    patch_side,
    rename,
    stem_of,
    unwrap,
)

_BLOCK = r"transformer\.resblocks\.(\d+)"
_RULES = (
    # Versions 2.12 to 2.22 had a norm before the projection ("input_patchnorm"); ln_pre is not a second stem norm: it
    # follows the position embedding and takes in the class token.
    (r"patchnorm_pre_ln\.(weight|bias)", r"patch_embed.norm_in.\1"),
    (r"conv1\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"class_embedding", "cls_token"),
    (r"positional_embedding", "pos_embed"),
    (r"ln_pre\.(weight|bias)", r"norm_pre.\1"),
    (_BLOCK + r"\.ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_BLOCK + r"\.ls_([12])\.gamma", r"blocks.\1.ls\2.gamma"),
    (_BLOCK + r"\.attn\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_BLOCK + r"\.attn\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"\.mlp\.c_fc\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"\.mlp\.c_proj\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"ln_post\.(weight|bias)", r"norm.\1"),
    (r"proj", "head.weight"),
)
# OpenAI's own files carry these three numbers; their towers were trained with QuickGELU.
_OPENAI = {"input_resolution", "context_length", "vocab_size"}


def _tower(names: Collection[str]) -> dict[str, str]:
    """Map the image tower's names, inside a full model or alone, to its own ones."""
    inner = {name: unwrap(name) for name in names}
    if any(name.startswith("visual.") for name in inner.values()):
        return {k: v.removeprefix("visual.") for k, v in inner.items() if v.startswith("visual.")}
    return inner


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of open_clip's VisionTransformer."""
    return {"conv1.weight", "class_embedding", "transformer.resblocks.0.attn.in_proj_weight"} <= set(
        _tower(names).values()
    )


def matches_trunk(names: Collection[str]) -> bool:
    """Return whether these are the names of an open_clip model around a timm ViT."""
    return any(unwrap(name).startswith("visual.trunk.") for name in names)


def read(contents: Contents) -> Checkpoint:
    """Read a VisionTransformer: eps 1e-5, patches flattened as (channel, row, column), position for the class too."""
    names = _tower(contents.tensors)
    tower = {name: contents.tensors[name] for name in names}
    state, renamed = rename(tower, _RULES, inner=names.__getitem__)
    state["cls_token"] = state["cls_token"].reshape(1, 1, -1)
    state["pos_embed"] = state["pos_embed"][None]
    notes = list(contents.notes)
    _channels_last(state)
    added = add_zero_bias(state, ["patch_embed.proj.weight"])
    if "head.weight" in state:
        state["head.weight"] = state["head.weight"].T
        added += add_zero_bias(state, ["head.weight"])
        notes.append("the projection into the joint space is read as the head")
    checkpoint = Checkpoint(
        state,
        "open_clip",
        stem_of(state),
        eps=1e-5,
        act="gelu",
        pool="tok",
        slots=("cls_token",),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        renamed=renamed,
        dropped=[name for name in contents.tensors if name not in names],
        added=added,
        notes=notes,
    )
    _apply_config(checkpoint, contents, _OPENAI.issubset(map(unwrap, contents.tensors)))
    return checkpoint


def _channels_last(state: State) -> None:
    """Turn the patch order of the linear stem, (c p q), into ours: norm and projection together."""
    weight = state["patch_embed.proj.weight"]
    if weight.ndim == 4:
        return
    side = patch_side(weight.shape[1])
    state["patch_embed.proj.weight"] = rearrange(weight, "d (c p q) -> d c p q", p=side, q=side)
    for leaf in ("weight", "bias"):
        name = f"patch_embed.norm_in.{leaf}"
        if name in state:
            state[name] = rearrange(state[name], "(c p q) -> (p q c)", p=side, q=side)


# What a vision_cfg may say that is in the tensors, or does not matter for a trained tower.
_HARMLESS = {
    *("layers", "width", "mlp_ratio", "patch_size", "ls_init_value", "patch_dropout", "no_ln_pre", "output_tokens"),
    *("input_patchnorm", "pos_embed_type", "final_ln_after_pool", "attn_pooler_queries", "attn_pooler_heads"),
    *("n_queries", "timm_model_pretrained"),
}


def _apply_config(checkpoint: Checkpoint, contents: Contents, openai: bool) -> None:
    """Take from `open_clip_config.json` what the tensors do not say. Raises `DataError` for what dpn cannot hold."""
    model = contents.config.get("model_cfg", contents.config)
    vision = dict(model.get("vision_cfg", {}))
    pooling = [vision.pop(key, None) for key in ("pool_type", "global_average_pool", "attentional_pool")]
    if pooling[0] not in (None, "tok") or pooling[1] or pooling[2]:
        raise DataError("an open_clip tower that does not pool by its class token; dpn reads pool_type 'tok'")
    norm, act = vision.pop("norm_kwargs", None) or {}, vision.pop("act_kwargs", None) or {}
    head_width, image = vision.pop("head_width", None), vision.pop("image_size", None)
    unsupported = [key for key, value in vision.items() if value and key not in _HARMLESS]
    unsupported += [key for key in (*norm, *act) if key not in ("eps", "approximate")]
    if unsupported:
        raise DataError(f"an open_clip tower with {', '.join(unsupported)} in its vision_cfg, which dpn does not know")
    patch = checkpoint.state["patch_embed.proj.weight"].shape[-2:]
    if "quick_gelu" in model or openai:
        checkpoint.act = "quick_gelu" if model.get("quick_gelu", openai) else "gelu"
    if act.get("approximate") == "tanh":
        checkpoint.act = "gelu_tanh"
    checkpoint.eps = norm.get("eps", checkpoint.eps)
    if image is not None:
        height, width = (image, image) if isinstance(image, int) else image
        checkpoint.grid = height // patch[0], width // patch[1]
    described = "vision_cfg" in model
    width = checkpoint.state["patch_embed.proj.weight"].shape[0]
    head_width = head_width or 64  # open_clip's default
    checkpoint.heads = width // head_width if width % head_width == 0 else None
    if not described and not openai:
        checkpoint.assumed |= {"eps": "eps 1e-5", "act": "erf GELU (a bare file does not say QuickGELU)"}
        checkpoint.assumed |= {"pool": "pool=tok", "heads": "64 features a head"}
    inputs = contents.config.get("preprocess_cfg", {})
    if "mean" in inputs and "std" in inputs:
        checkpoint.mean, checkpoint.std = tuple(inputs["mean"]), tuple(inputs["std"])
    else:
        checkpoint.assumed["mean"] = "CLIP's mean and std"


def read_trunk(contents: Contents) -> Checkpoint:
    """Read the timm ViT inside an open_clip model; its own head into the joint space is left aside."""
    names = {name: unwrap(name).removeprefix("visual.trunk.") for name in contents.tensors}
    trunk = {name: our_name for name, our_name in names.items() if unwrap(name).startswith("visual.trunk.")}
    vision = contents.config.get("model_cfg", {}).get("vision_cfg", {})
    config: dict[str, Any] = {"architecture": vision["timm_model_name"]} if "timm_model_name" in vision else {}
    if pool := vision.get("timm_pool"):
        config["global_pool"] = {"tok": "token"}.get(pool, pool)
    inner = Contents(
        {our_name: contents.tensors[name] for name, our_name in trunk.items()},
        config=config | contents.config.get("preprocess_cfg", {}),
        notes=contents.notes,
    )
    checkpoint = timm_vit.read(inner)
    return replace(
        checkpoint,
        format="open_clip (timm trunk)",
        renamed={name: checkpoint.renamed.get(our_name, our_name) for name, our_name in trunk.items()},
        dropped=[*checkpoint.dropped, *(name for name in contents.tensors if name not in trunk)],
    )
