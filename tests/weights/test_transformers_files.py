"""Bare state dicts of transformers' other vision models: read where they are a ViT, else refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from einops import rearrange

from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import load_backbone
from dpn_cli.weights.formats import read_file
from support.backbones import perturb
from support.weight_files import build_transformers_clip, relative_error

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
        ("YolosModel", PAIRS | {"patch_size": 8}, "its 116 positions do not form a square grid"),
        ("BeitModel", TINY, WHOLE),
        ("ViltModel", TINY | {"vocab_size": 50}, WHOLE),
        ("VideoMAEModel", TINY, "a transformers model without a class token"),
        ("VivitModel", TINY | {"tubelet_size": [2, 8, 8]}, "its patch projection is not one of images"),
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


@pytest.mark.parametrize("name", ["ViTModel", "ViTMSNModel", "FlavaImageModel", "DPTModel", "DeiTModel"])
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


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Dinov2Model", "eps 1e-06, DINOv2's default"),
        ("Dinov2WithRegistersModel", "eps 1e-06, DINOv2's default"),
        ("CLIPVisionModel", "QuickGELU, CLIP's default"),
        ("DINOv3ViTModel", "eps 1e-5, DINOv3's default"),
        ("SiglipVisionModel", "tanh GELU, SigLIP's default"),
    ],
)
@torch.no_grad()
def test_bare_files_of_relatives_give_their_tokens(name: str, fact: str, tmp_path: Path) -> None:
    theirs = perturb(build(name, TINY))
    torch.save(theirs.state_dict(), tmp_path / "bare.pt")
    actual = load_backbone(checkpoint=str(tmp_path / "bare.pt"), stem=None, image_size=32).eval()
    image = torch.randn(2, 3, 32, 32)
    expected = theirs(image)
    assert relative_error(actual.forward_head(actual.forward_features(image), True), expected.pooler_output) < 1e-5
    assert any(fact in text for text in actual.report.assumed)


def test_an_old_clip_file_with_numbers_of_its_positions_is_read(tmp_path: Path) -> None:
    state = build_transformers_clip(32).state_dict()
    numbers = {f"{tower}_model.embeddings.position_ids": torch.arange(17)[None] for tower in ("vision", "text")}
    torch.save({**state, **numbers}, tmp_path / "old.bin")
    source = read_file(tmp_path / "old.bin")
    source.heads = 3
    dropped = load_backbone(checkpoint=source, image_size=None).report.dropped
    assert set(numbers) <= set(dropped)


@torch.no_grad()
def test_siglip_2_of_any_aspect_ratio_takes_patches_with_the_channel_last(tmp_path: Path) -> None:
    shape = {key: value for key, value in TINY.items() if key != "image_size"}
    theirs = perturb(build("Siglip2VisionModel", shape | {"num_patches": 16}))
    theirs.save_pretrained(tmp_path)
    actual = load_backbone(checkpoint=str(tmp_path), stem=None, image_size=None).eval()
    image = torch.randn(2, 3, 32, 32)
    patches = rearrange(image, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8)
    expected = theirs(patches, torch.ones(2, 16, dtype=torch.long), torch.tensor([[4, 4]] * 2))
    assert relative_error(actual(image), expected.pooler_output) < 1e-5
    assert actual.config.pool == "map"


def test_a_classifier_of_dinov2_is_left_out_and_said(tmp_path: Path) -> None:
    build("Dinov2ForImageClassification", TINY | {"num_labels": 5}).save_pretrained(tmp_path)
    report = load_backbone(checkpoint=str(tmp_path), stem=None, image_size=None).report
    assert {"head.weight", "head.bias", "embeddings.mask_token"} <= set(report.dropped)
    assert any("it reads the mean of the patches, too" in note for note in report.notes)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("BeitModel", TINY, "a BEiT with relative positions in its attention"),
        ("Dinov2Model", TINY | {"hidden_act": "silu"}, "hidden_act 'silu'"),
        ("CLIPVisionModel", TINY | {"hidden_act": "relu"}, "hidden_act 'relu'; dpn reads gelu"),
        ("VitPoseBackbone", PAIRS, "a transformers model of type 'vitpose_backbone'"),
        ("DINOv3ViTModel", TINY | {"rope_theta": 50.0}, "rope_theta 50.0; dpn's have 100, as DINOv3's"),
        ("DINOv3ViTModel", TINY | {"hidden_act": "silu"}, "with hidden_act 'silu'"),
    ],
)
def test_saved_folders_of_other_networks_are_refused_in_one_line(
    name: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build(name, config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=message):
        load_backbone(checkpoint=str(tmp_path), stem=None, image_size=None)
