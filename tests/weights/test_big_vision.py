"""big_vision's other spellings: scanned blocks, two-tower trees, NaFlex's names, attention pooling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from dpn_cli.weights.backbone import load_backbone
from support.goldens import GOLDENS, Arrays, to_nchw


def big_vision_arrays(name: str) -> dict[str, Any]:
    with np.load(GOLDENS / f"{name}.params.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def scanned(arrays: dict[str, Any]) -> dict[str, Any]:
    """Stack the blocks as flax's nn.scan stores them."""
    single = {name: value for name, value in arrays.items() if "encoderblock_" not in name}
    depth = 1 + max(int(name.split("encoderblock_")[1].split("/")[0]) for name in arrays if "encoderblock_" in name)
    for name in [name for name in arrays if "encoderblock_0/" in name]:
        blocks = [arrays[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(depth)]
        single[name.replace("encoderblock_0", "encoderblock")] = np.stack(blocks)
    return single


@pytest.mark.parametrize("prefix", ["", "img/", "params/img/", "opt/target/img/"])
@torch.no_grad()
def test_scanned_blocks_in_any_tree_give_big_visions_outputs(
    prefix: str, golden: Callable[[str], Arrays], tmp_path: Path
) -> None:
    arrays = {prefix + name: value for name, value in scanned(big_vision_arrays("vit_dpn")).items()}
    if prefix:
        arrays[prefix.replace("img/", "txt/") + "Encoder_0/kernel"] = np.zeros((2, 2), np.float32)
        arrays[prefix.replace("img/", "") + "t"] = np.zeros(1, np.float32)
    np.savez(tmp_path / "scan.npz", **arrays)
    io = golden("vit_dpn.io")
    ours = load_backbone(checkpoint=str(tmp_path / "scan.npz"), image_size=32, num_classes=10, head="load").eval()
    torch.testing.assert_close(ours(to_nchw(io["image"])), torch.from_numpy(io["logits"]), atol=2e-5, rtol=0)
    assert len(ours.report.dropped) == (2 if prefix else 0)


@pytest.mark.parametrize("kept", [("patchln_pre",), ("patchln_post",), ("patchln_pre", "patchln_post"), ()])
@torch.no_grad()
def test_naflex_names_one_norm_or_both(kept: tuple[str, ...], tmp_path: Path) -> None:
    """The same weights under the paper's names, which the recorded outputs prove, and under NaFlex's."""
    norms = {"ln0": "patchln_pre", "ln1": "patchln_post"}
    paper = {
        name: value
        for name, value in big_vision_arrays("vit_dpn_gap_norep").items()
        if norms.get(name.split("/")[0], kept[:1] and kept[0]) in kept or (not kept and name.split("/")[0] not in norms)
    }
    flex = {
        "params/" + "/".join({**norms, "dense": "embedding"}.get(part, part) for part in name.split("/")): value
        for name, value in paper.items()
    }
    flex["params/pos_embedding"] = flex["params/pos_embedding"].reshape(4, 4, -1)
    np.savez(tmp_path / "paper.npz", **paper)
    np.savez(tmp_path / "flex.npz", **flex)
    stem = {0: "none", 2: "dpn"}.get(len(kept), "pre" if "patchln_pre" in kept else "post")
    ours, reference = (
        load_backbone(checkpoint=str(tmp_path / f"{name}.npz"), stem=stem, image_size=40).eval()
        for name in ("flex", "paper")
    )
    assert ours.config == reference.config
    image = torch.randn(2, 3, 40, 40)
    assert torch.equal(ours(image), reference(image))


@torch.no_grad()
def test_attention_pooling_is_read_as_timm_reads_it(tmp_path: Path) -> None:
    """timm has a reader of big_vision's two-tower files of its own."""
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        **{f"MultiHeadDotProductAttention_0/{part}/kernel": (32, 4, 8) for part in ("query", "key", "value")},
        **{f"MultiHeadDotProductAttention_0/{part}/bias": (4, 8) for part in ("query", "key", "value")},
        "MultiHeadDotProductAttention_0/out/kernel": (4, 8, 32),
        "MultiHeadDotProductAttention_0/out/bias": (32,),
        "LayerNorm_0/scale": (32,),
        "LayerNorm_0/bias": (32,),
        "MlpBlock_0/Dense_0/kernel": (32, 64),
        "MlpBlock_0/Dense_0/bias": (64,),
        "MlpBlock_0/Dense_1/kernel": (64, 32),
        "MlpBlock_0/Dense_1/bias": (32,),
        "probe": (1, 1, 32),
    }
    arrays = {
        f"params/img/{name}": value
        for name, value in big_vision_arrays("vit_gap").items()
        if not name.startswith(("head", "pre_logits"))
    }
    for name, shape in shapes.items():
        arrays[f"params/img/MAPHead_0/{name}"] = generator.normal(size=shape, scale=0.3).astype(np.float32)
    arrays["params/t"] = np.zeros(1, np.float32)
    np.savez(tmp_path / "siglip.npz", **arrays)
    theirs: Any = timm.create_model(
        "vit_base_patch16_siglip_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2,
        act_layer="gelu_tanh",
    ).eval()  # fmt: skip
    theirs.load_pretrained(str(tmp_path / "siglip.npz"))
    ours = load_backbone(checkpoint=str(tmp_path / "siglip.npz"), stem="none", image_size=32).eval()
    assert ours.config.pool == "map"
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(image), theirs(image), rtol=1e-5, atol=1e-5)
    pooled = load_backbone(checkpoint=str(tmp_path / "siglip.npz"), stem="none", image_size=32, pool="gap")
    assert {name.split(".")[0] for name in pooled.report.dropped} == {"attn_pool", "params/t"}
