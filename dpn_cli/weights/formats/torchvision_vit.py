"""torchvision's VisionTransformer."""

from __future__ import annotations

from collections.abc import Collection

from dpn_cli.weights.formats.state_dict import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Checkpoint,
    Contents,
    rename,
    stem_of,
    unwrap,
)

_LAYER = r"encoder\.layers\.encoder_layer_(\d+)"
_RULES = (
    (r"conv_proj\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"class_token", "cls_token"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (_LAYER + r"\.ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_LAYER + r"\.self_attention\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_LAYER + r"\.self_attention\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    # Layers 0 and 3 of a Sequential; files from before torchvision 0.13 name them linear_1 and linear_2.
    (_LAYER + r"\.mlp\.(?:0|linear_1)\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_LAYER + r"\.mlp\.(?:3|linear_2)\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"encoder\.ln\.(weight|bias)", r"norm.\1"),
    (r"heads\.(pre_logits|head)\.(weight|bias)", r"\1.\2"),
)


def matches(names: Collection[str]) -> bool:
    """Return whether these are the names of torchvision's VisionTransformer."""
    return {"conv_proj.weight", "encoder.layers.encoder_layer_0.ln_1.weight"} <= {unwrap(name) for name in names}


def read(contents: Contents) -> Checkpoint:
    """Read a VisionTransformer: eps 1e-6, erf GELU, ImageNet's mean and std, pre-logits with tanh where present."""
    state, renamed = rename(contents.tensors, _RULES)
    return Checkpoint(
        state,
        "torchvision",
        stem_of(state),
        eps=1e-6,
        act="gelu",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        renamed=renamed,
        pool="tok",
        slots=("cls_token",),
        assumed={
            "eps": "eps 1e-6 (torchvision's default norm_layer; the file does not say)",
            "mean": "ImageNet's mean and std, as for all of torchvision's weights",
        },
        notes=contents.notes,
    )
