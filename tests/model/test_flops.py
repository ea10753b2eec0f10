"""The closed formula of a ViT's multiply-adds against torch's counter, torchvision's and timm's published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torchvision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dpn_cli.arch import SIZES, Pool, Stem
from dpn_cli.config.network import NormOptions
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.model.freeze import POSITIONS, STEM, train_only
from dpn_cli.weights.backbone import load_backbone


def config(letter: str, patch: int, side: int = 224) -> ViTConfig:
    return ViTConfig(SIZES[letter], (patch, patch), (side, side), num_classes=1000)


@pytest.mark.parametrize(
    ("name", "weights", "letter", "patch", "side"),
    [
        ("ViT_B_16", "IMAGENET1K_V1", "B", 16, 224),
        ("ViT_B_16", "IMAGENET1K_SWAG_E2E_V1", "B", 16, 384),
        ("ViT_B_32", "IMAGENET1K_V1", "B", 32, 224),
        ("ViT_L_16", "IMAGENET1K_SWAG_E2E_V1", "L", 16, 512),
        ("ViT_L_32", "IMAGENET1K_V1", "L", 32, 224),
        ("ViT_H_14", "IMAGENET1K_SWAG_E2E_V1", "H", 14, 518),
    ],
)
def test_forward_flops_match_torchvisions(name: str, weights: str, letter: str, patch: int, side: int) -> None:
    published: Any = getattr(getattr(torchvision.models, f"{name}_Weights"), weights)
    assert round(count_macs(config(letter, patch, side)).forward / 1e9, 3) == published.meta["_ops"]


# GMACs of vit_tiny, vit_small and vit_base_patch16_224 in timm's benchmark tables, which count the norms too.
@pytest.mark.parametrize(("letter", "gmacs"), [("Ti", 1.26), ("S", 4.61), ("B", 17.58)])
def test_forward_flops_match_timms(letter: str, gmacs: float) -> None:
    assert count_macs(config(letter, 16)).forward / 1e9 == pytest.approx(gmacs, rel=6e-3)


def counted(
    image_size: tuple[int, int] = (32, 48), *, trained: tuple[str, ...] = ("",), **network: Any
) -> tuple[ViTConfig, int, int]:
    """Count a small network in torch, with attention as plain matrix products."""
    model = load_backbone("nano/8", image_size=image_size, num_classes=10, **network).train()
    train_only(model, trained)
    image = torch.randn(1, 3, *image_size)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            model(image)
        with FlopCounterMode(display=False) as both:
            model(image).sum().backward()
    return model.config, forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("pool", get_args(Pool))
@pytest.mark.parametrize("stem", get_args(Stem))
def test_the_formula_is_torchs_count_of_plain_products(stem: Stem, pool: Pool, checkpointing: bool) -> None:
    shape, forward, both = counted(stem=stem, pool=pool, pre_logits=pool == "gap", grad_checkpointing=checkpointing)
    macs = count_macs(shape)
    assert forward == 2 * macs.forward
    # Plain attention keeps its first product for backward; fused attention, which is counted, does not.
    assert both == training_flops(shape, grad_checkpointing=checkpointing) - macs.attention


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stem", ["none", "dpn", "dpn_no_affine"])
def test_frozen_blocks_have_no_gradients_of_their_own(stem: Stem, checkpointing: bool) -> None:
    trained = (*STEM, *POSITIONS)
    shape, _, both = counted(stem=stem, pool="gap", pre_logits=True, grad_checkpointing=checkpointing, trained=trained)
    expected = training_flops(shape, grad_checkpointing=checkpointing, stem_only=True)
    assert both == expected - count_macs(shape).attention


@pytest.mark.parametrize(
    ("placement", "released", "image_size"),
    [
        ("pre,pre", False, (32, 48)),
        ("pre+post,post", False, (32, 48)),
        ("subln", False, (32, 48)),
        ("normformer", False, (32, 48)),
        ("pre,pre", True, (224, 112)),  # its tokens are averaged from 28 rows to 14
    ],
)
def test_dtn_is_counted_as_torch_counts_it(placement: str, released: bool, image_size: tuple[int, int]) -> None:
    options = NormOptions(dtn="released" if released else "paper")
    shape, forward, both = counted(image_size, norm="dtn", placement=placement, norm_options=options)
    macs = count_macs(shape)
    assert forward == 2 * macs.forward
    assert both == training_flops(shape) - macs.attention


def test_dtn_of_small_16_adds_4_2_million_multiply_adds_a_norm() -> None:
    """Along 14 rows and 14 columns; as a matrix of 196 x 196 it would be 29.5 million, 7 times as many."""
    dtn = ViTConfig(SIZES["S"], (16, 16), (224, 224), norm="dtn", pool="gap")
    assert count_macs(dtn).mixing == 10 * 2 * 2 * 196 * (14 + 14) * 384
    assert count_macs(dtn).forward - count_macs(replace(dtn, norm="ln")).forward == count_macs(dtn).mixing


def test_small_16_needs_28_gflop_per_image() -> None:
    shape = ViTConfig(SIZES["S"], (16, 16), (224, 224), stem="dpn", pre_logits=True, num_classes=1000)
    assert training_flops(shape) == pytest.approx(27.95e9, rel=1e-3)
