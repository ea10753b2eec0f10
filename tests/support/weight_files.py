"""Networks of other libraries, whose weight files are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn

from dpn_cli.weights.backbone import load_backbone
from dpn_cli.weights.formats import read_file

NATIVE, LARGER = 32, 48


Build = Callable[[int], Any]


def make_images(size: int = NATIVE) -> Tensor:
    """One image of full contrast and a flat one, on which the epsilon of a norm shows."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 0.01]).view(
        2, 1, 1, 1
    )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def timm_vit_builder(name: str = "vit_tiny_patch16_224", **arguments: Any) -> Build:
    """Return a builder of timm's ViT."""
    return lambda size: timm.create_model(
        name,
        img_size=size,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
        num_classes=5,
        **arguments,
    )


def naflex_builder(*, dual: bool, rows: int | None = None, positions: str = "learned") -> Build:
    """NaFlexViT with square grids, or as many rows of patches as given."""

    def build(size: int) -> Any:
        grid = (rows or size // 8, size // 8)
        model = NaFlexVit(
            NaFlexVitCfg(
                patch_size=8, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, pos_embed_grid_size=grid,
                pos_embed=positions, class_token=True, global_pool="token", embed_proj_type="conv",
            ),
            num_classes=5,
        )  # fmt: skip
        if dual:  # NaFlexVitCfg declares input_norm_layer and does not pass it on
            norm: Any = partial(nn.LayerNorm, eps=1e-6)
            model.embeds = NaFlexEmbeds(
                8,
                3,
                48,
                "linear",
                class_token=True,
                pos_embed_grid_size=grid,
                input_norm_layer=norm,
                proj_norm_layer=norm,
            )
        return model

    return build


def build_torchvision_vit(size: int) -> Any:
    """Build torchvision's ViT with a representation layer."""
    return torchvision.models.VisionTransformer(size, 8, 2, 3, 48, 96, num_classes=5, representation_size=48)


def build_transformers_vit(size: int) -> Any:
    """Build transformers' classifier."""
    return transformers.ViTForImageClassification(build_transformers_config(size))


def build_transformers_config(size: int) -> Any:
    """Build the config of transformers' ViT."""
    build: Any = transformers.ViTConfig
    return build(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=size, patch_size=8,
        num_labels=5,
    )  # fmt: skip


def hf_builder(name: str, **options: Any) -> Build:
    """Return a builder of a vision model of transformers from its class's own configuration."""

    def build(size: int) -> Any:
        kind: Any = getattr(transformers, name)
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 8}
        return kind(kind.config_class(**shape, intermediate_size=96, image_size=size, **options))

    return build


def build_transformers_clip(size: int) -> Any:
    """Build transformers' CLIP with both towers."""
    vision = hf_builder("CLIPVisionModel")(size).config.to_dict()
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
        "max_position_embeddings": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    build: Any = transformers.CLIPConfig
    return transformers.CLIPModel(build(vision_config=vision, text_config=text, projection_dim=5))


def build_transformers_base(size: int) -> Any:
    """Build transformers' ViT without a head."""
    return transformers.ViTModel(build_transformers_config(size))


def load_weight_file(path: Path, name: str, size: int, **arguments: Any) -> Any:
    """Load a file as the network that it holds."""
    source = read_file(path)
    classes = len(source.state["head.weight"]) if "head.weight" in source.state else 0
    if not name.startswith(("transformers", "vit-pytorch", "open_clip")):
        source.heads = 3  # these files do not say, and 48 is no multiple of 64
    return load_backbone(
        checkpoint=source, stem=None, image_size=size, num_classes=classes, head="load", **arguments
    ).eval()
