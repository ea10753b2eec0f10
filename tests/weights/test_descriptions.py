"""What stands beside weight files, or wraps them: heeded, or refused with the reason."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DataError, DpnError
from dpn_cli.weights.backbone import load_backbone, load_with_head
from dpn_cli.weights.convert import build_timm, convert
from dpn_cli.weights.formats import read_file
from dpn_cli.weights.formats.state_dict import IMAGENET_MEAN
from support.backbones import perturb
from support.weight_files import (
    NATIVE,
    build_transformers_config,
    build_transformers_vit,
    load_weight_file,
    make_images,
    relative_error,
    timm_vit_builder,
)


@torch.no_grad()
def test_a_timm_trunk_inside_open_clip_is_read(tmp_path: Path) -> None:
    theirs = perturb(timm_vit_builder()(NATIVE))
    state = {f"visual.trunk.{name}": value for name, value in theirs.state_dict().items()}
    state |= {
        "visual.head.proj.weight": torch.ones(5, 5),
        "text.ln_final.weight": torch.ones(3),
        "logit_scale": torch.ones(1),
    }
    save_file(state, tmp_path / "clip.safetensors")
    source = read_file(tmp_path / "clip.safetensors")
    assert source.format == "open_clip (timm trunk)"
    assert sorted(source.dropped) == ["logit_scale", "text.ln_final.weight", "visual.head.proj.weight"]
    source.heads = 3
    ours = load_backbone(checkpoint=source, stem="none", image_size=NATIVE, num_classes=5, head="load").eval()
    assert relative_error(ours(make_images()), theirs(make_images())) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("source", ["config", "OpenAI's names"])
def test_quick_gelu_is_read_from_the_description(source: str, tmp_path: Path) -> None:
    vision = {"image_size": NATIVE, "layers": 2, "width": 64, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    expected = perturb(open_clip.CLIP(embed_dim=5, vision_cfg=vision, text_cfg=text, quick_gelu=True))
    state = {name: value.clone() for name, value in expected.state_dict().items()}
    if source == "config":
        described = {
            "model_cfg": {"quick_gelu": True, "vision_cfg": vision},
            "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
        }
        (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
    else:
        state |= {name: torch.tensor(1) for name in ("input_resolution", "context_length", "vocab_size")}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    ours = load_weight_file(tmp_path, "open_clip", NATIVE)
    assert relative_error(ours(make_images()), expected.visual(make_images())) < 1e-5
    assert ours.mean == ((0.1, 0.2, 0.3) if source == "config" else open_clip.OPENAI_DATASET_MEAN)


@torch.no_grad()
def test_transformers_facts_come_from_the_saved_folder(tmp_path: Path) -> None:
    config = build_transformers_config(NATIVE)
    config.layer_norm_eps, config.hidden_act, config.num_attention_heads = 1e-3, "gelu_pytorch_tanh", 4
    theirs = perturb(transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}')
    ours = load_weight_file(tmp_path, "transformers", NATIVE)
    assert (ours.config.eps, ours.config.act, ours.config.size.heads) == (1e-3, "gelu_tanh", 4)
    assert (ours.mean, ours.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert relative_error(ours(make_images()), theirs(make_images()).logits) < 1e-5


@torch.no_grad()
def test_transformers_own_module_names_are_read_like_its_files(tmp_path: Path) -> None:
    theirs = perturb(build_transformers_vit(NATIVE))
    torch.save({f"module.{name}": value for name, value in theirs.state_dict().items()}, tmp_path / "state.pth")
    source = read_file(tmp_path / "state.pth")
    source.heads = 3
    ours = load_backbone(checkpoint=source, stem="none", image_size=NATIVE, num_classes=5, head="load").eval()
    assert relative_error(ours(make_images()), theirs(make_images()).logits) < 1e-5


@torch.no_grad()
def test_a_timm_folder_states_facts_that_its_tensors_do_not(tmp_path: Path) -> None:
    name, arguments = (
        "vit_base_patch16_clip_quickgelu_224",
        {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3},
    )
    theirs = perturb(timm.create_model(name, num_classes=5, **arguments))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": name, "model_args": arguments, "pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=32, num_classes=5, head="load").eval()
    assert (ours.config.act, ours.config.eps, ours.config.size.heads, ours.mean) == ("quick_gelu", 1e-5, 3, (0.1,) * 3)
    assert relative_error(ours(make_images()), theirs(make_images())) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_pool": "map"}, "pooling 'map' over 1 tokens next to the patches"),
        ({"global_pool": "max", "class_token": False}, "pooling 'max' over 0 tokens"),
        ({"architecture": "test_vit3"}, "pooling 'map' over 1 tokens"),
        ({"architecture": "test_vit4"}, "an RMSNorm after its pooling"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"scale_attn_norm": True}, "a norm inside its attention or its MLP alone"),
        (
            {"architecture": "vit_base_patch16_rpn_224", "scale_attn_norm": True, "scale_mlp_norm": True},
            "norms inside its attention and MLP and after them",
        ),
        ({"act_layer": "relu"}, "the activation ReLU"),
    ],
)
def test_a_timm_description_that_contradicts_its_tensors_is_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    described: dict[str, Any] = {**shape, **arguments}
    name = described.pop("architecture", "vit_tiny_patch16_224")
    save_file(timm.create_model(name, **described).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "model_args": described}))
    with pytest.raises(DataError, match=message):
        read_file(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("beit3_base_patch16_224", {}, {"placement": "subln", "eps": 1e-5, "pool": "gap"}),
        ("vit_base_patch16_rpn_224", {}, {"placement": "post,post", "norm_options": NormOptions(post="branch")}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "fc_norm": False}, {"placement": "pre,pre", "fc_norm": False}),
    ],
)
def test_norms_and_pooling_come_from_a_timm_folder_and_go_back_to_timm(
    name: str, arguments: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, **arguments}
    theirs = perturb(timm.create_model(name, num_classes=5, **arguments))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": name, "model_args": arguments, "pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    source = read_file(tmp_path)
    ours = load_with_head(source, None)
    assert {fact: getattr(ours.config, fact) for fact in facts} == facts
    assert not source.assumed
    assert relative_error(ours(make_images()), theirs(make_images())) < 1e-5
    convert(source, tmp_path / "timm.safetensors", to="timm")
    assert relative_error(build_timm(tmp_path / "timm.safetensors")(make_images()), theirs(make_images())) < 1e-5
    convert(read_file(tmp_path / "timm.safetensors"), tmp_path / "ours.safetensors")
    reloaded = load_with_head(read_file(tmp_path / "ours.safetensors"), None)
    assert reloaded.config == ours.config
    assert relative_error(reloaded(make_images()), theirs(make_images())) < 1e-5


def test_a_bare_file_with_timms_names_is_assumed_to_be_timms(tmp_path: Path) -> None:
    state = timm_vit_builder("beit3_base_patch16_224")(NATIVE).state_dict()
    torch.save(state, tmp_path / "bare.pth")
    source = read_file(tmp_path / "bare.pth")
    assert (source.placement, source.eps, source.pool, source.mean) == ("subln", 1e-5, "gap", IMAGENET_MEAN)
    assert "BEiT-3" in source.assumed["mean"]
    assert "next to a class token" in source.assumed["pool"]
    source.heads = 3
    with pytest.raises(DpnError, match="has no class token that it pools by; use pool=gap$"):
        load_backbone(checkpoint=source, pool="tok")
    torch.save({name: value for name, value in state.items() if ".mlp.norm." not in name}, tmp_path / "half.pth")
    with pytest.raises(DataError, match="a norm inside its attention alone"):
        read_file(tmp_path / "half.pth")


def write_clip(model: Any, folder: Path) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")


@torch.no_grad()
@pytest.mark.parametrize(
    "vision",
    [
        {"head_width": 32},
        {"norm_kwargs": {"eps": 1e-2}},
        {"act_kwargs": {"approximate": "tanh"}},
        {"image_size": [16, 64]},
    ],
)
def test_open_clips_configuration_is_heeded(vision: dict[str, Any], tmp_path: Path) -> None:
    full = {"image_size": NATIVE, "layers": 2, "width": 64, "patch_size": 8, **vision}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    expected = perturb(open_clip.CLIP(embed_dim=5, vision_cfg=full, text_cfg=text))
    save_file(
        {name: value.clone() for name, value in expected.state_dict().items()}, tmp_path / "open_clip_model.safetensors"
    )
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": full}}))
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=None, num_classes=5, head="load").eval()
    image = torch.randn(2, 3, *ours.config.image_size)
    assert relative_error(ours(image), expected.visual(image)) < 1e-5


def test_open_clip_towers_that_pool_otherwise_are_refused(tmp_path: Path) -> None:
    full = {"image_size": NATIVE, "layers": 1, "width": 64, "patch_size": 8, "pool_type": "avg"}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    expected = open_clip.CLIP(embed_dim=5, vision_cfg=full, text_cfg=text)
    save_file(
        {name: value.clone() for name, value in expected.state_dict().items()}, tmp_path / "open_clip_model.safetensors"
    )
    for extra, message in (
        ({}, "does not pool by its class token"),
        ({"pool_type": "tok", "qk_norm": True}, "with qk_norm"),
    ):
        described = {"model_cfg": {"vision_cfg": {**full, **extra}}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
        with pytest.raises(DataError, match=message):
            read_file(tmp_path)


@torch.no_grad()
def test_a_wide_grid_is_taken_from_transformers_configuration(tmp_path: Path) -> None:
    config = build_transformers_config(NATIVE)
    config.image_size = [16, 64]  # 2 x 8 patches, as many as 4 x 4
    theirs = perturb(transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=None, num_classes=5, head="load").eval()
    image = torch.randn(2, 3, 16, 64)
    assert relative_error(ours(image), theirs(image).logits) < 1e-5


def test_a_training_checkpoint_with_its_arguments_is_read(tmp_path: Path) -> None:
    state = timm_vit_builder()(NATIVE).state_dict()
    torch.save(
        {"state_dict": state, "args": argparse.Namespace(lr=1), "state_dict_ema": state}, tmp_path / "last.pth.tar"
    )
    source = read_file(tmp_path / "last.pth.tar")
    assert source.notes == ["the file's state_dict_ema was not used"]


def test_an_mlp_of_odd_width_is_built_as_it_is(tmp_path: Path) -> None:
    expected = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=192, mlp_ratio=240.5 / 192, num_classes=0
    )
    torch.save(expected.state_dict(), tmp_path / "odd.pth")
    assert load_backbone(checkpoint=str(tmp_path / "odd.pth"), stem="none", image_size=32).config.size.mlp == 240


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGUF\x03\x00\x00\x00\x00\x00", "a GGUF file"),
        (b"\x89HDF\r\n\x1a\n\x00", "an HDF5 file"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git-LFS pointer"),
        (b"<!doctype html>", "a web page"),
    ],
)
def test_the_tensors_chosen_as_weights_are_named(start: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / "model.safetensors")


def test_errors_about_scripts_and_nested_dictionaries_name_the_object_to_save(tmp_path: Path) -> None:
    torch.save({"student": {"a": torch.zeros(1)}, "teacher": {}}, tmp_path / "dino.pth")
    with pytest.raises(DataError, match=r"'student' \(dict\), 'teacher' \(dict\); save one of them"):
        read_file(tmp_path / "dino.pth")
    with zipfile.ZipFile(tmp_path / "jit.pt", "w") as archive:
        archive.writestr("jit/constants.pkl", b"")
    with pytest.raises(DataError, match="a TorchScript archive"):
        read_file(tmp_path / "jit.pt")
