"""Every stem of Table 6 against flax layers, and its numerics at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange

from dpn_cli.arch import STEMS, Size, Stem
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.stem import PatchStem, stem_norm
from dpn_cli.model.vit import DPNViT
from support.goldens import Arrays, to_nchw

GOLDEN_NAMES: dict[Stem, str] = {
    "none": "none",
    "pre": "pre",
    "post": "post",
    "post_posemb": "post_posemb",
    "dpn": "dpn",
    "dpn_no_affine": "no_learnable",
    "affine_only": "only_learnable",
    "rms": "rmsnorm",
}


def build(stem: Stem, arrays: Arrays) -> DPNViT:
    model = DPNViT(ViTConfig(Size(32, 1, 64, 4), (8, 8), (32, 32), stem))
    model.initialize(0)
    weights = {
        "patch_embed.proj.weight": rearrange(
            torch.from_numpy(arrays["params/dense/kernel"]), "(p q c) d -> d c p q", p=8, q=8
        ),
        "patch_embed.proj.bias": torch.from_numpy(arrays["params/dense/bias"]),
        "pos_embed": torch.from_numpy(arrays["pos_embedding"]),
    }
    for slot, expected in (("patch_embed.norm_in", "ln0"), ("patch_embed.norm", "ln1"), ("norm_posemb", "ln1")):
        weights[f"{slot}.weight"] = torch.from_numpy(arrays[f"params/{expected}/scale"])
        weights[f"{slot}.bias"] = torch.from_numpy(arrays[f"params/{expected}/bias"])
    own = model.state_dict()
    model.load_state_dict({**own, **{name: value for name, value in weights.items() if name in own}})
    return model


@pytest.mark.parametrize("stem", STEMS)
def test_stem_equals_flax(stem: Stem, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("stem_variants")
    model = build(stem, arrays)
    tokens = model.patch_embed(to_nchw(arrays["image"]))
    if stem == "post_posemb":
        tokens = model.norm_posemb(tokens + model.pos_embed)
    torch.testing.assert_close(tokens, torch.from_numpy(arrays[f"out/{GOLDEN_NAMES[stem]}"]), atol=3e-5, rtol=0)


def test_post_posemb_normalises_before_the_class_token_joins(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("stem_variants")
    model = build("post_posemb", arrays)
    observed = model._pos_embed(model.patch_embed(to_nchw(arrays["image"])))
    torch.testing.assert_close(observed[:, 1:], torch.from_numpy(arrays["out/post_posemb"]), atol=3e-5, rtol=0)
    torch.testing.assert_close(observed[:, :1], model.cls_token.expand(2, 1, -1))


def test_stems_add_the_parameters_that_table_6_counts() -> None:
    def extra(stem: Stem) -> int:
        stem_module = PatchStem(stem=stem, eps=1e-6, embed_dim=192, img_size=32, patch_size=16)
        return sum(p.numel() for name, p in stem_module.named_parameters() if "proj" not in name)

    n, d = 768, 192
    assert [extra(stem) for stem in STEMS] == [0, 2 * n, 2 * d, 0, 2 * n + 2 * d, 0, 2 * n + 2 * d, n + d]


def test_norm_matches_exact_values_on_flat_and_low_contrast_patches(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("layernorm_edge")
    norm = stem_norm("dpn", "norm_in", 192, 1e-6)
    norm.load_state_dict({"weight": torch.from_numpy(arrays["scale"]), "bias": torch.from_numpy(arrays["bias"])})
    out = norm(torch.from_numpy(arrays["x"]))
    # The reference's own two-pass form is off by this much on the hardest row.
    noise = abs(arrays["out_flax_slow_variance"] - arrays["exact"]).max()
    torch.testing.assert_close(out, torch.from_numpy(arrays["exact"]), atol=max(1e-4, 2 * float(noise)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_stay_in_float32_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stem = PatchStem(stem="dpn", eps=1e-6, embed_dim=64, img_size=32, patch_size=16)
    # One grey level of texture on a bright patch: bfloat16 statistics would see a flat patch.
    image = 0.9 + (torch.rand(2, 3, 32, 32) > 0.5) / 127.5
    exact = stem(image)
    with torch.autocast("cpu", dtype):
        low = stem(image)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, atol=0.05, rtol=0)


def test_weights_in_float64_compute_in_float64() -> None:
    stem = PatchStem(stem="dpn", eps=1e-6, embed_dim=16, img_size=16, patch_size=8).double()
    for parameter in stem.parameters():
        torch.nn.init.normal_(parameter)
    image = torch.rand(2, 3, 16, 16, dtype=torch.float64)

    def norm(x: np.ndarray[Any, Any], layer: Any) -> np.ndarray[Any, Any]:
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        scaled: np.ndarray[Any, Any] = unit * layer.weight.detach().numpy() + layer.bias.detach().numpy()
        return scaled

    patches = image.numpy().reshape(2, 3, 2, 8, 2, 8).transpose(0, 2, 4, 3, 5, 1).reshape(2, 4, 192)
    kernel = stem.proj.weight.detach().numpy().transpose(2, 3, 1, 0).reshape(192, 16)
    exact = norm(norm(patches, stem.norm_in) @ kernel + stem.proj.bias.detach().numpy(), stem.norm)
    np.testing.assert_allclose(stem(image).detach().numpy(), exact, atol=1e-12)


def test_dense_output_beyond_float16_range_does_not_overflow() -> None:
    stem = PatchStem(stem="post", eps=1e-6, embed_dim=16, img_size=8, patch_size=8)
    with torch.no_grad():
        stem.proj.weight.mul_(1e6)  # the second norm hides the scale, so training may drift there
    image = torch.rand(1, 3, 8, 8)
    with torch.autocast("cpu", torch.float16):
        tokens = stem(image)
    torch.testing.assert_close(tokens, stem(image))
    assert (stem.proj(image).abs() > 65504).any()


def test_brightness_and_contrast_of_a_patch_do_not_reach_a_dpn() -> None:
    stem = PatchStem(stem="dpn", eps=1e-12, embed_dim=16, img_size=8, patch_size=8)
    image = torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(stem(0.3 * image + 0.5), stem(image), atol=1e-4, rtol=1e-4)


def test_wrong_image_size_is_named() -> None:
    stem = PatchStem(stem="dpn", eps=1e-6, embed_dim=16, img_size=16, patch_size=8)
    with pytest.raises(ValueError, match=r"built for images of \(16, 16\) pixels, got \(24, 16\)"):
        stem(torch.zeros(1, 3, 24, 16))
