"""Hugging Face transformers' ViT: `ViTModel` and `ViTForImageClassification`, saved or as a state dict."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dpn_cli.arch import Act
from dpn_cli.errors import DataError
from dpn_cli.weights.formats.state_dict import Checkpoint, Contents, add_zero_bias, fuse_qkv, rename, stem_of, unwrap

_ACTS: dict[str, Act] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
# save_pretrained writes encoder.layer.N; the modules of version 5 are called layers.N.
_OLD_LAYER, _NEW_LAYER = r"encoder\.layer\.(\d+)", r"layers\.(\d+)"
_RULES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.(weight|bias)", r"patch_embed.proj.\1"),
    (_OLD_LAYER + r"\.attention\.attention\.(query|key|value)\.(weight|bias)", r"blocks.\1.attn.\2.\3"),
    (_OLD_LAYER + r"\.attention\.output\.dense\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_OLD_LAYER + r"\.intermediate\.dense\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_OLD_LAYER + r"\.output\.dense\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (_NEW_LAYER + r"\.attention\.q_proj\.(weight|bias)", r"blocks.\1.attn.query.\2"),
    (_NEW_LAYER + r"\.attention\.k_proj\.(weight|bias)", r"blocks.\1.attn.key.\2"),
    (_NEW_LAYER + r"\.attention\.v_proj\.(weight|bias)", r"blocks.\1.attn.value.\2"),
    (_NEW_LAYER + r"\.attention\.o_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_NEW_LAYER + r"\.mlp\.(fc[12])\.(weight|bias)", r"blocks.\1.mlp.\2.\3"),
    (rf"(?:{_OLD_LAYER}|{_NEW_LAYER})\.layernorm_before\.(weight|bias)", r"blocks.\1\2.norm1.\3"),
    (rf"(?:{_OLD_LAYER}|{_NEW_LAYER})\.layernorm_after\.(weight|bias)", r"blocks.\1\2.norm2.\3"),
    (r"layernorm\.(weight|bias)", r"norm.\1"),
    (r"pooler\.dense\.(weight|bias)", r"pre_logits.\1"),
    (r"classifier\.(weight|bias)", r"head.\1"),
)


def _inner(name: str) -> str:
    return unwrap(name).removeprefix("vit.")


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of transformers' ViT."""
    return "embeddings.patch_embeddings.projection.weight" in {_inner(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a ViT; `config.json` decides eps, GELU and heads, `preprocessor_config.json` the input range."""
    config, inputs = contents.config, contents.inputs
    kind = config.get("model_type", "vit")
    act = _ACTS.get(config.get("hidden_act", "gelu"))
    if kind != "vit" or act is None or config.get("pooler_act", "tanh") != "tanh":
        raise DataError(
            f"a transformers model of type {kind!r}, hidden_act {config.get('hidden_act', 'gelu')!r} and "
            f"pooler_act {config.get('pooler_act', 'tanh')!r}; dpn reads 'vit', {', '.join(_ACTS)} and 'tanh'"
        )
    state, renamed = rename(contents.tensors, _RULES, inner=_inner)
    if "cls_token" not in state:  # I-JEPA, Hiera, ViTPose, SegGPT, SAM: they name their patch embedding alike
        raise DataError(
            "a transformers model without a class token; dpn reads its ViTModel and ViTForImageClassification"
        )
    dropped = ["embeddings.mask_token"] if state.pop("embeddings.mask_token", None) is not None else []
    fuse_qkv(state, renamed)
    added = add_zero_bias(state, [name for name in state if name.endswith("attn.qkv.weight")])
    checkpoint = Checkpoint(
        state,
        "transformers",
        stem_of(state),
        eps=config.get("layer_norm_eps", 1e-12),
        act=act,
        heads=config.get("num_attention_heads"),
        renamed=renamed,
        dropped=dropped,
        added=added,
        grid=_grid(config),
        pool="tok",
        class_slot=True,
        notes=contents.notes,
    )
    if not config:
        checkpoint.assumed["eps"] = "eps 1e-12, ViTConfig's default (no config.json next to the file)"
        checkpoint.assumed["act"] = "erf GELU, ViTConfig's default"
    if "image_mean" in inputs and "image_std" in inputs:
        checkpoint.mean, checkpoint.std = tuple(inputs["image_mean"]), tuple(inputs["image_std"])
    else:
        checkpoint.assumed["mean"] = "mean = std = 0.5 on pixels in [0, 1]"
    return checkpoint


def _grid(config: dict[str, Any]) -> tuple[int, int] | None:
    """Return the patches per column and row that a configuration states."""
    if "image_size" not in config or "patch_size" not in config:
        return None
    image, patch = (
        (size, size) if isinstance(size, int) else tuple(size) for size in (config["image_size"], config["patch_size"])
    )
    return image[0] // patch[0], image[1] // patch[1]
