"""Hugging Face transformers' DINOv3 ViT: rotary positions, registers, LayerScale and, in some sizes, SwiGLU."""

from __future__ import annotations

from collections.abc import Collection

from dpn_cli.errors import DataError
from dpn_cli.model.rotary import THETA
from dpn_cli.weights.formats.state_dict import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Checkpoint,
    Contents,
    add_zero_bias,
    fuse_qkv,
    pack_swiglu,
    rename,
    stem_of,
    unwrap,
)
from dpn_cli.weights.formats.transformers_vit import ACTS, apply_inputs, grid_of

_LEAF = r"(weight|bias)"
_LAYER = r"layer\.(\d+)"
_RULES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (rf"embeddings\.patch_embeddings\.{_LEAF}", r"patch_embed.proj.\1"),
    (rf"{_LAYER}\.attention\.q_proj\.{_LEAF}", r"blocks.\1.attn.query.\2"),
    (rf"{_LAYER}\.attention\.k_proj\.{_LEAF}", r"blocks.\1.attn.key.\2"),
    (rf"{_LAYER}\.attention\.v_proj\.{_LEAF}", r"blocks.\1.attn.value.\2"),
    (rf"{_LAYER}\.attention\.o_proj\.{_LEAF}", r"blocks.\1.attn.proj.\2"),
    (rf"{_LAYER}\.(norm[12])\.{_LEAF}", r"blocks.\1.\2.\3"),
    (rf"{_LAYER}\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (rf"{_LAYER}\.mlp\.gate_proj\.{_LEAF}", r"blocks.\1.mlp.gate_proj.\2"),
    (rf"{_LAYER}\.mlp\.up_proj\.{_LEAF}", r"blocks.\1.mlp.up_proj.\2"),
    (rf"{_LAYER}\.mlp\.down_proj\.{_LEAF}", r"blocks.\1.mlp.fc2.\2"),
    (rf"norm\.{_LEAF}", r"norm.\1"),
)


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of transformers' DINOv3 ViT."""
    inner = {unwrap(name) for name in names}
    return {"embeddings.patch_embeddings.weight", "layer.0.layer_scale1.lambda1"} <= inner


def read(contents: Contents) -> Checkpoint:
    """Read a ViT; `config.json` decides eps, GELU, heads and size, `preprocessor_config.json` the input range."""
    config = contents.config
    has_gate = any(".mlp.gate_proj." in name for name in contents.tensors)
    act = config.get("hidden_act", "silu" if has_gate else "gelu")
    if config.get("model_type", "dinov3_vit") != "dinov3_vit" or act not in (["silu"] if has_gate else ACTS):
        raise DataError(
            f"a transformers model of type {config.get('model_type')!r} with hidden_act {act!r}; dpn reads "
            "'dinov3_vit' with a GELU, or with gates and silu"
        )
    if float(config.get("rope_theta", THETA)) != THETA:
        raise DataError(f"rotary positions with rope_theta {config['rope_theta']}; dpn's have {THETA:g}, as DINOv3's")
    state, renamed = rename(contents.tensors, _RULES)
    dropped = ["embeddings.mask_token"] if state.pop("embeddings.mask_token", None) is not None else []
    if "reg_token" in state and not state["reg_token"].shape[1]:
        del state["reg_token"]
    if not has_gate:  # the only layer in front of the last one
        for name in [name for name in state if ".mlp.up_proj." in name]:
            state[name.replace("up_proj", "fc1")] = state.pop(name)
        renamed = {theirs: ours.replace("mlp.up_proj", "mlp.fc1") for theirs, ours in renamed.items()}
    layers = ("attn.query", "attn.key", "attn.value")
    added = add_zero_bias(state, [name for name in state if name.endswith(tuple(f"{one}.weight" for one in layers))])
    fuse_qkv(state, renamed)
    pack_swiglu(state, renamed, "gate_proj", "up_proj")
    checkpoint = Checkpoint(
        state,
        "transformers DINOv3",
        stem_of(state),
        eps=config.get("layer_norm_eps", 1e-5),
        act="gelu" if has_gate else ACTS[act],
        heads=config.get("num_attention_heads"),
        grid=grid_of({"image_size": 224, "patch_size": 16, **config}) if config else None,
        pool="tok",
        posemb="rope",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        renamed=renamed,
        dropped=dropped,
        added=added,
        notes=list(contents.notes),
    )
    if not config:
        checkpoint.assumed["eps"] = "eps 1e-5, DINOv3's default (no config.json next to the file)"
        checkpoint.assumed["act"] = f"{'SwiGLU' if has_gate else 'erf GELU'}, DINOv3's default"
    apply_inputs(checkpoint, contents.inputs, "ImageNet's mean and std, as for DINOv3's weights")
    return checkpoint
