"""Bare state dicts of transformers' other vision models: read where they are a ViT, else refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.weight_files import relative_error

TINY: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
PAIRS: dict[str, Any] = TINY | {"image_size": [32, 32], "patch_size": [8, 8]}
STAGES: dict[str, Any] = {"depths": [1, 1], "num_heads": [1, 2], "image_size": [32, 32]}
HIERA: dict[str, Any] = {"depths": [1] * 4, "num_heads": [1] * 4, "embed_dim": 16, "image_size": [64, 64]}
WHOLE = "not the tensors of one whole ViT"


def build(name: str, config: dict[str, Any]) -> Any:
    """Build a model from its class's own configuration."""
    kind: Any = getattr(hf, name)
    return kind(kind.config_class(**config))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("IJepaModel", TINY, "a transformers model without a class token"),
        (
            "HieraModel",
            HIERA,
            "a transformers model without a class token",
        ),
        ("VitPoseBackbone", PAIRS, "a transformers model without a class token"),
        ("SwinModel", STAGES | {"embed_dim": 48, "patch_size": 2}, "a transformers model without a class token"),
        ("DeiTModel", TINY, "its 17 positions do not form a square grid"),
        ("YolosModel", PAIRS | {"patch_size": 8}, "its 116 positions do not form a square grid"),
        ("Dinov2Model", TINY, "blocks.0.mlp.fc1.weight is missing"),
        ("BeitModel", TINY, WHOLE),
        ("ViTForMaskedImageModeling", TINY | {"encoder_stride": 8}, WHOLE),
        ("ViltModel", TINY | {"vocab_size": 50}, WHOLE),
        ("VideoMAEModel", TINY, "a transformers model without a class token"),
        ("VivitModel", TINY | {"tubelet_size": [2, 8, 8]}, "its patch projection is not one of images"),
        ("DINOv3ViTModel", TINY, "not a format that dpn reads"),
        ("SiglipVisionModel", TINY, "not a format that dpn reads"),
        ("CLIPVisionModel", TINY, "not a format that dpn reads"),
    ],
)
def test_other_models_are_refused_in_one_line(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(build(name, config).state_dict(), tmp_path / "bare.pt")
    with pytest.raises(DataError, match=message) as caught:
        load_backbone(checkpoint=str(tmp_path / "bare.pt"), stem=None, image_size=None)
    assert caught.value.exit_code == 3
    assert str(tmp_path / "bare.pt") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "asked for" not in str(caught.value)


@pytest.mark.parametrize("name", ["ViTModel", "ViTMSNModel", "FlavaImageModel", "DPTModel"])
@torch.no_grad()
def test_models_that_are_a_vit_give_its_tokens(name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"layer_norm_eps": 1e-12} | ({"backbone_out_indices": [0]} if name == "DPTModel" else {})
    theirs = perturb(build(name, TINY | more))
    torch.save(theirs.state_dict(), tmp_path / "bare.pt")
    actual = load_backbone(checkpoint=str(tmp_path / "bare.pt"), stem=None, image_size=None).eval()
    image = torch.randn(2, 3, 32, 32)
    assert relative_error(actual.forward_features(image), theirs(image).last_hidden_state) < 1e-5
    assert any("eps 1e-12" in fact for fact in actual.report.assumed)


@torch.no_grad()
def test_a_masked_autoencoders_encoder_gives_the_tokens_of_unmasked_patches(tmp_path: Path) -> None:
    theirs = perturb(build("ViTMAEModel", TINY | {"mask_ratio": 0.0}))
    torch.save(theirs.state_dict(), tmp_path / "bare.pt")
    actual = load_backbone(checkpoint=str(tmp_path / "bare.pt"), stem=None, image_size=None).eval()
    image = torch.randn(2, 3, 32, 32)
    result = theirs(image)
    order = result.ids_restore[..., None].expand(-1, -1, 192)  # it shuffles the patches before it masks the last ones
    patches = result.last_hidden_state[:, 1:].gather(1, order)
    assert (
        relative_error(actual.forward_features(image), torch.cat([result.last_hidden_state[:, :1], patches], 1)) < 1e-5
    )
