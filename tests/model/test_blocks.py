"""Norms of the blocks: placements against their equations and timm's modules, and networks that are kept and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor

from dpn_cli.arch import Norm, Placement
from dpn_cli.config.network import NormOptions
from dpn_cli.config.schema import Runtime
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.errors import DpnError
from dpn_cli.model.block import HeadScale, NormBlock
from dpn_cli.model.config import OFFLINE, ViTConfig
from dpn_cli.model.freeze import freeze
from dpn_cli.model.norms import RunningNorm
from dpn_cli.model.vit import DPNViT
from dpn_cli.weights.backbone import export_backbone, load_backbone, load_with_head
from dpn_cli.weights.convert import build_timm, convert, inspect
from dpn_cli.weights.fold import fold, fold_file
from dpn_cli.weights.formats import read_file

NINE = [placement for placement in get_args(Placement) if "," in placement]


def network(arch: str = "nano/8", **choices: Any) -> Any:
    """A network whose weights are all of its own, in evaluation; its running statistics have seen a batch."""
    choices = {"stem": "none", "image_size": 32, "num_classes": 5, **choices}
    model = load_backbone(arch, **choices)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for _ in range(3):
            model.train()(images(generator=generator))
    return model.eval()


def images(count: int = 4, side: int = 32, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(count, 3, side, side, generator=generator or torch.Generator().manual_seed(2))


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled: Tensor = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias
    return scaled


def attention(x: Tensor, block: Any, inside: Callable[[Tensor], Tensor] = lambda heads: heads) -> Tensor:
    """Two heads; `inside` maps the heads' outputs side by side before the projection."""
    b, t, d = x.shape
    q, k, v = (x @ block.attn.qkv.weight.T + block.attn.qkv.bias).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    heads = (q @ k.transpose(-1, -2) / math.sqrt(d // 2)).softmax(-1) @ v
    return F.linear(inside(heads.transpose(1, 2).reshape(b, t, d)), block.attn.proj.weight, block.attn.proj.bias)


def mlp(x: Tensor, block: Any, inside: Callable[[Tensor], Tensor] = lambda hidden: hidden) -> Tensor:
    hidden = F.gelu(x @ block.mlp.fc1.weight.T + block.mlp.fc1.bias, approximate="tanh")
    return F.linear(inside(hidden), block.mlp.fc2.weight, block.mlp.fc2.bias)


@pytest.mark.parametrize("where", ["residual", "branch"])
@pytest.mark.parametrize("placement", NINE)
def test_a_block_is_its_equations(placement: str, where: str) -> None:
    options = {"post": where} if "post" in placement else None
    if options is None and where == "branch":
        return
    block: Any = network(placement=placement, norm_options=options).double().blocks[1]
    expected = x = torch.randn(2, 5, 64, dtype=torch.float64)
    for number, (mode, layer) in enumerate(zip(placement.split(","), (attention, mlp), strict=True), 1):
        first = getattr(block, f"norm{number}")
        second = getattr(block, f"post_norm{number}", None) if mode == "pre+post" else first
        branch = layer(layer_norm(expected, first) if "pre" in mode else expected, block)
        if "post" not in mode:
            expected = expected + branch
        elif where == "residual":
            expected = layer_norm(expected + branch, second)
        else:
            expected = expected + layer_norm(branch, second)
    torch.testing.assert_close(block(x), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("head_scale", "res_scale"), [(True, False), (False, True)])
def test_normformer_is_its_equations(head_scale: bool, res_scale: bool) -> None:
    options = {"head_scale": head_scale, "res_scale": res_scale}
    block: Any = network(placement="normformer", norm_options=options).double().blocks[0]
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    scale = block.attn.norm.scale.repeat_interleave(32) if head_scale else 1
    final = layer_norm(attention(layer_norm(x, block.norm1), block, lambda heads: heads * scale), block.post_norm1)
    y = x + final
    inside = mlp(layer_norm(y, block.norm2), block, lambda hidden: layer_norm(hidden, block.mlp.norm))
    expected = (y * block.res_scale if res_scale else y) + inside
    torch.testing.assert_close(block(x), expected, atol=1e-10, rtol=1e-10)
    assert isinstance(block.attn.norm, HeadScale) is head_scale


def timms(**options: Any) -> VisionTransformer:
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=2, num_classes=5, class_token=False,
        global_pool="avg", fc_norm=False, act_layer="gelu_tanh", **options,
    ).eval()  # fmt: skip


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ({"placement": "subln"}, {"scale_attn_norm": True, "scale_mlp_norm": True}),
        ({"placement": "post,post", "norm_options": {"post": "branch"}}, {"block_fn": ResPostBlock}),
    ],
)
def test_blocks_have_timms_names_and_give_timms_outputs(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    model = network(pool="gap", **actual)
    other = timms(**expected)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images()), other(images()), atol=1e-5, rtol=1e-5)


def test_sub_ln_starts_with_larger_weights() -> None:
    plain, scaled, unscaled = (
        load_backbone("nano/8", image_size=32, placement=placement, norm_options=options).blocks[2]
        for placement, options in (("pre,pre", None), ("subln", None), ("subln", {"subln_init": False}))
    )
    gain = math.sqrt(math.log(8))
    for name in ("attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"):
        first = plain.get_parameter(name)
        torch.testing.assert_close(scaled.get_parameter(name), gain * first)
        assert torch.equal(unscaled.get_parameter(name), first)
    q, k, v = zip(plain.attn.qkv.weight.chunk(3), scaled.attn.qkv.weight.chunk(3), strict=True)
    assert torch.equal(*q)
    assert torch.equal(*k)
    torch.testing.assert_close(v[1], gain * v[0])


@pytest.mark.parametrize("norm", get_args(Norm))
def test_a_network_of_any_norm_is_saved_loaded_and_described(norm: str, tmp_path: Path) -> None:
    model = network(stem="dpn", norm=norm, placement="pre,pre+post", norm_options={"post": "branch"})
    export_backbone(model, tmp_path / "it.safetensors")
    reloaded = load_backbone(checkpoint=str(tmp_path / "it.safetensors"), image_size=None, num_classes=5, head="load")
    assert reloaded.config == model.config
    assert torch.equal(reloaded.eval()(images()), model(images()))
    actual = inspect(read_file(tmp_path / "it.safetensors"))
    assert (actual["norm"], actual["placement"], actual["norm_options"]) == (norm, "pre,pre+post", {"post": "branch"})


def test_norms_of_a_checkpoint_are_its_own(tmp_path: Path) -> None:
    export_backbone(network(norm="bn"), tmp_path / "bn.safetensors")
    for choice in ({"norm": "ln"}, {"placement": "post,post"}, {"norm_options": {"final": "same"}}):
        with pytest.raises(DpnError, match="was trained with .* leave it out"):
            load_backbone(checkpoint=str(tmp_path / "bn.safetensors"), **choice)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"norm": "layernorm"}, "--norm 'layernorm': choose one of"),
        ({"placement": "post"}, "--placement 'post': choose one of"),
        ({"norm": "in", "image_size": 8}, "--norm in: its statistics are over the tokens of an image"),
        ({"norm": "dtn", "arch": "mu/8"}, "dtn: .* mu/8 has 1; use a deeper --arch or --set backbone.pool=gap"),
        ({"norm": "dtn", "norm_options": {"dtn_blocks": 4}}, "dtn_blocks=3 or --set backbone.pool=gap"),
        ({"norm_options": {"post": "branch"}}, "norm_options.post=branch: needs a --placement with post"),
        ({"norm": "dtn", "norm_options": {"class_token_at": 2}}, "class_token_at=2: needs a class token"),
        ({"pool": "gap", "norm_options": {"class_token_at": 2}}, "class_token_at=2: needs a class token"),
        ({"norm": "bn", "norm_options": {"dtn": "released"}}, "norm_options.dtn=released: needs --norm dtn"),
        ({"norm": "bn", "grad_checkpointing": True}, "count every batch twice"),
    ],
)
def test_norms_that_make_no_network_are_refused_in_one_line(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(DpnError, match=message) as error:
        load_backbone(**{"arch": "nano/8", "image_size": 32, **choices})
    assert "\n" not in str(error.value)


def test_the_class_token_joins_after_dtn() -> None:
    model = network(norm="dtn")
    tokens: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: tokens.append(output.shape[1]))
    model(images())
    assert tokens == [16, 16, 16, 17]
    assert [type(block.norm1).__name__ for block in model.blocks] == [*["DynamicTokenNorm"] * 3, "LayerNorm"]
    x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
    for block in model.blocks[:3]:
        x = block(x)
    x = model.blocks[3].norm1(torch.cat([model.cls_token.expand(4, 1, -1), x], 1))
    assert x.shape == (4, 17, 64)


def test_dtn_takes_another_grid(tmp_path: Path) -> None:
    model = network(norm="dtn")
    export_backbone(model, tmp_path / "dtn.safetensors")
    larger = load_backbone(checkpoint=str(tmp_path / "dtn.safetensors"), image_size=(48, 64)).eval()
    model.set_input_size((48, 64))
    torch.testing.assert_close(larger(torch.ones(1, 3, 48, 64)), model.forward_head(
        model.forward_features(torch.ones(1, 3, 48, 64)), pre_logits=True))  # fmt: skip


@pytest.mark.parametrize("norm", OFFLINE)
@pytest.mark.parametrize("pool", ["tok", "gap", "map"])
def test_folded_networks_give_the_same_outputs(norm: str, pool: str) -> None:
    options = {"post": "branch", "stem": "same", "final": "same"}
    model = network(norm=norm, pool=pool, stem="dpn", placement="pre,pre+post", norm_options=options).double()
    expected = model(images().double())
    names = fold(model)
    assert len(names) == 2 + 4 * 3 + 1
    assert not any(isinstance(module, RunningNorm) for module in model.modules())
    torch.testing.assert_close(model(images().double()), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("stem", "choices"),
    [
        ("affine_only", {"placement": "post,post", "norm_options": {"post": "branch"}}),
        ("post_posemb", {"norm": "bn", "norm_options": {"stem": "same"}}),
    ],
)
def test_stems_are_folded(stem: str, choices: dict[str, Any]) -> None:
    model = network(stem=stem, **choices).double()
    expected = model(images().double())
    fold(model)
    assert model.config.stem == "none"
    assert (model.config.placement, model.config.norm_options.post) == (
        ("pre,pre", "residual") if stem == "post_posemb" else ("post,post", "branch")
    )
    torch.testing.assert_close(model(images().double()), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("placement", "norms"), [("subln", 4), ("normformer", 4)])
def test_norms_inside_layers_are_folded(placement: str, norms: int) -> None:
    model = network(norm="bn", placement=placement).double()
    expected = model(images().double())
    assert len(fold(model)) == 4 * norms
    assert not [name for name in model.state_dict() if "norm" in name and not name.startswith("norm.")]
    torch.testing.assert_close(model(images().double()), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("placement", ["pre,pre", "pre,pre+post"])
def test_parts_of_other_vits_are_folded_with_the_norms(placement: str, tmp_path: Path) -> None:
    options = {"final": "same"} | ({"post": "branch"} if "post" in placement else {})
    parts: dict[str, Any] = {"layer_scale": 0.5, "swiglu": True, "distillation_token": True, "registers": 2}
    model = network(norm="bn", pool="tok", placement=placement, norm_options=options, **parts).double()
    with torch.no_grad():
        model.head_dist = deepcopy(model.head)
        model.head_dist.weight.normal_()
    model.config = replace(model.config, distillation_head=True)
    expected = model(images().double())
    assert "blocks.0.ls1" in fold(model)
    assert model.config.layer_scale is None
    torch.testing.assert_close(model(images().double()), expected, atol=1e-10, rtol=1e-10)
    export_backbone(model, tmp_path / "folded.safetensors")
    loaded = load_with_head(read_file(tmp_path / "folded.safetensors"), None).double()
    # Weights of 32 bits, behind gates that multiply.
    torch.testing.assert_close(loaded(images().double()), expected, atol=1e-2, rtol=1e-2)


def test_a_folded_file_is_a_plain_vit_that_timm_loads(tmp_path: Path) -> None:
    model = network(norm="bn")
    expected = model(images())
    export_backbone(model, tmp_path / "bn.safetensors")
    done = fold_file(read_file(tmp_path / "bn.safetensors"), tmp_path / "plain.safetensors")
    assert done["difference"] < 1e-5
    source = read_file(tmp_path / "plain.safetensors")
    assert set(source.state) == {
        name for name in load_backbone("nano/8", stem="none", num_classes=5).state_dict() if ".norm" not in name
    }
    convert(source, tmp_path / "timm.safetensors", to="timm")
    timm = build_timm(tmp_path / "timm.safetensors")
    torch.testing.assert_close(timm(images()), expected, atol=5e-5, rtol=1e-5)


def test_a_folded_network_records_the_position_of_its_class_token() -> None:
    model = network(norm="bn", pool="tok", norm_options={"class_token_at": 2})
    fold(model)
    assert model.config.norm_options == NormOptions(class_token_at=2)


@pytest.mark.parametrize("difference", [1e-3, math.nan])
def test_a_folded_file_that_computes_something_else_is_not_written(
    difference: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_backbone(network(norm="bn"), tmp_path / "bn.safetensors")
    monkeypatch.setattr("dpn_cli.weights.fold.relative_difference", lambda *outputs: difference)
    with pytest.raises(DpnError, match="not written: outputs on .* differ by"):
        fold_file(read_file(tmp_path / "bn.safetensors"), tmp_path / "plain.safetensors")
    assert not (tmp_path / "plain.safetensors").exists()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, "LayerNorm takes its statistics from the input"),
        ({"norm": "gn"}, "norm1 is a GroupNorm, which depends on its input"),
        ({"norm": "sn"}, "norm1 is a SwitchableNorm, which depends on its input"),
        ({"norm": "powernorm", "norm_options": {"group_scale": True}}, "PowerNorm, which depends on its input"),
        ({"norm": "bn", "placement": "post,post"}, "blocks.0.norm1 follows the residual sum"),
        (
            {"norm": "bn", "placement": "normformer", "norm_options": {"res_scale": True}},
            "blocks.0.res_scale multiplies the residual stream",
        ),
        ({"norm": "bn", "norm_options": {"final": "same"}, "num_classes": 0}, "no layer follows its final norm"),
    ],
)
def test_norms_that_cannot_be_folded_are_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(DpnError, match=message):
        fold(network(**choices))


def test_micro_batches_of_batch_statistics_are_never_chosen() -> None:
    cpu = torch.device("cpu")
    for norm in ("ln", "sn", *OFFLINE):
        model = DPNViT(ViTConfig(network().config.size, (8, 8), (224, 224), norm=norm))
        assert MicroBatch.choose(Runtime(micro_batch_size=3), 4096, model, cpu).size == 3
        if norm == "ln":
            assert MicroBatch.choose(Runtime(), 4096, model, cpu).size < 4096
            continue
        with pytest.raises(DpnError, match="--micro-batch-size"):
            MicroBatch.choose(Runtime(), 4096, model, cpu)
        assert MicroBatch.choose(Runtime(), 2, model, cpu) == MicroBatch(2, fixed=True)


def test_plain_blocks_stay_timms() -> None:
    assert not any(isinstance(block, NormBlock) for block in network(stem="dpn").blocks)


def test_frozen_norms_keep_their_statistics() -> None:
    model = network(norm="bn")
    freeze(model, ("stem", "blocks:0-1"))
    original = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(images())
    changed = {name.split(".")[1] for name, value in model.named_buffers() if not torch.equal(value, original[name])}
    assert changed == {"2", "3"}
