"""The network against activations and gradients recorded from big_vision, position embeddings, initialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from scipy.ndimage import zoom

from dpn_cli.arch import SIZES, Size, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count_macs
from dpn_cli.model.rotary import RotaryPositions
from dpn_cli.model.vit import DPNViT, posemb_sincos2d, resample_posemb
from dpn_cli.weights.backbone import Backbone, export_backbone, load_backbone
from dpn_cli.weights.formats import read_file
from support.goldens import GOLDENS, Arrays, to_nchw

CASES = {
    "vit_tok_repsize": "none",
    "vit_dpn": "dpn",
    "vit_dpn_gap_norep": "dpn",
    "vit_gap": "none",
    "vit_sincos2d": "none",
}


def load(name: str, stem: str) -> Backbone:
    model = load_backbone(
        checkpoint=str(GOLDENS / f"{name}.params.npz"), stem=stem, image_size=32, num_classes=10, head="load"
    )
    model.eval()
    return model


def close(actual: torch.Tensor, expected: np.ndarray[tuple[int, ...], np.dtype[np.float32]], atol: float) -> None:
    torch.testing.assert_close(actual.detach().flatten(), torch.from_numpy(expected).flatten(), atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "stem"), CASES.items())
def test_activations_equal_big_vision(name: str, stem: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden(f"{name}.io")
    model = load(name, stem)
    observed: dict[str, torch.Tensor] = {}
    for i, block in enumerate(model.blocks):
        for part, module in (("sa", block.attn), ("mlp", block.mlp), ("+mlp", block)):
            module.register_forward_hook(
                lambda _m, _i, out, key=f"encoder/block{i:02d}/{part}": observed.__setitem__(key, out)
            )
    image = to_nchw(arrays["image"])
    stem_tokens = model.patch_embed(image)
    tokens = model.forward_features(image)
    dense = tokens[:, model.num_prefix_tokens :]
    close(stem_tokens, arrays["stem"], 3e-5)
    close(stem_tokens + model.pos_embed, arrays["with_posemb"], 3e-5)
    close(tokens, arrays["encoded"], 3e-5)
    for key, value in observed.items():
        if key in arrays:
            close(value, arrays[key], 3e-5)
    close(model.pool(tokens), arrays["head_input"], 3e-5)
    close(model.forward_head(tokens, pre_logits=True), arrays["pre_logits"], 1e-5)
    close(model(image), arrays["logits"], 1e-5)
    close(model.representation(dense), arrays["pre_logits_2d"], 3e-5)
    close(model.head(model.representation(dense)), arrays["logits_2d"], 3e-5)


@pytest.mark.parametrize("name", ["vit_tok_repsize", "vit_dpn"])
def test_gradients_equal_big_vision(name: str, golden: Callable[[str], Arrays], tmp_path: Path) -> None:
    arrays, grads = golden(f"{name}.io"), golden(f"{name}.grads")
    model = load(name, CASES[name])
    image = to_nchw(arrays["image"]).requires_grad_()
    loss = model(image).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(grads["loss"].item(), rel=1e-5)
    # The reader turns their gradients into our names and shapes: it is linear in every array.
    arrays_only: dict[str, Any] = {k.removeprefix("grad/"): v for k, v in grads.items() if k.startswith("grad/")}
    np.savez(tmp_path / "grads.npz", **arrays_only)
    expected = read_file(tmp_path / "grads.npz").state
    actual = {key: p.grad for key, p in model.named_parameters()}
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        atol = 5e-5 * gradient.abs().max().item() + 1e-5
        torch.testing.assert_close(actual[key], gradient, atol=atol, rtol=0, msg=key)
    assert image.grad is not None
    torch.testing.assert_close(
        image.grad, to_nchw(grads["grad_image"]), atol=5e-5 * abs(grads["grad_image"]).max() + 1e-5, rtol=0
    )


@pytest.mark.parametrize("invalid", ["eps", "act", "pre_logits"])
def test_each_wrong_choice_is_far_outside_the_tolerance(invalid: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("vit_tok_repsize.io")
    model = load("vit_tok_repsize", "none")
    if invalid == "eps":
        for block in model.blocks:
            block.norm1.eps = 1e-3
    elif invalid == "act":
        for block in model.blocks:
            block.mlp.act = torch.nn.GELU()
    else:
        model.pre_logits = None
    assert (model(to_nchw(arrays["image"])) - torch.from_numpy(arrays["logits"])).abs().max() > 5e-5


@pytest.mark.parametrize(("old", "new"), [(7, 12), (14, 24), (14, 32), (24, 14)])
def test_posemb_resampling_equals_both_references(old: int, new: int, golden: Callable[[str], Arrays]) -> None:
    actual, other = golden("posemb_resample"), golden("posemb_resample_scenic_bilinear")
    table = torch.from_numpy(actual[f"g{old}to{new}/in"])
    close(resample_posemb(table, (old, old), (new, new)), actual[f"g{old}to{new}/out"], 1e-6)
    close(resample_posemb(table, (old, old), (new, new), align_corners=False), other[f"g{old}to{new}/out"], 1e-5)


def test_posemb_resampling_of_rectangles_equals_scipy() -> None:
    table = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    expected = zoom(table.astype(np.float64), (7 / 3, 4 / 5, 1), order=1)
    got = resample_posemb(torch.from_numpy(table).reshape(1, 15, 4), (3, 5), (7, 4))
    np.testing.assert_allclose(got.reshape(7, 4, 4).numpy(), expected, atol=1e-6)


def test_sincos_posemb_equals_big_vision(golden: Callable[[str], Arrays]) -> None:
    close(posemb_sincos2d((4, 4), 32), golden("vit_sincos2d.io")["posemb"], 1e-6)


def test_initialisation_has_big_visions_statistics(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("init_stats")
    expected = dict(zip(arrays["names"], arrays["stats"], strict=True))
    model = DPNViT(ViTConfig(Size(192, 2, 768, 3), (16, 16), (224, 224), "dpn", pre_logits=True, num_classes=100))
    model.initialize(0)
    actual = dict(model.named_parameters())
    q, k, v = actual["blocks.0.attn.qkv.weight"].chunk(3)
    block = "Transformer/encoderblock_0/"
    pairs = {
        f"{block}MultiHeadDotProductAttention_0/query/kernel": q,
        f"{block}MultiHeadDotProductAttention_0/key/kernel": k,
        f"{block}MultiHeadDotProductAttention_0/value/kernel": v,
        f"{block}MultiHeadDotProductAttention_0/out/kernel": actual["blocks.0.attn.proj.weight"],
        f"{block}MultiHeadDotProductAttention_0/out/bias": actual["blocks.0.attn.proj.bias"],
        f"{block}MlpBlock_0/Dense_0/kernel": actual["blocks.0.mlp.fc1.weight"],
        f"{block}MlpBlock_0/Dense_0/bias": actual["blocks.0.mlp.fc1.bias"],
        f"{block}MlpBlock_0/Dense_1/kernel": actual["blocks.0.mlp.fc2.weight"],
        f"{block}LayerNorm_0/scale": actual["blocks.0.norm1.weight"],
        "pos_embedding": actual["pos_embed"],
        "cls": actual["cls_token"],
        "dense/kernel": actual["patch_embed.proj.weight"],
        "dense/bias": actual["patch_embed.proj.bias"],
        "ln0/scale": actual["patch_embed.norm_in.weight"],
        "ln1/bias": actual["patch_embed.norm.bias"],
        "pre_logits/kernel": actual["pre_logits.weight"],
        "pre_logits/bias": actual["pre_logits.bias"],
        "head/kernel": actual["head.weight"],
        "head/bias": actual["head.bias"],
    }
    for name, value in pairs.items():
        mean, std, low, high, zeros = expected[f"dpn:{name}"]
        noise = 6 * std / value.numel() ** 0.5
        assert abs(value.mean().item() - mean) <= 2 * noise + 1e-12, name
        # Six standard errors of a sample standard deviation.
        assert value.std(correction=0).item() == pytest.approx(std, rel=6 / (2 * value.numel()) ** 0.5, abs=1e-12), name
        assert (value == 0).float().mean().item() == pytest.approx(zeros, abs=1e-3), name
        if name.endswith("kernel") and std > 0:  # bounded distributions: the extremes agree closely
            assert value.min().item() == pytest.approx(low, rel=0.02), name
            assert value.max().item() == pytest.approx(high, rel=0.02), name


def test_initialisation_is_a_function_of_the_seed() -> None:
    one, same, other = (load_backbone("mu/8", image_size=16, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def test_b32_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        plain, dual = (
            DPNViT(ViTConfig(SIZES["B"], (32, 32), (224, 224), stem, pre_logits=True, num_classes=1000))
            for stem in ("none", "dpn")
        )
    assert sum(p.numel() for p in plain.parameters()) == 88_814_056
    assert sum(p.numel() for p in dual.parameters()) == 88_814_056 + 7_680


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("Ti/16", "vit_tiny_patch16_224"),
        ("S/32", "vit_small_patch32_224"),
        ("B/16", "vit_base_patch16_224"),
        ("L/16", "vit_large_patch16_224"),
        ("H/14", "vit_huge_patch14_224"),
    ],
)
def test_plain_sizes_have_timms_tensors(actual: str, expected: str) -> None:
    size, patch = parse_arch(actual)
    with torch.device("meta"):
        plain = DPNViT(ViTConfig(size, (patch, patch), (224, 224), "none", num_classes=1000)).state_dict()
        timms = timm.create_model(expected, no_embed_class=True, num_classes=1000).state_dict()
    assert {name: value.shape for name, value in plain.items()} == {name: value.shape for name, value in timms.items()}


@pytest.mark.parametrize("size", ["mu", "Ti"])
def test_rectangles_run_with_drop_path_and_checkpointing(size: str) -> None:
    model = load_backbone(f"{size}/8", image_size=(16, 24), num_classes=3, drop_path=0.2).train()
    torch.nn.init.normal_(model.head.weight)
    image = torch.randn(2, 3, 16, 24)
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(0)
        model(image).square().sum().backward()
        gradients.append(model.patch_embed.proj.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_drop_path_rates_and_scaling_equal_scenic(golden: Callable[[str], Arrays]) -> None:
    arrays = golden("stochastic_depth")
    model = DPNViT(ViTConfig(SIZES["Ti"], (16, 16), (32, 32), drop_path=0.1))
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    np.testing.assert_allclose(rates, arrays["block_rates/L12_r0.1"], atol=1e-6)
    kept = torch.from_numpy(arrays["rate0.5/kept"]).bool()
    drop = DPNViT(ViTConfig(SIZES["Ti"], (16, 16), (32, 32), drop_path=0.5)).blocks[-1].drop_path1.train()
    x = torch.from_numpy(arrays["x"])
    out = drop(x.repeat(100, 1, 1)).reshape(100, *x.shape)
    survivors = out[:, :, 0, 0] != 0
    expected = torch.from_numpy(arrays["rate0.5/y"])
    for row in kept.nonzero().flatten():
        torch.testing.assert_close(out[survivors[:, row], row][0], expected[row])
    assert 0.4 < survivors.float().mean() < 0.6


def test_changing_the_input_size_resamples_the_posemb_as_loading_does() -> None:
    path = str(GOLDENS / "vit_dpn.params.npz")
    model = load_backbone(checkpoint=path, image_size=32)
    model.set_input_size((48, 40))
    loaded = load_backbone(checkpoint=path, image_size=(48, 40))
    image = torch.randn(1, 3, 48, 40)
    torch.testing.assert_close(model.eval()(image), loaded.eval()(image))


def test_the_whole_network_compiles_to_one_graph_under_autocast() -> None:
    model = load_backbone("mu/8", image_size=16, num_classes=4).eval()
    torch.nn.init.normal_(model.head.weight)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    image = torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(compiled(image), model(image), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_a_new_head_is_zero_as_big_visions_is(fc_norm: bool) -> None:
    model = load_backbone("mu/8", image_size=16, num_classes=3)
    model = Backbone(replace(model.config, fc_norm=fc_norm), model.mean, model.std, model.report)
    model.initialize(0)
    model.reset_classifier(5)
    assert model(torch.randn(2, 3, 16, 16)).tolist() == [[0.0] * 5] * 2
    assert model.config.num_classes == 5
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 32)


@torch.no_grad()
def test_parts_of_other_vits_are_initialized_and_counted() -> None:
    plain = load_backbone("nano/8", image_size=32, seed=3)
    vit = load_backbone(
        "nano/8", image_size=32, registers=4, distillation_token=True, layer_scale=0.25, swiglu=True, seed=3
    )
    config = vit.config
    assert str(config).startswith("nano/8, stem dpn, 4 registers, distillation token, LayerScale, SwiGLU, 32x32")
    assert config.prefix_tokens == 6
    assert all(torch.equal(block.ls1.gamma, torch.full((64,), 0.25)) for block in vit.blocks)
    assert vit.reg_token is not None
    assert vit.dist_token is not None
    assert 0 < vit.reg_token.abs().max() < 1e-5
    assert 0.01 < vit.dist_token.std() < 0.03
    rows, columns = 512, 64  # gate and values are two matrices of 256 x 64
    bound = (6 / (rows / 2 + columns)) ** 0.5
    weight = vit.blocks[0].mlp.fc1.weight
    assert weight.shape == (rows, columns)
    assert bound * 0.99 < weight.abs().max() <= bound
    tokens = vit.forward_features(torch.randn(2, 3, 32, 32))
    assert tokens.shape == (2, 22, 64)
    assert torch.allclose(vit.forward_head(tokens, pre_logits=True), tokens[:, :2].mean(1))
    # Linear layers of 22 instead of 17 tokens, with a third matrix in the MLP; and their attention.
    counts, plain_counts = count_macs(config), count_macs(plain.config)
    assert counts.blocks == 4 * 22 * (4 * 64**2 + 64 * 512)
    assert plain_counts.blocks == 4 * 17 * (4 * 64**2 + 64 * 256)
    assert counts.attention == 2 * 4 * 22**2 * 64


def test_parts_that_the_checkpoint_does_not_have_are_refused(tmp_path: Path) -> None:
    export_backbone(load_backbone("mu/8", image_size=16, registers=2), tmp_path / "a.safetensors")
    source = str(tmp_path / "a.safetensors")
    assert load_backbone(checkpoint=source, registers=2).config.registers == 2
    for options, message in (
        ({"registers": 1}, "backbone.registers=1: .* was trained with 2"),
        ({"swiglu": True}, "backbone.swiglu=True: .* was trained with False"),
        ({"layer_scale": 0.1}, "backbone.layer_scale=True: .* was trained with False"),
        ({"distillation_token": True}, "backbone.distillation_token=True"),
    ):
        with pytest.raises(DpnError, match=message):
            load_backbone(checkpoint=source, **options)
    with pytest.raises(DpnError, match="backbone.distillation_token=true: needs pool=tok"):
        load_backbone("mu/8", distillation_token=True, pool="gap")


@torch.no_grad()
def test_registers_join_with_the_class_token_behind_blocks_of_dtn() -> None:
    vit = load_backbone("nano/8", image_size=32, norm="dtn", registers=2).eval()
    assert (vit.config.class_token_at, vit.config.prefix_tokens) == (3, 3)
    seen: list[int] = []
    for block in vit.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    vit(torch.randn(1, 3, 32, 32))
    assert seen == [16, 16, 16, 19]


@torch.no_grad()
def test_rotary_positions_depend_on_relative_rows_and_columns_alone() -> None:
    """The product of a rotated query with a rotated key is that of any two patches as far apart."""
    rotary = RotaryPositions((4, 5), 16)
    q, k = torch.randn(2, 16)
    products = rotary(q.expand(1, 1, 20, 16))[0, 0] @ rotary(k.expand(1, 1, 20, 16))[0, 0].T
    table = products.reshape(4, 5, 4, 5)
    assert torch.allclose(table[:-1, :-1, :-1, :-1], table[1:, 1:, 1:, 1:], atol=1e-5)
    assert not torch.allclose(table[0, 0], table[0, 1], atol=1e-2)
    prefixed = torch.randn(1, 1, 23, 16)
    assert torch.equal(rotary(prefixed)[:, :, :3], prefixed[:, :, :3])
    assert rotary(prefixed.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_rotary_positions_follow_the_image_size(tmp_path: Path) -> None:
    vit = load_backbone("mu/8", image_size=16, posemb="rope", seed=1).eval()
    assert not any("cosines" in name for name in vit.state_dict())
    assert not vit.pos_embed.any()
    export_backbone(vit, tmp_path / "a.safetensors")
    larger = load_backbone(checkpoint=str(tmp_path / "a.safetensors"), image_size=(24, 32)).eval()
    images = torch.randn(2, 3, 24, 32)
    vit.set_input_size((24, 32))
    assert torch.equal(vit(images), larger(images))
    with pytest.raises(DpnError, match="posemb=rope: .* 4 does not divide"):
        ViTConfig(Size(12, 1, 16, 2), (8, 8), (16, 16), posemb="rope")
