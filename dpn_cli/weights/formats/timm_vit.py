"""timm's VisionTransformer and NaFlexViT: state dicts, saved folders, and models that timm builds itself."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from dpn_cli.arch import Act, Pool
from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DataError
from dpn_cli.weights.formats import dtn_vit
from dpn_cli.weights.formats.state_dict import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Checkpoint,
    Contents,
    State,
    add_zero_bias,
    pack_swiglu,
    rename,
    rows_first,
    stem_of,
    unwrap,
)

# Where `dpn_cli.weights.convert` puts the description that timm keeps in a config.json.
KEY = "timm"

_ACTS: dict[str, Act] = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
# By what timm pools, and whether there is a class token.
_POOLS: dict[tuple[str, bool], Pool] = {
    ("token", True): "tok",
    ("avg", False): "gap",
    ("avg", True): "gap",
    ("map", False): "map",
}
# NaFlexViT's embedding, as classic names. Its position embedding covers patches only.
_NAFLEX = (
    (r"embeds\.norm_input\.(weight|bias)", r"patch_embed.norm_in.\1"),
    (r"embeds\.(proj|norm)\.(weight|bias)", r"patch_embed.\1.\2"),
    (r"embeds\.(pos_embed|cls_token|reg_token)", r"\1"),
)


# The names of DINOv2's own code, where they are not timm's.
_DINOV2 = (
    (r"register_tokens", "reg_token"),
    (r"blocks\.(\d+)\.mlp\.w12\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (r"blocks\.(\d+)\.mlp\.w3\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
)


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of timm's VisionTransformer, with norms of a weight and a bias."""
    inner = {unwrap(name) for name in names}
    others = any(re.fullmatch(r"blocks\.\d+\.norm[12]\.(?!weight$|bias$).+", name) for name in inner)
    return {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= inner and not others


def matches_naflex(names: Collection[str]) -> bool:
    """Return whether these are the names of timm's NaFlexViT."""
    return {"embeds.proj.weight", "blocks.0.attn.qkv.weight"} <= {unwrap(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a VisionTransformer's state dict; a `config.json` next to it says what the tensors do not."""
    state, renamed = rename(contents.tensors, _DINOV2)
    if not contents.config and KEY not in contents.metadata and dtn_vit.is_baseline(state):
        return dtn_vit.read_baseline(contents)
    pack_swiglu(state, renamed, "fc1_g", "fc1_x")
    checkpoint = Checkpoint(state, "timm", stem_of(state), 1e-6, "gelu", renamed=renamed, slots=None)
    if state.pop("mask_token", None) is not None:
        checkpoint.dropped.append("mask_token")
        checkpoint.slots = ("cls_token",)  # DINOv2's own code: its registers have no positions
    return _apply_description(checkpoint, contents)


def read_naflex(contents: Contents) -> Checkpoint:
    """Read a NaFlexViT's state dict; its linear projection takes patches with the channel last."""
    state, renamed = rename(contents.tensors, _NAFLEX)
    notes = []
    if state["patch_embed.proj.weight"].ndim == 2:
        state["patch_embed.proj.weight"] = rows_first(state["patch_embed.proj.weight"])
    rows, columns = (state.pop(f"embeds.pos_embed_{axis}", None) for axis in "yx")
    if rows is not None and columns is not None:
        state["pos_embed"] = rows[:, :, None] + columns[:, None]
        notes.append("the factorized position embedding was summed into one table")
    grid = None
    if "pos_embed" in state:
        _, height, width, _ = state["pos_embed"].shape
        grid, state["pos_embed"] = (height, width), state["pos_embed"].flatten(1, 2)
    pack_swiglu(state, renamed, "fc1_g", "fc1_x")
    return _apply_description(
        Checkpoint(state, "timm NaFlexViT", stem_of(state), 1e-6, "gelu", grid=grid, renamed=renamed, notes=notes),
        contents,
    )


def _apply_description(checkpoint: Checkpoint, contents: Contents) -> Checkpoint:
    """Take from `config.json` what it says about the network; say what is assumed where it says nothing."""
    checkpoint.notes += contents.notes
    state, assumed = checkpoint.state, checkpoint.assumed
    config = contents.config or json.loads(contents.metadata.get(KEY, "{}"))
    if "norm_pre.weight" in state:
        checkpoint.added += add_zero_bias(state, ["patch_embed.proj.weight"])
    for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        weights = [name for name in state if name.endswith(f"{layer}.weight") and name.startswith("blocks.")]
        if not any(f"{name.removesuffix('weight')}bias" in state for name in weights):  # else the file is incomplete
            checkpoint.added += add_zero_bias(state, weights)
    if name := config.get("architecture"):
        arguments = dict(config.get("model_args") or {})
        if config.get("global_pool") is not None:
            arguments.setdefault("global_pool", config["global_pool"])
        apply_facts(checkpoint, build_empty(name, arguments))
        checkpoint.eps = config.get("norm_eps", checkpoint.eps)
        checkpoint.norm = config.get("norm", checkpoint.norm)
        checkpoint.notes.append(f"eps, GELU, heads and pooling are those of timm's {name}, which the description names")
    else:
        _assume(checkpoint)
    inputs = config.get("pretrained_cfg", config)
    if "mean" in inputs and "std" in inputs:
        checkpoint.mean, checkpoint.std = tuple(inputs["mean"]), tuple(inputs["std"])
    elif checkpoint.placement == "subln":
        checkpoint.mean, checkpoint.std = IMAGENET_MEAN, IMAGENET_STD
        assumed["mean"] = "ImageNet's mean and std (those of BEiT-3, timm's networks with Sub-LN)"
    else:
        assumed["mean"] = "mean = std = 0.5 on pixels in [0, 1]"
    return checkpoint


def _assume(checkpoint: Checkpoint) -> None:
    """Tell from the names of a bare file what they say, and assume the rest; says so."""
    state, assumed = checkpoint.state, checkpoint.assumed
    if _norms_inside(state):
        checkpoint.placement = "subln"
    if "blocks.0.norm1.bias" not in state:
        checkpoint.norm, checkpoint.norm_options = "rms", _rms_options(state)
        checkpoint.eps = 1e-5  # that of AIMv2, timm's only networks with these norms
    if "norm_pre.weight" in state or checkpoint.placement == "subln":
        checkpoint.eps = 1e-5  # that of timm's CLIP models and BEiT-3, the only ones with these norms
    assumed["eps"] = f"eps {checkpoint.eps:g} (a bare timm file does not say)"
    is_swiglu = len(state["blocks.0.mlp.fc1.weight"]) == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]
    assumed["act"] = f"{'SwiGLU with the gate first' if is_swiglu else 'erf GELU'}, in pre-norm blocks"
    if "cls_token" in state and "fc_norm.weight" in state:
        checkpoint.pool = "gap"
        assumed["pool"] = "pool=gap over the patches, next to a class token (its final norm follows the pooling)"
    elif "cls_token" in state:
        assumed["pool"] = "pool=tok"
    if checkpoint.format != "timm":
        assumed["positions"] = "no rotary positions"
        assumed["order"] = "patches with the channel last, timm's default for its linear projection"


def _rms_options(state: State) -> NormOptions:
    """Return where else a network with RMSNorm in its blocks has it, by norms without a bias."""
    return NormOptions(
        final="same" if "norm.weight" in state and "norm.bias" not in state else "ln",
        stem="same" if "patch_embed.norm.weight" in state and "patch_embed.norm.bias" not in state else "ln",
    )


def _norms_inside(state: State) -> bool:
    """Tell by names whether blocks have Sub-LN's norms inside attention and MLP. Raises `DataError` for one of them."""
    attention, mlp = (
        any(re.fullmatch(rf"blocks\.\d+\.{layer}\.norm\.weight", name) for name in state) for layer in ("attn", "mlp")
    )
    if attention != mlp:
        raise DataError(f"a norm inside its {'attention' if attention else 'MLP'} alone; dpn's Sub-LN has one in both")
    return attention


def build_empty(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a timm model without memory for its weights. Raises `DataError` when timm has no such ViT."""
    import timm

    if not timm.is_model(name):
        raise DataError(f"its description names {name!r}, which timm does not have; pass a copy of the weights alone")
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"timm cannot build {name} with the arguments that its description names ({reason})") from error
    return model


def apply_facts(checkpoint: Checkpoint, model: Any) -> None:
    """Take eps, GELU, heads, grid, pooling and the norms' placement from a timm model's own modules.

    Raises `DataError` for another kind of model, or one that computes what `dpn_cli.model.vit` does not.
    """
    from timm.layers import Attention, GluMlp, Mlp, PatchEmbed, RmsNorm, SwiGLU
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer

    kind = type(model)
    block: Any = next(iter(getattr(model, "blocks", ())), None)
    kinds = VisionTransformer, VisionTransformerDistilled, NaFlexVit
    if kind not in kinds or type(block) not in (Block, ResPostBlock):
        block_type = f" of {type(block).__name__}s" if block is not None else ""
        raise DataError(
            f"a {kind.__name__}{block_type}; dpn reads timm's VisionTransformer and NaFlexVit of Blocks and "
            "ResPostBlocks"
        )
    act, heads = _ACTS.get(type(block.mlp.act).__name__), block.attn.num_heads
    has_gate = type(block.mlp) is SwiGLU or (type(block.mlp) is GluMlp and not block.mlp.gate_last)
    is_swiglu = has_gate and type(block.mlp.act) is nn.SiLU
    has_class_token = getattr(model, "cls_token", None) is not None or kind is VisionTransformerDistilled
    if kind is NaFlexVit:
        has_class_token = model.embeds.cls_token is not None
    pool = _POOLS.get((model.global_pool, has_class_token))
    norm, stem = type(block.norm1), getattr(model, "patch_embed", None)
    norms_inside = [not isinstance(layer.norm, nn.Identity) for layer in (block.attn, block.mlp)]
    is_post_norm = type(block) is ResPostBlock
    unsupported = {
        f"{type(stem).__name__} before its blocks": kind is not NaFlexVit and type(stem) is not PatchEmbed,
        f"{type(block.attn).__name__} in its blocks": type(block.attn) is not Attention,
        "an RMSNorm after its pooling": type(model.fc_norm) is RmsNorm,
        f"{type(block.mlp).__name__}s": type(block.mlp) is not Mlp and not is_swiglu,
        f"the activation {type(block.mlp.act).__name__}": act is None and not is_swiglu,
        f"the norm {norm.__name__} in its blocks": not issubclass(norm, nn.LayerNorm) and norm is not RmsNorm,
        "norms of queries and keys": not isinstance(block.attn.q_norm, nn.Identity),
        "a norm inside its attention or its MLP alone": any(norms_inside) and not all(norms_inside),
        "norms inside its attention and MLP and after them": is_post_norm and any(norms_inside),
        f"pooling {model.global_pool!r} over {model.num_prefix_tokens} tokens next to the patches": pool is None
        or model.pool_include_prefix,
        "another number of heads in its pooling": model.attn_pool is not None and model.attn_pool.num_heads != heads,
        "rotary positions": getattr(model, "rope", None) is not None,
        "patches with the channel first": kind is NaFlexVit and not model.embeds.channels_last,
        "patches that are not square": kind is NaFlexVit and len(set(model.embeds.patch_size)) > 1,
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise DataError(f"its model has {feature}; dpn's has not")
    checkpoint.act, checkpoint.eps, checkpoint.heads = act or "gelu", block.norm1.eps, heads
    if norm is RmsNorm:
        checkpoint.norm, checkpoint.norm_options = "rms", _rms_options(checkpoint.state)
    if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
        checkpoint.norm_options = checkpoint.norm_options.model_copy(update={"final": "none"})
    if is_post_norm:
        checkpoint.placement = "post,post"
        checkpoint.norm_options = checkpoint.norm_options.model_copy(update={"post": "branch"})
    elif all(norms_inside):
        checkpoint.placement = "subln"
    checkpoint.pool = cast(Pool, pool)
    if kind is not NaFlexVit:
        checkpoint.grid = tuple(model.patch_embed.grid_size)
