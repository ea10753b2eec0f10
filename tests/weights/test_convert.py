"""`dpn checkpoint`: what a file is, the same network elsewhere and proven, and a DPN start from a plain ViT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpn_cli.arch import STEMS, Stem
from dpn_cli.errors import DpnError
from dpn_cli.weights import convert as conversion
from dpn_cli.weights.backbone import Backbone, export_backbone, load_backbone
from dpn_cli.weights.convert import Facts, build_timm, convert, inspect
from dpn_cli.weights.formats import FORMATS, formats_of, read_file
from dpn_cli.weights.retrofit import retrofit
from support.backbones import perturb
from support.cli import run_dpn
from support.goldens import GOLDENS, Arrays, to_nchw

DPN = GOLDENS / "vit_dpn.params.npz"
PLAIN = GOLDENS / "vit_tok_repsize.params.npz"
OLD = GOLDENS / "vit_oldckpt_prelinen.raw.npz"
GAP = GOLDENS / "vit_gap.params.npz"


def test_inspect_describes_a_file_and_its_loading() -> None:
    actual = inspect(read_file(OLD), image_size=48)
    facts = {
        "format": "big_vision", "stem": "none", "width": 32, "depth": 2, "mlp": 64, "heads": 4, "patch": [8, 8],
        "grid": [4, 4], "image_size": [48, 48], "pool": "tok", "pre_logits": True, "classes": 10, "eps": 1e-6,
        "act": "gelu_tanh", "mean": [0.5] * 3, "std": [0.5] * 3, "posemb": "learn",
    }  # fmt: skip
    assert {name: actual[name] for name in facts} == facts
    assert actual["resized"] == ["pos_embed 4x4 -> 6x6 (bilinear, align_corners=True)"]
    assert actual["dropped"] == ["head.weight", "head.bias"]
    assert actual["renamed"]["Transformer/posembed_input/pos_embedding"] == "pos_embed"
    assert actual["parameters"] == load_backbone(checkpoint=str(OLD), stem="none", image_size=48).report.parameters
    assert len(actual["digest"]) == 64


def test_assumed_facts_are_reported_and_stated_ones_are_not(tmp_path: Path) -> None:
    model = load_backbone("mu/8", stem="none", image_size=16)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(DpnError, match="does not say how many attention heads its 32 features make"):
        inspect(read_file(tmp_path / "bare.safetensors"))
    plain = inspect(Facts(heads=2).apply(read_file(tmp_path / "bare.safetensors")))
    assert "erf GELU" in " ".join(plain["assumed"])
    stated = Facts(eps=1e-5, act="quick_gelu", heads=8, mean=(0.1, 0.2, 0.3)).apply(
        read_file(tmp_path / "bare.safetensors")
    )
    actual = inspect(stated)
    assert (actual["eps"], actual["act"], actual["heads"], actual["mean"]) == (1e-5, "quick_gelu", 8, [0.1, 0.2, 0.3])
    assert not [text for text in actual["assumed"] if "eps" in text or "GELU" in text or "mean" in text]


@pytest.mark.parametrize("size", [32, 48])
def test_a_converted_file_gives_big_visions_outputs(size: int, golden: Callable[[str], Arrays], tmp_path: Path) -> None:
    done = convert(read_file(DPN), tmp_path / "a.safetensors", image_size=size)
    assert done["difference"] == 0
    if size == 32:
        io = golden("vit_dpn.io")
        reloaded = load_backbone(checkpoint=done["path"], image_size=32, num_classes=10, head="load").eval()
        torch.testing.assert_close(reloaded(to_nchw(io["image"])), torch.from_numpy(io["logits"]), atol=2e-5, rtol=0)
        assert reloaded.report.digest == done["digest"]
    assert read_file(Path(done["path"])).grid == (size // 8, size // 8)


@pytest.mark.parametrize(
    ("stem", "pool", "arguments"),
    [
        ("none", "tok", {}),
        ("none", "gap", {"fc_norm": True}),
        ("none", "map", {"act": "quick_gelu"}),
        ("post", "tok", {}),
        ("none", "tok", {"pre_norm": True, "eps": 1e-5}),
    ],
)
def test_timm_gives_the_same_outputs_for_exported_files(
    stem: Stem, pool: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    scratch = load_backbone("mu/8", stem=stem, image_size=(16, 24), num_classes=3, pool=pool)
    model = perturb(Backbone(replace(scratch.config, **arguments), scratch.mean, scratch.std, scratch.report))
    model.initialize(0)
    perturb(model)
    export_backbone(model, tmp_path / "ours.safetensors")
    done = convert(read_file(tmp_path / "ours.safetensors"), tmp_path / "timm.safetensors", to="timm")
    assert done["difference"] < 1e-5
    image = torch.randn(1, 3, 16, 24)
    theirs: Any = build_timm(tmp_path / "timm.safetensors")
    torch.testing.assert_close(theirs(image), model(image), rtol=1e-4, atol=1e-5)
    reloaded = load_backbone(
        checkpoint=str(tmp_path / "timm.safetensors"), stem=stem, image_size=(16, 24), num_classes=3, head="load"
    ).eval()
    assert (reloaded.config.eps, reloaded.config.act, reloaded.config.size.heads) == (
        model.config.eps,
        model.config.act,
        2,
    )
    torch.testing.assert_close(reloaded(image), model(image), rtol=1e-4, atol=1e-5)


def test_exports_to_timm_carry_the_input_range(tmp_path: Path) -> None:
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    export_backbone(load_backbone("mu/8", stem="none", image_size=(16, 24)), tmp_path / "ours.safetensors")
    source = Facts(mean=mean, std=std).apply(read_file(tmp_path / "ours.safetensors"))
    convert(source, tmp_path / "timm.safetensors", to="timm")
    with safe_open(tmp_path / "timm.safetensors", framework="pt") as file:
        description = json.loads(file.metadata()["timm"])
    told = timm.data.resolve_data_config(pretrained_cfg=description["pretrained_cfg"])
    assert [tuple(told[key]) for key in ("mean", "std", "input_size")] == [mean, std, (3, 16, 24)]
    reloaded = load_backbone(checkpoint=str(tmp_path / "timm.safetensors"), stem="none", image_size=(16, 24))
    assert (reloaded.mean, reloaded.std) == (mean, std)
    assert not any("mean" in fact for fact in reloaded.report.assumed)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem not in ("none", "post")])
def test_networks_that_timm_cannot_hold_are_refused_with_the_reason(stem: Stem, tmp_path: Path) -> None:
    export_backbone(load_backbone("mu/8", stem=stem, image_size=8), tmp_path / "ours.safetensors")
    with pytest.raises(DpnError, match="NaFlexViT takes the setting and ignores it"):
        convert(read_file(tmp_path / "ours.safetensors"), tmp_path / "timm.safetensors", to="timm")
    with pytest.raises(DpnError, match="no pre_logits layer"):
        convert(read_file(PLAIN), tmp_path / "timm.safetensors", to="timm")
    assert [path.name for path in tmp_path.iterdir()] == ["ours.safetensors"]


def test_nothing_is_written_when_the_proof_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: Any) -> dict[str, Tensor]:
        state = dict(load_backbone(checkpoint=str(GAP), stem="none", image_size=32).state_dict())
        state["norm.bias"] = state["norm.bias"] + 1e-3
        return state

    target = tmp_path / "kept.safetensors"
    convert(read_file(GAP), target)
    initial = target.read_bytes()
    source = read_file(GAP)
    for name in ("head.weight", "head.bias"):
        source.state.pop(name)
    monkeypatch.setattr(conversion, "timm_state", spoiled)
    with pytest.raises(DpnError, match=r"not written: outputs on 4 random images differ by .*e-0[34]"):
        convert(source, target, to="timm")
    assert target.read_bytes() == initial
    assert list(tmp_path.iterdir()) == [target]


def test_outputs_that_are_no_numbers_prove_nothing(tmp_path: Path) -> None:
    model = load_backbone("mu/8", stem="none", image_size=16, num_classes=3)
    model.load_state_dict({name: torch.full_like(value, 3e38) for name, value in model.state_dict().items()})
    export_backbone(model, tmp_path / "overflow.safetensors")
    with pytest.raises(DpnError, match="differ by inf"):
        convert(read_file(tmp_path / "overflow.safetensors"), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_stated_grid_leaves_the_class_token_its_position(tmp_path: Path) -> None:
    model = load_backbone("mu/8", stem="none", image_size=(16, 40))
    state: dict[str, Tensor] = dict(model.state_dict())
    state["pos_embed"] = torch.cat([torch.ones(1, 1, 32), state["pos_embed"]], 1)
    save_file(state, tmp_path / "wide.safetensors")
    with pytest.raises(DpnError, match="10 positions do not form a square grid"):
        inspect(Facts(heads=2).apply(read_file(tmp_path / "wide.safetensors")))
    actual = Facts(heads=2, grid=(2, 5)).apply(read_file(tmp_path / "wide.safetensors"))
    loaded = load_backbone(checkpoint=actual, stem="none", image_size=None)
    assert loaded.config.image_size == (16, 40)
    assert torch.equal(loaded.state_dict()["cls_token"], state["cls_token"] + 1)


SHAPES = st.fixed_dictionaries(
    {
        "patch": st.sampled_from([2, 4, 8]),
        "rows": st.integers(1, 5),
        "columns": st.integers(1, 5),
        "stem": st.sampled_from(list(STEMS)),
        "pool": st.sampled_from(["tok", "gap", "map"]),
        "pre_logits": st.booleans(),
        "classes": st.integers(0, 4),
    }
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_convert_then_load_is_equal_for_every_shape(shape: dict[str, Any], seed: int, tmp_path: Path) -> None:
    patch, size = shape["patch"], (shape["rows"] * shape["patch"], shape["columns"] * shape["patch"])
    arguments: dict[str, Any] = {"stem": shape["stem"], "image_size": size, "num_classes": shape["classes"]}
    model = perturb(
        load_backbone(f"mu/{patch}", pool=shape["pool"], pre_logits=shape["pre_logits"], seed=seed, **arguments)
    )
    export_backbone(model, tmp_path / "first.safetensors")
    convert(read_file(tmp_path / "first.safetensors"), tmp_path / "second.safetensors")
    reloaded = load_backbone(
        checkpoint=str(tmp_path / "second.safetensors"), head="load" if shape["classes"] else "new", **arguments
    )
    assert reloaded.config == model.config
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in model.state_dict().items())


def names_of_files() -> dict[str, list[str]]:
    """The names that each format's files have, from the recorded ones and from our own layout."""
    names = {}
    for kind, path in {"big_vision": DPN, "vit-pytorch": GOLDENS / "vit_pytorch_1.0.0.npz"}.items():
        with np.load(path) as arrays:
            names[kind] = [n.removeprefix("state/") for n in arrays.files if n not in ("image", "output")]
    with np.load(GOLDENS / "open_clip_2.20.0_patchnorm.npz") as arrays:
        names["open_clip"] = [n.removeprefix("state/") for n in arrays.files if "/" in n]
    names["timm"] = list(load_backbone("mu/8", stem="none", image_size=8).state_dict())
    return names


NAMES = names_of_files()


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(sorted(NAMES)),
    wrappers=st.lists(st.sampled_from(["module.", "_orig_mod.", "model."]), max_size=3),
    extra=st.lists(st.text(alphabet="abc./_0", max_size=12), max_size=5),
    tree=st.sampled_from(["", "params/", "opt/target/", "params/img/"]),
)
def test_detection_is_a_function_of_the_names(kind: str, wrappers: list[str], extra: list[str], tree: str) -> None:
    prefix = tree if kind == "big_vision" else "".join(wrappers)
    actual = formats_of([*(prefix + name for name in NAMES[kind]), *extra])
    assert [known.name for known in actual] == [kind]


@settings(max_examples=200, deadline=None)
@given(st.sets(st.sampled_from(sorted({name for names in NAMES.values() for name in names} | {"visual.x", "a/b"}))))
def test_no_subset_of_names_fits_a_format_without_its_own(names: set[str]) -> None:
    actual = {known.name for known in formats_of(names)}
    assert actual <= {kind for kind in NAMES if names & set(NAMES[kind])}


def test_two_networks_in_a_file_are_refused_with_both_names(tmp_path: Path) -> None:
    state = {name: torch.zeros(2) for kind in ("timm", "vit-pytorch") for name in NAMES[kind]}
    save_file(state, tmp_path / "both.safetensors")
    with pytest.raises(DpnError, match="names of timm and vit-pytorch; keep one network"):
        read_file(tmp_path / "both.safetensors")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("encoder.to_patch_embedding.1.weight", "MAE or SimMIM wrapper.*save its `encoder` alone"),
        ("pos_embed_height", "NaViT"),
        ("blocks.0.attns.0.qkv.weight", "parallel blocks"),
        ("blocks.0.in_proj.weight", "parallel blocks"),
        ("to_patch_embedding.1.g", "NesT"),
        ("to_patch_tokens.1.weight", "shifted patch tokens"),
        ("patch_to_embedding.0.gamma", "x-transformers"),
        ("visual.patch_embed.norm_input.weight", "GenLIP"),
        ("model.vision_embedder.patch_ln1.weight", "language model"),
        ("v.patch_norm.1.weight", "language model"),
        ("to_patch_emb_first_frame.1.weight", "CViViT"),
        ("vision_encoder.to_patch_embedding.1.weight", "volumes"),
        ("dual_patchnorm.1.weight", "proj_layer alias"),
        ("layer_normalization/gamma", "Keras"),
    ],
)
def test_known_unsupported_formats_are_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(2)}, tmp_path / "known.safetensors")
    with pytest.raises(DpnError, match=f"not read. It looks like .*{reason}"):
        read_file(tmp_path / "known.safetensors")


def test_every_reader_has_a_name_of_its_own() -> None:
    assert len({known.name for known in FORMATS}) == len(FORMATS)


def images(count: int, size: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    smooth = torch.rand(count, 3, size // 4, size // 4, generator=g)
    return (torch.nn.functional.interpolate(smooth, size=size, mode="bilinear") * 255).to(torch.uint8)


def test_retrofit_is_the_least_squares_start(tmp_path: Path) -> None:
    """Scale and bias against NumPy's lstsq, moments against a direct mean, survival against its definition."""
    batch = images(32, 32)

    def batches() -> Iterator[Tensor]:
        return iter(torch.split(batch, 5))

    done = retrofit(read_file(PLAIN), tmp_path / "dpn.safetensors", batches)
    plain = load_backbone(checkpoint=str(PLAIN), stem="none", image_size=32)
    dual = load_backbone(checkpoint=str(tmp_path / "dpn.safetensors"), stem="dpn", image_size=32)
    held = np.arange(32) % 4 == 3
    pixels = plain.normalize(batch).numpy().reshape(32, 3, 4, 8, 4, 8).transpose(0, 2, 4, 3, 5, 1).reshape(32, 16, -1)
    fit = pixels[~held].reshape(-1, 192).astype(np.float64)
    contrast, brightness = np.sqrt(fit.var(-1) + 1e-6).mean(), fit.mean()
    assert done["contrast"] == pytest.approx(contrast, rel=1e-5)
    assert done["brightness"] == pytest.approx(brightness, abs=1e-6)
    weight = plain.patch_embed.proj.weight.detach().permute(0, 2, 3, 1).reshape(32, -1).double().numpy()
    bias = plain.patch_embed.proj.bias.detach().double().numpy()
    u = (fit - fit.mean(-1, keepdims=True)) / np.sqrt(fit.var(-1, keepdims=True) + 1e-6)
    z = (u * contrast + brightness) @ weight.T + bias
    v = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-6)
    tokens = fit @ weight.T + bias
    for channel in range(32):
        design = np.stack([v[:, channel], np.ones(len(v))], 1)
        scale, shift = np.linalg.lstsq(design, tokens[:, channel], rcond=None)[0]
        assert dual.patch_embed.norm.weight[channel].item() == pytest.approx(scale, rel=1e-4, abs=1e-5)
        assert dual.patch_embed.norm.bias[channel].item() == pytest.approx(shift, rel=1e-4, abs=1e-5)
    assert torch.equal(dual.patch_embed.proj.weight, plain.patch_embed.proj.weight)
    with torch.no_grad():
        image = plain.normalize(batch[torch.from_numpy(held)])
        expected, actual = (m.patch_embed(image).flatten(0, 1).double() for m in (plain, dual))
    survives = 1 - float(((actual - expected) ** 2).sum() / ((expected - expected.mean(0)) ** 2).sum())
    assert done["survives"] == pytest.approx(survives, abs=1e-6)
    assert done["survives_copied"] < done["survives"] < 1
    for name, value in plain.state_dict().items():
        assert torch.equal(dual.state_dict()[name], value), name


def test_a_stem_with_norms_cannot_be_retrofitted(tmp_path: Path) -> None:
    with pytest.raises(DpnError, match="has stem 'dpn'; only a plain stem"):
        retrofit(read_file(DPN), tmp_path / "x.safetensors", lambda: iter([images(8, 32)]))


def test_other_stems_are_fitted_if_they_have_scales(tmp_path: Path) -> None:
    def batches() -> Iterator[Tensor]:
        return iter([images(16, 32)])

    done = retrofit(read_file(PLAIN), tmp_path / "rms.safetensors", batches, stem="rms")
    assert load_backbone(checkpoint=str(tmp_path / "rms.safetensors"), image_size=32).config.stem == "rms"
    assert done["survives"] > done["survives_copied"]
    for stem in ("none", "dpn_no_affine", "affine_only"):
        with pytest.raises(DpnError, match=f"--stem {stem}: has no norms to fit; use pre, post"):
            retrofit(read_file(PLAIN), tmp_path / "x.safetensors", batches, stem=stem)


def test_the_commands_work_from_file_to_file(tmp_path: Path) -> None:
    photos = tmp_path / "photos" / "deep"
    photos.mkdir(parents=True)
    for i, image in enumerate(images(12, 40)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(photos / f"{i}.png")
    start = tmp_path / "start.safetensors"
    result = run_dpn(
        "checkpoint", "retrofit", str(OLD), str(start), "--data", str(tmp_path / "photos"), "--image-size", "40"
    )
    assert result.exit_code == 0, result.stderr
    assert "This is a start for training, not an equal network" in result.stdout
    assert "survives" in result.stdout
    converted = run_dpn(
        "checkpoint", "convert", str(start), str(tmp_path / "b.safetensors"), "--image-size", "32", "--json"
    )
    assert json.loads(converted.stdout)["difference"] == 0
    completed = run_dpn("checkpoint", "inspect", str(tmp_path / "b.safetensors"))
    for fact in ("stem         dpn", "4x4 patches", "gelu_tanh", "-1 to 1", "made from"):
        assert fact in completed.stdout
    assert json.loads(run_dpn("checkpoint", "inspect", str(start), "--json").stdout)["image_size"] == [40, 40]
    assert load_file(tmp_path / "b.safetensors").keys() == load_file(start).keys()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "nowhere.npz"], 3, "no such file"),
        (["inspect", "empty"], 3, "a folder without model.safetensors"),
        (["inspect", str(DPN), "--heads", "5"], 2, "5 heads do not divide"),
        (["inspect", str(DPN), "--image-size", "30"], 2, "nearest size that fits is 32x32"),
        (
            ["inspect", str(DPN), "--act", "relu"],
            2,
            "--act: one of gelu_tanh, gelu, quick_gelu (got 'relu')",
        ),
        (
            ["inspect", str(DPN), "--mean", "1,2"],
            2,
            "--mean: three numbers with commas, e.g. 0.485,0.456,0.406 (got '1,2')",
        ),
        (["inspect", str(DPN), "--grid", "4by4"], 2, "--grid: rows x columns of patches, e.g. 14x7 (got '4by4')"),
        (["inspect", str(DPN), "--std", "0,0,0"], 2, "no sound mean and std"),
        (["inspect", str(DPN), "--mean", "nan,nan,nan"], 2, "--mean: three numbers with commas"),
        (["convert", str(DPN), "a.npz"], 2, "use a.safetensors"),
        (["convert", str(DPN), "there.safetensors"], 2, "exists; pass --overwrite"),
        (["convert", str(DPN), "a.safetensors", "--to", "jax"], 2, "--to: one of dpn, timm (got 'jax')"),
        (["convert", str(DPN), "a.safetensors", "--to", "timm"], 2, "no norm where this stem has one"),
        (["retrofit", str(DPN), "a.safetensors", "--data", "demo"], 2, "only a plain stem"),
        (["retrofit", str(PLAIN), "a.safetensors", "--data", "nowhere"], 3, "no such folder"),
        (["retrofit", str(PLAIN), "a.safetensors", "--data", "empty"], 3, "no image in it"),
    ],
)
def test_wrong_commands_get_one_line_and_write_nothing(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").touch()
    (tmp_path / "empty").mkdir()
    result = run_dpn("checkpoint", *arguments)
    assert result.exit_code == code, result.stderr
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "there.safetensors"]
