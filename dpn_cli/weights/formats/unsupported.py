"""Formats that are known and not read, with the reason, which helps more than a list of tensors."""

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
        "a timm ViT of parallel blocks",
        r"(^|\.)blocks\.\d+\.(attns\.\d+|in_proj)\.",
        "its blocks compute attention and MLP side by side, or several of each",
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
        "a ViT of DTN's vit_norm.py with another norm than LayerNorm",
        r"(^|\.)transformer\.layers\.\d+\.0\.norm\.(?!weight$|bias$)",
        "only its attention has that norm, and DTN's stops at the class token; networks of vit_norm_mix.py are read",
    ),
    (
        "a ViT of DTN's vit_norm_mix.py with batch norm, PowerNorm or ScaleNorm",
        r"(^|\.)blocks\.\d+\.norm1\.(bn\.running_mean|running_phi|scale)$",
        "only its first blocks have that norm and the others LayerNorm; dpn mixes two norms for DTN alone",
    ),
    (
        "a PVT, Swin or CSWin with norms of DTN's or SLAB's code",
        r"(^|\.)(block\d|stage\d|layers\.\d+\.blocks)\.\d+\.norm[12]\.(?!weight$|bias$)",
        "it is a hierarchy, not a ViT trunk",
    ),
    (
        "a DeiT of SLAB with simplified linear attention",
        r"(^|\.)blocks\.\d+\.attn\.positional_encoding$",
        "its attention has no softmax; its DeiTs with PRepBN alone are read",
    ),
    (
        "BEiT-3's own checkpoint",
        r"(^|\.)beit3\.",
        "it holds text layers too; timm reads it, so save the state dict of timm's beit3 model",
    ),
    (
        "a ViT whose blocks have other norms than LayerNorm",
        r"(^|\.)blocks\.\d+\.norm[12]\.(?!weight$|bias$)",
        "its names do not say which; a file that dpn wrote says so in its metadata",
    ),
    (
        "a Keras file",
        r"(^|/)(gamma|beta)(:0)?$",
        "its layers' eps 1e-3 and trunk are not those of a ViT in one of the formats read",
    ),
)


def reason_against(names: Collection[str]) -> str | None:
    """Return what a file of these names is and why it is not read, or None when it is not a known one."""
    for format_name, pattern, reason in REFUSED:
        if any(re.search(pattern, name) for name in names):
            return f"{format_name}: {reason}"
    return None
