"""Hugging Face transformers' ViT and its relatives: ViT, MAE, MSN, DeiT, DINOv2, BEiT and I-JEPA."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dpn_cli.arch import Act
from dpn_cli.errors import DataError
from dpn_cli.weights.formats.state_dict import (
    Checkpoint,
    Contents,
    add_zero_bias,
    fuse_qkv,
    pack_swiglu,
    rename,
    stem_of,
    unwrap,
)

ACTS: dict[str, Act] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
# The epsilon of a configuration that does not state one, by model type.
EPS = {
    "vit": 1e-12,
    "vit_mae": 1e-12,
    "vit_msn": 1e-6,
    "deit": 1e-12,
    "dinov2": 1e-6,
    "dinov2_with_registers": 1e-6,
    "beit": 1e-12,
    "ijepa": 1e-6,
}
_PREFIXES = ("vit.", "deit.", "dinov2_with_registers.", "dinov2.", "beit.", "ijepa.")
# save_pretrained writes encoder.layer.N; the modules of version 5 are called layers.N.
_LAYER = r"(?:encoder\.layer|layers)\.(\d+)"
_LEAF = r"(weight|bias)"
_RULES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (rf"embeddings\.patch_embeddings\.projection\.{_LEAF}", r"patch_embed.proj.\1"),
    (rf"{_LAYER}\.attention\.attention\.(query|key|value)\.{_LEAF}", r"blocks.\1.attn.\2.\3"),
    (rf"{_LAYER}\.attention\.q_proj\.{_LEAF}", r"blocks.\1.attn.query.\2"),
    (rf"{_LAYER}\.attention\.k_proj\.{_LEAF}", r"blocks.\1.attn.key.\2"),
    (rf"{_LAYER}\.attention\.v_proj\.{_LEAF}", r"blocks.\1.attn.value.\2"),
    (rf"{_LAYER}\.attention\.(?:output\.dense|o_proj)\.{_LEAF}", r"blocks.\1.attn.proj.\2"),
    (rf"{_LAYER}\.(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.{_LEAF}", r"blocks.\1.mlp.fc1.\2"),
    (rf"{_LAYER}\.(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.{_LEAF}", r"blocks.\1.mlp.fc2.\2"),
    (rf"{_LAYER}\.mlp\.(gate_proj|up_proj)\.{_LEAF}", r"blocks.\1.mlp.\2.\3"),
    (rf"{_LAYER}\.(?:layernorm_before|norm1)\.{_LEAF}", r"blocks.\1.norm1.\2"),
    (rf"{_LAYER}\.(?:layernorm_after|norm2)\.{_LEAF}", r"blocks.\1.norm2.\2"),
    (rf"{_LAYER}\.(?:layer_scale([12])\.lambda1|lambda_([12]))", r"blocks.\1.ls\2\3.gamma"),
    (rf"layernorm\.{_LEAF}", r"norm.\1"),
    (rf"pooler\.layernorm\.{_LEAF}", r"fc_norm.\1"),
    (rf"pooler\.dense\.{_LEAF}", r"pre_logits.\1"),
    (rf"(?:cls_)?classifier\.{_LEAF}", r"head.\1"),
    (rf"distillation_classifier\.{_LEAF}", r"head_dist.\1"),
)


def _inner(name: str) -> str:
    name = unwrap(name)
    return name.removeprefix(next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""))


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of transformers' ViT or of a relative."""
    return "embeddings.patch_embeddings.projection.weight" in {_inner(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a ViT; `config.json` decides eps, GELU and heads, `preprocessor_config.json` the input range."""
    config = contents.config
    kind = config.get("model_type", "vit")
    _refuse_unknown(config, kind)
    state, renamed = rename(contents.tensors, _RULES, inner=_inner)
    if "cls_token" not in state and kind != "ijepa":  # Hiera, ViTPose, SegGPT, SAM: they name their patches alike
        raise DataError(
            "a transformers model without a class token; dpn reads its ViT, MAE, DeiT, DINOv2 and BEiT, and I-JEPA "
            "with its config.json"
        )
    dropped = [name for name in state if name == "embeddings.mask_token" or name.startswith("decoder.")]
    for name in dropped:
        del state[name]
    added = []
    if kind == "beit" or "fc_norm.weight" in state:
        added = add_zero_bias(state, [name for name in state if name.endswith("attn.key.weight")])
    fuse_qkv(state, renamed)
    pack_swiglu(state, renamed, "gate_proj", "up_proj")
    added += add_zero_bias(state, [name for name in state if name.endswith("attn.qkv.weight")])
    checkpoint = Checkpoint(
        state,
        "transformers",
        stem_of(state),
        eps=config.get("layer_norm_eps", EPS.get(kind, 1e-12)),
        act=ACTS[config.get("hidden_act", "gelu")],
        heads=config.get("num_attention_heads"),
        renamed=renamed,
        dropped=dropped,
        added=added,
        grid=grid_of(config),
        pool="gap" if kind == "ijepa" or "fc_norm.weight" in state else "tok",
        slots=tuple(name for name in ("cls_token", "dist_token") if name in state),
        notes=list(contents.notes),
    )
    _adapt_relatives(checkpoint)
    if not config:
        is_dino = any(name.endswith("ls1.gamma") for name in state) and "fc_norm.weight" not in state
        checkpoint.eps = EPS["dinov2"] if is_dino else checkpoint.eps
        owner = "DINOv2's" if is_dino else "ViTConfig's"
        checkpoint.assumed["eps"] = f"eps {checkpoint.eps:g}, {owner} default (no config.json next to the file)"
        checkpoint.assumed["act"] = f"erf GELU, {owner} default"
    apply_inputs(checkpoint, contents.inputs)
    return checkpoint


def _refuse_unknown(config: dict[str, Any], kind: str) -> None:
    """Raise `DataError` for a configuration of another network."""
    act, pooler_act = config.get("hidden_act", "gelu"), config.get("pooler_act", "tanh")
    if kind not in EPS or act not in ACTS or pooler_act != "tanh":
        raise DataError(
            f"a transformers model of type {kind!r}, hidden_act {act!r} and pooler_act {pooler_act!r}; dpn reads "
            f"{', '.join(map(repr, EPS))}, the activations {', '.join(ACTS)}, and 'tanh'"
        )
    if kind == "beit" and not config.get("use_absolute_position_embeddings", False):
        raise DataError(
            "a BEiT with relative positions in its attention, which dpn's ViT has not; one with "
            "use_absolute_position_embeddings is read"
        )


def _adapt_relatives(checkpoint: Checkpoint) -> None:
    """Describe in our terms what DeiT, DINOv2 and BEiT have that a ViT lacks."""
    state = checkpoint.state
    if "norm.weight" not in state and "fc_norm.weight" not in state:  # a BEiT that averages without a norm
        checkpoint.norm_options = checkpoint.norm_options.model_copy(update={"final": "none"})
    if "dist_token" in state and "head_dist.weight" not in state:
        # Its class token alone is read, so the other one is a register.
        state["reg_token"] = state.pop("dist_token")
        checkpoint.slots = ("cls_token", "reg_token")
        checkpoint.notes.append("without a head of its own, the distillation token is read as a register")
    head, width = state.get("head.weight"), state["cls_token"].shape[-1] if "cls_token" in state else 0
    if head is not None and width and head.shape[1] == 2 * width:
        checkpoint.dropped += [name for name in ("head.weight", "head.bias") if state.pop(name, None) is not None]
        checkpoint.notes.append("DINOv2's classifier was left out: it reads the mean of the patches, too")


def apply_inputs(
    checkpoint: Checkpoint, inputs: dict[str, Any], assumption: str = "mean = std = 0.5 on pixels in [0, 1]"
) -> None:
    """Take the input range from `preprocessor_config.json`; where it is silent, note the checkpoint's as assumed."""
    if "image_mean" in inputs and "image_std" in inputs:
        checkpoint.mean, checkpoint.std = tuple(inputs["image_mean"]), tuple(inputs["image_std"])
    else:
        checkpoint.assumed["mean"] = assumption


def grid_of(config: dict[str, Any]) -> tuple[int, int] | None:
    """Return the patches per column and row that a configuration states."""
    if "image_size" not in config or "patch_size" not in config:
        return None
    image, patch = (
        (size, size) if isinstance(size, int) else tuple(size) for size in (config["image_size"], config["patch_size"])
    )
    return image[0] // patch[0], image[1] // patch[1]
