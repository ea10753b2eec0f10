"""Every ViT that timm can build, shrunk and with random weights: read by its description, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import model_entrypoint

from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturb
from support.weight_files import relative_error

FILES = ("vision_transformer", "deit", "naflexvit")
# What a refusal says, by the beginning of the names that it is for.
REFUSED = {
    **dict.fromkeys(("vit_base_patch16_xp", "vit_large_patch14_xp", "vit_huge_patch14_xp"), "parallel blocks"),
    **dict.fromkeys(("vit_pwee", "vit_dpwee", "vit_base_patch16_18x2", "vit_small_patch16_18x2"), "parallel blocks"),
    **dict.fromkeys(("vit_dwee", "vit_dlittle"), "DiffAttention"),
    "test_vit3": "pooling 'map' over 1 tokens",
    "test_vit4": "an RMSNorm after its pooling",
}


def names() -> list[str]:
    return [name for name in timm.list_models() if model_entrypoint(name).__module__.rpartition(".")[2] in FILES]


def shrink(name: str) -> dict[str, Any]:
    """Return arguments that make a model small, and leave all its choices as they are."""
    with torch.device("meta"):
        model: Any = timm.create_model(name, depth=1)
    patch = model.embeds.patch_size[0] if hasattr(model, "embeds") else model.patch_embed.patch_size[0]
    heads = 3
    arguments = {"depth": 1, "num_heads": heads, "embed_dim": 16 * heads, "num_classes": 5}
    return arguments | ({"pos_embed_grid_size": (4, 4)} if hasattr(model, "embeds") else {"img_size": 4 * patch})


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
@torch.no_grad()
def test_every_vit_of_timm_is_read_or_refused_by_name(name: str, tmp_path: Any) -> None:
    arguments = shrink(name)
    theirs = perturb(timm.create_model(name, **arguments)).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    description = {"architecture": name, "model_args": arguments, "global_pool": theirs.global_pool}
    (tmp_path / "config.json").write_text(json.dumps(description))
    reason = next((text for start, text in REFUSED.items() if name.startswith(start)), None)
    if reason:
        with pytest.raises(DataError, match=reason):
            load_backbone(checkpoint=str(tmp_path), image_size=None)
        return
    ours = load_backbone(checkpoint=str(tmp_path), image_size=None, num_classes=5, head="load").eval()
    images = torch.randn(2, 3, *ours.config.image_size)
    assert relative_error(ours.forward_features(images), theirs.forward_features(images)) < 1e-5
    assert relative_error(ours(images), theirs(images)) < 1e-5


def test_most_pretrained_weights_are_read() -> None:
    pretrained = {name: len(timm.list_pretrained(f"{name}.*")) for name in names()}
    refused = sum(count for name, count in pretrained.items() if name.startswith(tuple(REFUSED)))
    assert refused < 0.05 * sum(pretrained.values())
