"""`load_backbone`: every format gives exactly its network or one clear error; nothing is pickled, nothing is silent."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from dpn_cli.arch import STEMS, Stem
from dpn_cli.errors import DataError, DpnError, SaveError
from dpn_cli.weights.backbone import export_backbone, load_backbone
from dpn_cli.weights.formats import read_file
from support.backbones import perturbed_timm_model
from support.goldens import DPN_PARAMS, GOLDENS, Arrays, to_nchw

PLAIN = str(GOLDENS / "vit_tok_repsize.params.npz")


def arrays_of(path: str) -> dict[str, Any]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_old_names_become_the_current_ones(golden: Callable[[str], Arrays]) -> None:
    io = golden("vit_oldckpt.io")
    old = load_backbone(
        checkpoint=str(GOLDENS / "vit_oldckpt_prelinen.raw.npz"),
        stem="none",
        image_size=32,
        num_classes=10,
        head="load",
    ).eval()
    fixed = load_backbone(
        checkpoint=str(GOLDENS / "vit_oldckpt.fixed.npz"), stem="none", image_size=32, num_classes=10, head="load"
    ).eval()
    for name, value in fixed.state_dict().items():
        assert torch.equal(old.state_dict()[name], value), name
    assert torch.equal(old.cls_token, torch.from_numpy(io["fixed/cls"]))
    assert torch.equal(old.pos_embed, torch.from_numpy(io["fixed/pos_embedding"]))
    torch.testing.assert_close(old(to_nchw(io["image"])), torch.from_numpy(io["logits"]), atol=2e-5, rtol=0)
    assert "class token" in " ".join(old.report.notes)


def test_stochastic_depth_of_one_block_is_called_idle() -> None:
    """Block l of L is left out at l / (L - 1) of the rate, and so the first one never is."""
    for arch, idle in (("mu/8", True), ("nano/8", False)):
        model = load_backbone(arch, image_size=16, drop_path=0.3)
        assert (not any(isinstance(part, timm.layers.DropPath) for part in model.modules())) is idle
        assert ("drop_path=0.3 does nothing in a network of one block" in model.report.summary()) is idle


def test_position_embedding_under_the_encoder_is_read_too(golden: Callable[[str], Arrays], tmp_path: Path) -> None:
    raw = {**arrays_of(str(GOLDENS / "vit_oldckpt.fixed.npz"))}
    raw.pop("pos_embedding")
    raw.update(golden("vit_oldckpt_encposemb.raw"))
    np.savez(tmp_path / "old.npz", **raw)
    model = load_backbone(checkpoint=str(tmp_path / "old.npz"), stem="none", image_size=32)
    assert torch.equal(model.pos_embed, torch.from_numpy(golden("vit_oldckpt.io")["fixed/pos_embedding"]))


def test_loading_at_a_higher_resolution_equals_big_vision(golden: Callable[[str], Arrays]) -> None:
    io = golden("vit_hires_load.io")
    model = load_backbone(
        checkpoint=str(GOLDENS / "vit_oldckpt_prelinen.raw.npz"), stem="none", image_size=48, num_classes=13
    ).eval()
    torch.testing.assert_close(
        model.pos_embed.detach(), torch.from_numpy(io["loaded/pos_embedding"]), atol=1e-6, rtol=0
    )
    image = to_nchw(io["image"])
    torch.testing.assert_close(
        model.forward_head(model.forward_features(image), pre_logits=True),
        torch.from_numpy(io["pre_logits"]),
        atol=2e-5,
        rtol=0,
    )
    assert model(image).abs().max() == 0
    assert model.report.resized == ["pos_embed 4x4 -> 6x6 (bilinear, align_corners=True)"]
    assert model.report.dropped == ["head.weight", "head.bias"]
    assert model.report.new == ["head.weight (zero)", "head.bias (zero)"]
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(io["init/head/kernel"]).T)
        model.head.bias.copy_(torch.from_numpy(io["init/head/bias"]))
    torch.testing.assert_close(model(image), torch.from_numpy(io["logits"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
@pytest.mark.parametrize(
    "spelling",
    [
        "ln0|dense|ln1",
        "embedding/ln0|embedding/dense|embedding/ln1",
        "stem/ln0|embedding|stem/ln1",
        "patch_embed/ln0|embedding4|patch_embed/ln1",
    ],
)
def test_spellings_of_a_dpn_file_give_one_network(prefix: str, spelling: str, tmp_path: Path) -> None:
    arrays, (first, dense, second) = arrays_of(DPN_PARAMS), spelling.split("|")
    renamed: dict[str, Any] = {}
    for name, value in arrays.items():
        module, _, leaf = name.rpartition("/")
        place = {"ln0": first, "dense": dense.removesuffix("4"), "ln1": second}.get(module)
        shaped = value.reshape(8, 8, 3, 32) if dense == "embedding4" and name == "dense/kernel" else value
        renamed[prefix + (f"{place}/{leaf}" if place else name)] = shaped
    if prefix:
        renamed["opt/0/mu/dense/kernel"] = np.zeros(3, np.float32)  # optimizer state is no weight
    np.savez(tmp_path / "dpn.npz", **renamed)
    model = load_backbone(checkpoint=str(tmp_path / "dpn.npz"), image_size=32)
    reference = load_backbone(checkpoint=DPN_PARAMS, image_size=32)
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.report.dropped[:-2] == (["opt/0/mu/dense/kernel"] if prefix else [])


def test_architecture_is_inferred_from_the_file() -> None:
    config = load_backbone(checkpoint=DPN_PARAMS, image_size=32).config
    assert (config.size.width, config.size.depth, config.size.mlp, config.size.heads) == (32, 2, 64, 4)
    assert (config.patch, config.pool, config.pre_logits, config.stem) == ((8, 8), "tok", True, "dpn")
    assert (
        load_backbone(checkpoint=str(GOLDENS / "vit_gap.params.npz"), stem="none", image_size=32).config.pool == "gap"
    )


def test_bfloat16_arrays_stored_as_void_are_read(tmp_path: Path) -> None:
    arrays = arrays_of(DPN_PARAMS)
    exact = torch.from_numpy(arrays["cls"]).bfloat16()
    arrays["cls"] = exact.view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "bf16.npz", **arrays)
    assert torch.equal(load_backbone(checkpoint=str(tmp_path / "bf16.npz"), image_size=32).cls_token, exact.float())


@pytest.mark.parametrize(
    ("name", "suffix", "wrap"),
    [
        ("vit_tiny_patch16_224", ".safetensors", ""),
        ("vit_tiny_patch16_224", ".pth", "module."),
        ("vit_tiny_patch16_224", ".pth", "_orig_mod."),
    ],
)
@pytest.mark.parametrize("no_embed_class", [False, True])
def test_timm_files_give_timms_features(
    name: str, suffix: str, wrap: str, no_embed_class: bool, tmp_path: Path
) -> None:
    theirs = perturbed_timm_model(name, img_size=32, no_embed_class=no_embed_class)
    state = {wrap + key: value.contiguous() for key, value in theirs.state_dict().items()}
    path = tmp_path / f"timm{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        save_file(state, path)
    ours = load_backbone("Ti/16", checkpoint=str(path), stem="none", image_size=32, num_classes=7, head="load").eval()
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.forward_features(image), theirs.forward_features(image), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(image), theirs(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("invalid", ["gelu_tanh", "class position"])
def test_the_comparison_with_timm_would_notice(invalid: str, tmp_path: Path) -> None:
    expected = perturbed_timm_model("vit_tiny_patch16_224", img_size=32)
    save_file(expected.state_dict(), tmp_path / "timm.safetensors")
    actual = load_backbone(checkpoint=str(tmp_path / "timm.safetensors"), stem="none", image_size=32).eval()
    if invalid == "class position":
        actual.cls_token.data = expected.cls_token.data
    else:
        for block in actual.blocks:
            block.mlp.act = torch.nn.GELU(approximate="tanh")
    image = torch.randn(2, 3, 32, 32)
    assert (actual.forward_features(image) - expected.forward_features(image)).abs().max() > 1e-4


@pytest.mark.parametrize("stem", STEMS)
def test_export_and_load_agree_to_the_bit_for_every_stem(stem: Stem, tmp_path: Path) -> None:
    model = load_backbone("mu/8", stem=stem, image_size=(16, 24), num_classes=3, pre_logits=True, seed=5)
    path = tmp_path / "ours.safetensors"
    model.mean, model.std = (0.1, 0.2, 0.3), (1, 2, 3)
    digest = export_backbone(model, path)
    reloaded = load_backbone(checkpoint=str(path), stem=stem, image_size=(16, 24), num_classes=3, head="load")
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert reloaded.config == model.config
    assert (reloaded.mean, reloaded.std, reloaded.report.digest) == ((0.1, 0.2, 0.3), (1, 2, 3), digest)
    for other in STEMS:
        if other != stem:
            with pytest.raises(DpnError, match=f"has stem '{stem}'"):
                load_backbone(checkpoint=str(path), stem=other, image_size=16)


def test_inputs_are_normalised_with_the_checkpoints_own_range() -> None:
    model = load_backbone("mu/8", image_size=8)
    pixels = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 3, 1, 1)
    for given in (pixels, floats := pixels.float()):
        assert model.normalize(given).flatten().tolist() == pytest.approx([-1, 1, -0.6])
    assert torch.equal(floats, pixels.float())  # what was given stays as it was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "B/31x"}, "use SIZE/PATCH"),
        ({"arch": "Q/16"}, "one of mu, nano, Ti, S, B, L, H"),
        ({"arch": "B/32", "stem": "dnp"}, "did you mean 'dpn'"),
        ({"arch": "B/32", "image_size": 100}, "nearest size that fits is 96x96"),
        ({}, "--arch is needed"),
        ({"checkpoint": DPN_PARAMS, "image_size": 32, "stem": "none"}, "Ways out: leave --stem out"),
        ({"checkpoint": PLAIN, "image_size": 32, "stem": "dpn"}, "has stem 'none'.*Ways out.*--checkpoint none"),
        ({"checkpoint": DPN_PARAMS, "arch": "S/16", "image_size": 32}, "--arch S/16: .* is Size.*/8; leave --arch out"),
        (
            {"checkpoint": DPN_PARAMS, "image_size": 32, "num_classes": 7, "head": "load"},
            "its head has 10 classes, not the 7 that were asked for",
        ),
        ({"checkpoint": DPN_PARAMS, "image_size": 32, "pre_logits": False}, "was trained with True"),
        (
            {"checkpoint": str(GOLDENS / "vit_gap.params.npz"), "stem": "none", "image_size": 32, "pool": "tok"},
            "no class token",
        ),
        ({"checkpoint": "nowhere.npz"}, "no such file"),
        ({"checkpoint": "hf-hub:justaname"}, "OWNER/NAME"),
        ({"checkpoint": "timm:vit_tinny_patch16_224"}, "no such model"),
        ({"checkpoint": "timm:resnet10t"}, "out of reach|reads timm's VisionTransformer"),
    ],
)
def test_wrong_requests_get_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DpnError, match=message) as caught:
        load_backbone(**arguments)
    assert "\n" not in str(caught.value)


def test_missing_and_unknown_tensors_are_listed_and_none_is_guessed(tmp_path: Path) -> None:
    arrays = arrays_of(DPN_PARAMS)
    arrays.pop("Transformer/encoderblock_1/LayerNorm_1/scale")
    arrays["Transformer/encoderblock_0/Registers/kernel"] = np.zeros((2, 2), np.float32)
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(DpnError, match=r"- blocks.1.norm2.weight \(32,\), \+ .*Registers/kernel \(2, 2\)"):
        load_backbone(checkpoint=str(tmp_path / "odd.npz"), image_size=32)


def test_one_norm_missing_is_another_stem_not_a_guess(tmp_path: Path) -> None:
    arrays = arrays_of(DPN_PARAMS)
    for leaf in ("scale", "bias"):
        arrays.pop(f"ln0/{leaf}")
    np.savez(tmp_path / "post.npz", **arrays)
    with pytest.raises(DpnError, match="has stem 'post'"):
        load_backbone(checkpoint=str(tmp_path / "post.npz"), stem="dpn", image_size=32)
    assert load_backbone(checkpoint=str(tmp_path / "post.npz"), image_size=32).config.stem == "post"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".pth", ".safetensors", ".bin"])
def test_no_pickle_is_executed(suffix: str, tmp_path: Path) -> None:
    path, target = tmp_path / f"evil{suffix}", tmp_path / "executed"
    if suffix == ".npz":
        np.savez(path, weights=np.array([Bomb(target)], dtype=object))
    elif suffix == ".pth":
        torch.save({"state_dict": {"a": torch.zeros(1)}, "evil": Bomb(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"model": Bomb(target)}))
    with pytest.raises(DataError, match="not a file of plain tensors"):
        load_backbone(checkpoint=str(path))
    assert not target.exists()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.97])
def test_truncated_files_are_named(suffix: str, keep: float, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    state = read_file(Path(DPN_PARAMS)).state
    if suffix == ".npz":
        np.savez(path, **arrays_of(DPN_PARAMS))
    elif suffix == ".pth":
        torch.save(state, path)
    else:
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(DataError, match="truncated, damaged") as caught:
        load_backbone(checkpoint=str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_holds_no_weights_is_described(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(3), "fc.bias": torch.zeros(2)}, tmp_path / "resnet.safetensors")
    with pytest.raises(DataError, match=r"2 tensors \(conv1.weight, fc.bias"):
        load_backbone(checkpoint=str(tmp_path / "resnet.safetensors"))


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_backbone("mu/8", image_size=8)
    path = tmp_path / "weights.safetensors"
    export_backbone(model, path)
    original = load_file(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpn_cli.run.files.flush", full)
    with pytest.raises(SaveError, match="No space left on device"):
        export_backbone(model, path)
    assert load_file(path).keys() == original.keys()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("pool", ["tok", "gap", "map"])
@torch.no_grad()
def test_a_network_in_float64_gives_the_outputs_of_the_one_in_float32(stem: Stem, pool: Any) -> None:
    model = load_backbone("mu/8", stem=stem, pool=pool, pre_logits=True, image_size=16, num_classes=3).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    single = model(model.normalize(pixels))
    double = model.double()(model.normalize(pixels))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(double.float(), single, atol=1e-5, rtol=1e-4)
    assert not torch.equal(double.float().double(), double)
