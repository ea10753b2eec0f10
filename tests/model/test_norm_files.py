"""Weight files of DTN's and SLAB's code, against their equations in float64; none of our modules is in them.

The files have the names that the code's modules have; every weight is random. Axes: b batch, t tokens, d features,
h heads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.norms import set_progress
from dpn_cli.weights.backbone import load_backbone, load_with_head
from dpn_cli.weights.convert import Facts, build_timm, convert
from dpn_cli.weights.fold import fold_file
from dpn_cli.weights.formats import read_file
from dpn_cli.weights.formats.state_dict import IMAGENET_MEAN, IMAGENET_STD
from support.cli import run_dpn
from support.norm_files import CLASSES, HEADS, PATCH, SIDE, WIDTH, State, make_dtn_state, make_slab_state


def layer_norm(x: Tensor, w: State, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def dtn(x: Tensor, w: State, name: str) -> Tensor:
    """DTN as its code computes it: the equations of arXiv 2112.02624 after an RMS of every head.

    LN's variance is over d - 1. P (h, t, t) is there in full, from the offsets and the bias that it does not depend on.
    """
    if f"{name}.pos_proj.weight" not in w:
        return layer_norm(x, w, name)
    heads = rearrange(x, "b t (h d) -> b h t d", h=HEADS)
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    x = rearrange(heads, "b h t d -> b t (h d)")
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"))
    down, right = row[:, None] - row, column[:, None] - column
    offsets = torch.stack([right, down, right**2 + down**2], -1).double()
    scores = torch.einsum("ijk,hk->hij", offsets, w[f"{name}.pos_proj.weight"])
    near = (scores + w[f"{name}.pos_proj.bias"][:, None, None]).softmax(-1)
    mean, square = near @ heads, near @ heads.square()
    mean_ln, var_ln = x.mean(-1)[:, None, :, None], x.var(-1)[:, None, :, None]
    share = w[f"{name}.var_norm_weight"].sigmoid()[:, None, None]
    variance = share * var_ln + (1 - share) * (square - mean.square())
    if (logits := w.get(f"{name}.mean_norm_weight")) is None:
        mean = mean_ln
    else:
        share = logits.sigmoid()[:, None, None]
        mean = share * mean_ln + (1 - share) * mean
    y = rearrange((heads - mean) / (variance + 1e-5).sqrt(), "b h t d -> b t (h d)")
    return y * w[f"{name}.weight"] + w[f"{name}.bias"]


def rep_bn(x: Tensor, w: State, name: str) -> Tensor:
    """What LinearNorm and RepBN are in evaluation: batch norm of the running statistics plus alpha x."""
    rep = f"{name}.norm2" if f"{name}.norm2.alpha" in w else name
    bn = (x - w[f"{rep}.bn.running_mean"]) / (w[f"{rep}.bn.running_var"] + 1e-5).sqrt()
    return bn * w[f"{rep}.bn.weight"] + w[f"{rep}.bn.bias"] + w[f"{rep}.alpha"] * x


def outputs(state: State, norm: Callable[[Tensor, State, str], Tensor], joins_at: int, heads: int = HEADS) -> Tensor:
    """Logits of both codes' networks: pre-norm blocks, the class token's after the final norm."""
    w = {name: value.double() for name, value in state.items()}
    tokens = rearrange(images(), "b c (y p) (x q) -> b (y x) (c p q)", p=PATCH, q=PATCH)
    x = tokens @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    slot = w["pos_embed"].shape[1] - SIDE**2  # DeiT's positions have one for the class token
    x = x + w["pos_embed"][:, slot:]
    position = state["pos_embed"][:, :1] if slot else 0  # dpn adds it once, in the file's precision
    token = (state["cls_token"] + position).double().expand(len(x), -1, -1)
    for block in range(len({name.split(".")[1] for name in w if name.startswith("blocks.")})):
        x = torch.cat([token, x], 1) if block == joins_at else x
        name = f"blocks.{block}"
        qkv = norm(x, w, f"{name}.norm1") @ w[f"{name}.attn.qkv.weight"].T + w.get(f"{name}.attn.qkv.bias", 0)
        q, k, v = rearrange(qkv, "b t (s h d) -> s b h t d", s=3, h=heads)
        y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        y = rearrange(y, "b h t d -> b t (h d)")
        x = x + y @ w[f"{name}.attn.proj.weight"].T + w[f"{name}.attn.proj.bias"]
        y = F.gelu(norm(x, w, f"{name}.norm2") @ w[f"{name}.mlp.fc1.weight"].T + w[f"{name}.mlp.fc1.bias"])
        x = x + y @ w[f"{name}.mlp.fc2.weight"].T + w[f"{name}.mlp.fc2.bias"]
    final = layer_norm if "norm.weight" in w else norm
    return final(x, w, "norm")[:, 0] @ w["head.weight"].T + w["head.bias"]


def images() -> Tensor:
    side = SIDE * PATCH
    return torch.randn(3, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def saved(state: State, folder: Path) -> Path:
    """Save a state as both codes' training scripts do."""
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, folder / "weights.pth.tar")
    return folder / "weights.pth.tar"


def close(actual: Any, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double()(images()), expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("variance_only", [False, True])
@pytest.mark.parametrize("first", [2, 3])
def test_networks_of_dtns_code_give_its_outputs(first: int, variance_only: bool, tmp_path: Path) -> None:
    state = make_dtn_state(4, first, variance_only=variance_only)
    source = read_file(saved(state, tmp_path))
    actual = load_with_head(source, None)
    close(actual, outputs(state, dtn, joins_at=first))
    statistics: Any = "variance" if variance_only else "both"
    blocks = None if first == 3 else first  # 3 of 4 blocks, as 10 of 12, are dpn's default too
    assert actual.config.norm_options == NormOptions(dtn="released", dtn_statistics=statistics, dtn_blocks=blocks)
    assert (source.heads, source.eps, len(source.dropped)) == (HEADS, 1e-5, 2 * first)
    assert (source.mean, source.std) == (IMAGENET_MEAN, IMAGENET_STD)
    without = dict(state) | {name: torch.zeros_like(value) for name, value in state.items() if "pos_proj.bias" in name}
    torch.testing.assert_close(outputs(without, dtn, joins_at=first), outputs(state, dtn, joins_at=first))


@torch.no_grad()
@pytest.mark.parametrize("linear_norm", [False, True])
def test_deits_of_slabs_code_give_its_outputs(linear_norm: bool, tmp_path: Path) -> None:
    state = make_slab_state(2, linear_norm=linear_norm)
    source = Facts(heads=HEADS).apply(read_file(saved(state, tmp_path)))
    actual = load_with_head(source, None)
    expected = outputs(state, rep_bn, joins_at=0)
    close(actual, expected)
    assert (actual.config.norm, actual.config.norm_options) == ("prepbn", NormOptions(final="same"))
    assert {float(value) for name, value in actual.state_dict().items() if name.endswith("progress")} == {
        0.75 if linear_norm else 1.0
    }
    shares = []
    for share in (0, 0.4):  # fine-tuning goes on where the file's training was; 0.4 is half of what it mixes
        set_progress(actual, share)
        shares.append(float(actual.get_submodule("norm").progress))
    assert shares == ([0.75, 0.875] if linear_norm else [1, 1])
    trained = [name for name in state if name.startswith("blocks.0.norm2.norm1.")]
    for name in trained:
        torch.testing.assert_close(actual.state_dict()[name.replace("norm1.", "ln.")], state[name].double())
    assert len(source.added) == (0 if linear_norm else 5)
    assert len(source.dropped) == (4 * 5 if linear_norm else 5)  # counters of every norm
    done = fold_file(source, tmp_path / "plain.safetensors")
    assert len(done["folded"]) == 5
    plain = read_file(tmp_path / "plain.safetensors")
    torch.testing.assert_close(load_with_head(plain, None)(images().float()).double(), expected, atol=1e-4, rtol=1e-4)
    convert(plain, tmp_path / "timm.safetensors", to="timm")
    theirs = build_timm(tmp_path / "timm.safetensors")
    torch.testing.assert_close(theirs(images().float()).double(), expected, atol=1e-4, rtol=1e-4)
    reloaded = load_with_head(read_file(tmp_path / "timm.safetensors"), None)
    torch.testing.assert_close(reloaded(images().float()).double(), expected, atol=1e-4, rtol=1e-4)


def test_prepbn_in_its_warm_up_is_layer_norm(tmp_path: Path) -> None:
    state = make_slab_state(1, linear_norm=True) | {"norm.warm": torch.tensor(10)}
    read = read_file(saved(state, tmp_path)).state
    assert (float(read["norm.progress"]), float(read["blocks.0.norm1.progress"])) == (0, 0.75)


@torch.no_grad()
def test_dtns_networks_of_layer_norm_are_distinguished_from_timms(tmp_path: Path) -> None:
    state = make_dtn_state(12, 0)
    source = Facts(heads=HEADS).apply(read_file(saved(state, tmp_path)))
    actual = load_with_head(source, None)
    close(actual, outputs(state, layer_norm, joins_at=10))
    assert "joins at block 10" in source.assumed["class_token_at"]
    with pytest.raises(DpnError, match="no class token that joins behind the first block"):
        convert(source, tmp_path / "timm.safetensors", to="timm")
    others = (
        {"blocks.3.attn.qkv.bias": torch.zeros(3 * WIDTH), **state},
        {**state, "pos_embed": torch.zeros(1, SIDE**2 + 1, WIDTH)},
        make_dtn_state(10, 0),
    )
    for other in others:
        assert read_file(saved(other, tmp_path)).format == "timm"
    save_file(make_dtn_state(12, 0), tmp_path / "model.safetensors")
    shape = {"img_size": SIDE * PATCH, "patch_size": PATCH, "embed_dim": WIDTH, "num_heads": HEADS, "mlp_ratio": 2}
    arguments = {**shape, "num_classes": CLASSES, "qkv_bias": False, "no_embed_class": True}
    described = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    (tmp_path / "config.json").write_text(json.dumps(described))
    expected = timm.create_model("vit_tiny_patch16_224", **arguments)
    expected.load_state_dict(make_dtn_state(12, 0))
    torch.testing.assert_close(
        load_with_head(read_file(tmp_path), None)(images().float()), expected.eval()(images().float())
    )


@torch.no_grad()
def test_a_baseline_pooled_otherwise_has_no_class_token(tmp_path: Path) -> None:
    source = Facts(heads=HEADS).apply(read_file(saved(make_dtn_state(12, 0), tmp_path)))
    assert load_backbone(checkpoint=source, pool="gap", image_size=None).config.norm_options == NormOptions()


@pytest.mark.parametrize(
    ("width", "heads"),
    [(192, 4), (384, 6), (432, 9), (768, None)],
)
def test_heads_of_the_baselines_match_the_code(width: int, heads: int | None, tmp_path: Path) -> None:
    state = make_dtn_state(12, 0) | {"patch_embed.proj.weight": torch.zeros(width, 3, 1, 1)}
    assert read_file(saved(state, tmp_path)).heads == heads


@torch.no_grad()
def test_the_commands_describe_and_convert_such_files(tmp_path: Path) -> None:
    state = make_dtn_state(4, 3)
    path, target = saved(state, tmp_path), tmp_path / "ours.safetensors"
    result = run_dpn("checkpoint", "inspect", str(path))
    for line in ("DTN", "dtn, placement pre,pre, dtn released, eps 1e-05", "the softmax over positions does not see"):
        assert line in result.stdout
    completed = run_dpn("checkpoint", "convert", str(path), str(target))
    assert completed.exit_code == 0, completed.stderr
    close(load_with_head(read_file(target), None), outputs(state, dtn, joins_at=3))
    for arguments, message in (
        (["fold", str(path)], "norm1 is a DynamicTokenNorm, which depends on its input"),
        (["convert", str(path), "--to", "timm"], "no such norms in its blocks"),
    ):
        cli_result = run_dpn("checkpoint", *arguments[:2], str(tmp_path / "x.safetensors"), *arguments[2:])
        assert cli_result.exit_code == 2
        assert message in cli_result.stderr
    deit = saved(make_slab_state(2, linear_norm=True), tmp_path)
    cli_result = run_dpn("predict", str(deit), "x.png")
    assert f"'dpn checkpoint convert {deit} OUT.safetensors --heads N' writes one that does" in cli_result.stderr
    folded = run_dpn("checkpoint", "fold", str(deit), str(tmp_path / "folded.safetensors"), "--heads", "4")
    assert folded.exit_code == 0, folded.stderr
    assert load_with_head(read_file(tmp_path / "folded.safetensors"), None).config.size.heads == 4
    assert "prepbn, placement pre,pre, final same" in run_dpn("checkpoint", "inspect", str(deit), "--heads", "4").stdout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: make_dtn_state(2, 2), "DTN is in all of its blocks"),
        (
            lambda: {"transformer.layers.0.0.norm.pos_proj.weight": torch.zeros(4, 3)},
            "vit_norm.py.*vit_norm_mix.py are",
        ),
        (lambda: {**make_dtn_state(2, 0), "blocks.0.norm1.bn.running_mean": torch.zeros(3)}, "only its first blocks"),
        (lambda: {**make_dtn_state(2, 0), "blocks.0.norm1.running_phi": torch.zeros(3)}, "only its first blocks"),
        (lambda: {"block1.0.norm1.pos_proj.weight": torch.zeros(4, 3)}, "a hierarchy"),
        (lambda: {"layers.0.blocks.0.norm1.norm2.bn.weight": torch.zeros(4)}, "a hierarchy"),
        (
            lambda: {**make_slab_state(1, linear_norm=True), "blocks.0.attn.positional_encoding": torch.zeros(1, 4, 4)},
            "linear attention",
        ),
        (lambda: {"beit3.encoder.layers.0.ffn.A.fc1.weight": torch.zeros(2)}, "save the state dict of timm's beit3"),
        (lambda: {**make_dtn_state(1, 0), "blocks.0.norm1.eta": torch.zeros(1)}, "its names do not say which"),
    ],
)
def test_unsupported_formats_are_refused_with_the_reason(
    changed: Callable[[], State], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_file(saved(changed(), tmp_path))
    assert "\n" not in str(error.value)
