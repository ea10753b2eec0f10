"""Formats that are known and not read, with the reason: a better answer than a list of tensors."""

from __future__ import annotations

import re
from collections.abc import Collection

# What it is, a pattern that one of its names has, why it is not read and what to do.
REFUSED = (
    (
        "a vit-pytorch MAE or SimMIM wrapper",
        r"(^|\.)encoder\.to_patch_embedding\.",
        "it holds the encoder twice and a decoder; save its `encoder` alone",
    ),
    (
        "a vit-pytorch NaViT",
        r"(^|\.)pos_embed_(height|width)$",
        "its queries and keys are normalised and its pooling attends, which a ViT does not",
    ),
    (
        "a vit-pytorch NesT",
        r"(^|\.)to_patch_embedding\.\d\.g$",
        "it is a hierarchy of convolutions, not a ViT trunk",
    ),
    (
        "a ViT for small data sets (shifted patch tokens)",
        r"(^|\.)to_patch_tokens\.",
        "each of its patches is five shifted images deep and its attention is masked",
    ),
    (
        "an x-transformers ViT",
        r"(^|\.)patch_to_embedding\.",
        "its attention layers have options that the file does not state",
    ),
    (
        "an open_clip GenLIP or NaFlex tower",
        r"(^|\.)patch_embed\.norm_input\.",
        "its trunk is a language model's, with rotary positions",
    ),
    (
        "Gemma 4's image embedder",
        r"(^|\.)(patch_ln1|patch_dense|v\.patch_norm\.1)\.",
        "behind its DPN stem is a language model, no ViT trunk",
    ),
    (
        "a CViViT (CT-ViT, OmniTokenizer, LAPA)",
        r"(^|\.)to_patch_emb(_first_frame)?\.",
        "it is a model of videos or volumes",
    ),
    (
        "RadFM's three-dimensional ViT",
        r"(^|\.)vision_encoder\.to_patch_embedding\.",
        "its patches are volumes",
    ),
    (
        "a stem with a proj_layer alias",
        r"(^|\.)dual_patchnorm\.\d\.",
        "no released trunk goes with it, so its layout is not known",
    ),
    (
        "a Keras file",
        r"(^|/)(gamma|beta)(:0)?$",
        "its layers' eps 1e-3 and trunk are not those of a ViT in one of the formats read",
    ),
)


def reason_against(names: Collection[str]) -> str | None:
    """Return what a file of these names is and why it is not read, or None when it is not a known one."""
    for what, pattern, why in REFUSED:
        if any(re.search(pattern, name) for name in names):
            return f"{what}: {why}"
    return None
