"""Every format against the library that writes it: its own model, every weight random, saved by its own means.

The comparison is on tokens and outputs, at the native grid and at a larger one whose position embedding the source
model gets from SciPy. What the sources' models do with an image is their business; none of our code is in it.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import scipy.ndimage
import timm
import torch
import torchvision
import transformers
import vit_pytorch
from conftest import Arrays
from einops import rearrange
from safetensors.torch import save_file
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn

from dpn_cli.backbone import load_backbone
from dpn_cli.checkpoints import formats_of, read_file
from dpn_cli.checkpoints.layout import Contents
from dpn_cli.errors import DataError

NATIVE, LARGER = 32, 48
Output = Callable[[Any, Tensor], Tensor]
Build = Callable[[int], Any]


@pytest.fixture(autouse=True)
def _same_models_every_time() -> None:
    torch.manual_seed(0)


def perturbed(model: Any) -> Any:
    """Make every weight matter: norms, biases, class tokens and positions included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def image_of(size: int = NATIVE) -> Tensor:
    """One image of full contrast and a flat one, on which the epsilon of a norm shows."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 0.01]).view(
        2, 1, 1, 1
    )


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def zoom(positions: Tensor, rows: int, slots: int) -> Tensor:
    """Enlarge a position embedding (.., slots + n, d) to `rows` per side with SciPy, its extra slots kept."""
    table = positions.detach().reshape(-1, positions.shape[-1]).numpy()
    side = int((len(table) - slots) ** 0.5)
    grid = table[slots:].reshape(side, side, -1)
    larger = scipy.ndimage.zoom(grid, (rows / side, rows / side, 1), order=1)
    return torch.from_numpy(np.concatenate([table[:slots], larger.reshape(rows * rows, -1)]))


def timm_vit(**arguments: Any) -> Build:
    return lambda size: timm.create_model(
        "vit_tiny_patch16_224",
        img_size=size,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
        num_classes=5,
        **arguments,
    )


def naflex(*, dual: bool) -> Build:
    def build(size: int) -> Any:
        grid = (size // 8, size // 8)
        model = NaFlexVit(
            NaFlexVitCfg(
                patch_size=8, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, pos_embed_grid_size=grid,
                class_token=True, global_pool="token", embed_proj_type="conv",
            ),
            num_classes=5,
        )  # fmt: skip
        if dual:  # NaFlexVitCfg declares input_norm_layer and does not pass it on
            norm: Any = partial(nn.LayerNorm, eps=1e-6)
            model.embeds = NaFlexEmbeds(
                8,
                3,
                48,
                "linear",
                class_token=True,
                pos_embed_grid_size=grid,
                input_norm_layer=norm,
                proj_norm_layer=norm,
            )
        return model

    return build


def torchvision_vit(size: int) -> Any:
    return torchvision.models.VisionTransformer(size, 8, 2, 3, 48, 96, num_classes=5, representation_size=48)


def torchvision_plain(size: int) -> Any:
    return torchvision.models.VisionTransformer(size, 8, 2, 3, 48, 96, num_classes=5)


def transformers_vit(size: int) -> Any:
    return transformers.ViTForImageClassification(transformers_config(size))


def transformers_config(size: int) -> Any:
    build: Any = transformers.ViTConfig
    return build(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=size, patch_size=8,
        num_labels=5,
    )  # fmt: skip


def transformers_base(size: int) -> Any:
    return transformers.ViTModel(transformers_config(size))


def clip(**arguments: Any) -> Build:
    def build(size: int) -> Any:
        vision = {"image_size": size, "layers": 2, "width": 64, "patch_size": 8, **arguments}
        return open_clip.CLIP(
            embed_dim=5,
            vision_cfg=vision,
            text_cfg={"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1},
        )

    return build


def lucidrains(kind: Any, **arguments: Any) -> Build:
    shape = {"patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 2, "mlp_dim": 64, **arguments}
    return lambda size: kind(image_size=size, **shape)


def naflex_output(model: Any, image: Tensor) -> Any:
    """Give the linear projection its patches as timm's own data pipeline cuts them: channel last."""
    if model.embeds.proj.weight.ndim == 4:
        return model(image)
    side = image.shape[-1] // 8
    patches = rearrange(image, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8)
    where = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(1, -1, 2)
    where = where.expand(len(image), -1, -1)
    return model(
        {"patches": patches, "patch_coord": where, "patch_valid": torch.ones(where.shape[:2], dtype=torch.bool)}
    )


def call(model: Any, image: Tensor) -> Any:
    return model(image)


# name: how the source builds its model for an image size, its output, its position embedding's name, extra slots in it.
SOURCES: dict[str, tuple[Build, Output, str, int]] = {
    "timm": (timm_vit(), call, "pos_embed", 1),
    "timm no_embed_class": (timm_vit(no_embed_class=True), call, "pos_embed", 0),
    "timm gap, fc_norm": (timm_vit(class_token=False, global_pool="avg"), call, "pos_embed", 0),
    "timm map": (timm_vit(class_token=False, global_pool="map"), call, "pos_embed", 0),
    "timm layer scale": (timm_vit(init_values=0.5), call, "pos_embed", 1),
    "timm post": (timm_vit(embed_norm_layer="layernorm"), call, "pos_embed", 1),
    "timm CLIP": (timm_vit(pre_norm=True, norm_layer=nn.LayerNorm), call, "pos_embed", 1),
    "timm NaFlexViT conv": (naflex(dual=False), naflex_output, "embeds.pos_embed", 0),
    "timm NaFlexViT dual": (naflex(dual=True), naflex_output, "embeds.pos_embed", 0),
    "torchvision": (torchvision_plain, call, "encoder.pos_embedding", 1),
    "torchvision pre_logits": (torchvision_vit, call, "encoder.pos_embedding", 1),
    "transformers": (transformers_vit, lambda m, x: m(x).logits, "vit.embeddings.position_embeddings", 1),
    "transformers pooler": (transformers_base, lambda m, x: m(x).pooler_output, "embeddings.position_embeddings", 1),
    "open_clip": (clip(), lambda m, x: m.visual(x), "visual.positional_embedding", 1),
    "open_clip layer scale": (clip(ls_init_value=0.5), lambda m, x: m.visual(x), "visual.positional_embedding", 1),
    "vit-pytorch": (lucidrains(vit_pytorch.ViT), call, "pos_embedding", 1),
    "vit-pytorch mean": (lucidrains(vit_pytorch.ViT, pool="mean"), call, "pos_embedding", 0),
    "vit-pytorch one head": (lucidrains(vit_pytorch.ViT, heads=1, dim=64), call, "pos_embedding", 1),
    "vit-pytorch SimpleViT": (lucidrains(vit_pytorch.SimpleViT), call, "", 0),
}


def save(model: Any, name: str, folder: Path) -> Path:
    if name.startswith("transformers"):
        model.save_pretrained(folder)
        return folder
    path = folder / "weights.pt"
    torch.save(model.state_dict(), path)
    return path


def load(path: Path, name: str, size: int, **arguments: Any) -> Any:
    source = read_file(path)
    classes = len(source.state["head.weight"]) if "head.weight" in source.state else 0
    if not name.startswith(("transformers", "vit-pytorch", "open_clip")):
        source.heads = 3  # these files do not say, and 48 is no multiple of 64
    return load_backbone(
        checkpoint=source, stem=None, image_size=size, num_classes=classes, head="load", **arguments
    ).eval()


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_the_network_is_the_sources(name: str, tmp_path: Path) -> None:
    build, output, _, _ = SOURCES[name]
    theirs = perturbed(build(NATIVE))
    ours = load(save(theirs, name, tmp_path), name, NATIVE)
    assert distance(ours(image_of()), output(theirs, image_of())) < 1e-5


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_the_network_is_the_sources_at_a_larger_image_too(name: str, tmp_path: Path) -> None:
    build, output, positions, slots = SOURCES[name]
    theirs = perturbed(build(NATIVE))
    ours = load(save(theirs, name, tmp_path), name, LARGER)
    larger, state = build(LARGER).eval(), theirs.state_dict()
    if positions:
        state[positions] = zoom(state[positions], LARGER // 8, slots).reshape(larger.state_dict()[positions].shape)
    larger.load_state_dict(state)
    assert distance(ours(image_of(LARGER)), output(larger, image_of(LARGER))) < 1e-5
    corners = load(save(theirs, name, tmp_path), name, LARGER, align_corners=False)
    if positions:
        assert distance(corners(image_of(LARGER)), output(larger, image_of(LARGER))) > 3e-4


def test_the_stem_is_told_by_names() -> None:
    stems = {"timm post": "post", "timm NaFlexViT dual": "dpn"} | {
        n: "dpn" for n in SOURCES if n.startswith("vit-pytorch")
    }
    for name, (build, _, _, _) in SOURCES.items():
        model = build(NATIVE)
        (found,) = formats_of(list(model.state_dict()))
        assert found.read(Contents(dict(model.state_dict()))).stem == stems.get(name, "none"), name


@pytest.mark.parametrize(
    ("recorded", "stem"),
    [
        ("vit_pytorch_0.40.2", "none"),
        ("vit_pytorch_0.40.2_simple", "none"),
        ("vit_pytorch_1.0.0", "dpn"),
        ("open_clip_2.20.0_patchnorm", "pre"),
    ],
)
@torch.no_grad()
def test_old_releases_recorded_outputs_are_reproduced(
    recorded: str, stem: str, golden: Callable[[str], Arrays], tmp_path: Path
) -> None:
    arrays = golden(recorded)
    state = {name.removeprefix("state/"): torch.from_numpy(value) for name, value in arrays.items() if "/" in name}
    torch.save(state, tmp_path / "old.pt")
    source = read_file(tmp_path / "old.pt")
    source.heads = source.heads or 3
    ours = load_backbone(
        checkpoint=source, stem=stem, image_size=32, num_classes=arrays["output"].shape[1], head="load"
    )
    assert distance(ours.eval()(torch.from_numpy(arrays["image"])), torch.from_numpy(arrays["output"])) < 1e-5


def wrong_eps(ours: Any) -> None:
    for module in ours.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5 if module.eps == 1e-6 else 1e-6


def wrong_gelu(ours: Any) -> None:
    for block in ours.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")


def permuted_projection(ours: Any) -> None:
    weight = ours.patch_embed.proj.weight
    flat = rearrange(weight, "d c p q -> d (c p q)").reshape(len(weight), *weight.shape[2:], 3)
    weight.copy_(flat.permute(0, 3, 1, 2).clone())


def permuted_norm(ours: Any) -> None:
    for parameter in ours.patch_embed.norm_in.parameters():
        parameter.copy_(rearrange(parameter, "(p q c) -> (c p q)", p=8, q=8).clone())


def swapped_norms(ours: Any) -> None:
    """For B/16 both have 768 features; here they are forced on each other as far as they go."""
    first, second = ours.patch_embed.norm_in, ours.patch_embed.norm
    first.weight[:48].copy_(second.weight)


def class_token_without_position(ours: Any) -> None:
    ours.cls_token.zero_()


def class_token_last(ours: Any) -> None:
    ours.pos_embed.copy_(ours.pos_embed.roll(1, dims=1))


def no_pre_logits(ours: Any) -> None:
    ours.pre_logits = None


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("timm", wrong_eps),
        ("timm", wrong_gelu),
        ("timm", permuted_projection),
        ("timm", class_token_without_position),
        ("timm", class_token_last),
        ("torchvision pre_logits", no_pre_logits),
        ("transformers pooler", no_pre_logits),
        ("vit-pytorch", wrong_eps),
        ("vit-pytorch", permuted_projection),
        ("vit-pytorch", permuted_norm),
        ("vit-pytorch", swapped_norms),
        ("timm NaFlexViT dual", permuted_norm),
        ("open_clip", wrong_eps),
        ("open_clip", wrong_gelu),
    ],
)
@torch.no_grad()
def test_a_wrong_choice_would_be_noticed(name: str, spoil: Callable[[Any], None], tmp_path: Path) -> None:
    build, output, _, _ = SOURCES[name]
    theirs = perturbed(build(NATIVE))
    ours = load(save(theirs, name, tmp_path), name, NATIVE)
    spoil(ours)
    assert distance(ours(image_of()), output(theirs, image_of())) > 2e-5


@torch.no_grad()
def test_a_timm_trunk_inside_open_clip_is_read(tmp_path: Path) -> None:
    theirs = perturbed(timm_vit()(NATIVE))
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
    assert distance(ours(image_of()), theirs(image_of())) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("said", ["config", "OpenAI's names"])
def test_quick_gelu_is_taken_from_where_it_is_said(said: str, tmp_path: Path) -> None:
    vision = {"image_size": NATIVE, "layers": 2, "width": 64, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    theirs = perturbed(open_clip.CLIP(embed_dim=5, vision_cfg=vision, text_cfg=text, quick_gelu=True))
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    if said == "config":
        described = {
            "model_cfg": {"quick_gelu": True, "vision_cfg": vision},
            "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
        }
        (tmp_path / "open_clip_config.json").write_text(json.dumps(described))
    else:
        state |= {name: torch.tensor(1) for name in ("input_resolution", "context_length", "vocab_size")}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    ours = load(tmp_path, "open_clip", NATIVE)
    assert distance(ours(image_of()), theirs.visual(image_of())) < 1e-5
    assert ours.mean == ((0.1, 0.2, 0.3) if said == "config" else open_clip.OPENAI_DATASET_MEAN)


@torch.no_grad()
def test_transformers_facts_come_from_the_saved_folder(tmp_path: Path) -> None:
    config = transformers_config(NATIVE)
    config.layer_norm_eps, config.hidden_act, config.num_attention_heads = 1e-3, "gelu_pytorch_tanh", 4
    theirs = perturbed(transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}')
    ours = load(tmp_path, "transformers", NATIVE)
    assert (ours.config.eps, ours.config.act, ours.config.size.heads) == (1e-3, "gelu_tanh", 4)
    assert (ours.mean, ours.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert distance(ours(image_of()), theirs(image_of()).logits) < 1e-5


@torch.no_grad()
def test_transformers_own_module_names_are_read_like_its_files(tmp_path: Path) -> None:
    theirs = perturbed(transformers_vit(NATIVE))
    torch.save({f"module.{name}": value for name, value in theirs.state_dict().items()}, tmp_path / "state.pth")
    source = read_file(tmp_path / "state.pth")
    source.heads = 3
    ours = load_backbone(checkpoint=source, stem="none", image_size=NATIVE, num_classes=5, head="load").eval()
    assert distance(ours(image_of()), theirs(image_of()).logits) < 1e-5


@torch.no_grad()
def test_a_timm_folder_says_what_its_tensors_do_not(tmp_path: Path) -> None:
    name, arguments = (
        "vit_base_patch16_clip_quickgelu_224",
        {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3},
    )
    theirs = perturbed(timm.create_model(name, num_classes=5, **arguments))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": name, "model_args": arguments, "pretrained_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=32, num_classes=5, head="load").eval()
    assert (ours.config.act, ours.config.eps, ours.config.size.heads, ours.mean) == ("quick_gelu", 1e-5, 3, (0.1,) * 3)
    assert distance(ours(image_of()), theirs(image_of())) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_pool": "avg"}, "pooling 'avg' over 1 tokens beside the patches"),
        ({"global_pool": "avg", "fc_norm": False}, "pooling 'avg' over 1 tokens"),
        ({"global_pool": "max", "class_token": False}, "pooling 'max' over 0 tokens"),
        ({"reg_tokens": 4}, "pooling 'token' over 5 tokens"),
        ({"block_fn": "ResPostBlock"}, "of ResPostBlocks"),
        ({"act_layer": "relu"}, "the activation ReLU"),
    ],
)
def test_what_a_timm_description_says_otherwise_is_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    described: dict[str, Any] = {**shape, **arguments}
    if "block_fn" in arguments:
        name, described = "vit_base_patch16_rpn_224", shape
    else:
        name = "vit_tiny_patch16_224"
    save_file(timm.create_model(name, **described).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "model_args": described}))
    with pytest.raises(DataError, match=message):
        read_file(tmp_path)


def test_a_bare_timm_file_that_averages_beside_a_class_token_is_refused(tmp_path: Path) -> None:
    torch.save(timm_vit(global_pool="avg")(NATIVE).state_dict(), tmp_path / "bare.pth")
    with pytest.raises(DataError, match="a class token beside a norm after the pooling"):
        read_file(tmp_path / "bare.pth")


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
    theirs = perturbed(open_clip.CLIP(embed_dim=5, vision_cfg=full, text_cfg=text))
    save_file(
        {name: value.clone() for name, value in theirs.state_dict().items()}, tmp_path / "open_clip_model.safetensors"
    )
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": full}}))
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=None, num_classes=5, head="load").eval()
    image = torch.randn(2, 3, *ours.config.image_size)
    assert distance(ours(image), theirs.visual(image)) < 1e-5


def test_open_clip_towers_that_pool_otherwise_are_refused(tmp_path: Path) -> None:
    full = {"image_size": NATIVE, "layers": 1, "width": 64, "patch_size": 8, "pool_type": "avg"}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    theirs = open_clip.CLIP(embed_dim=5, vision_cfg=full, text_cfg=text)
    save_file(
        {name: value.clone() for name, value in theirs.state_dict().items()}, tmp_path / "open_clip_model.safetensors"
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
    config = transformers_config(NATIVE)
    config.image_size = [16, 64]  # 2 x 8 patches, as many as 4 x 4
    theirs = perturbed(transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    ours = load_backbone(checkpoint=str(tmp_path), stem="none", image_size=None, num_classes=5, head="load").eval()
    image = torch.randn(2, 3, 16, 64)
    assert distance(ours(image), theirs(image).logits) < 1e-5


def test_a_training_checkpoint_with_its_arguments_is_read(tmp_path: Path) -> None:
    state = timm_vit()(NATIVE).state_dict()
    torch.save(
        {"state_dict": state, "args": argparse.Namespace(lr=1), "state_dict_ema": state}, tmp_path / "last.pth.tar"
    )
    source = read_file(tmp_path / "last.pth.tar")
    assert source.notes == ["the file's state_dict_ema was not used"]


def test_an_mlp_of_odd_width_is_built_as_it_is(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=192, mlp_ratio=240.5 / 192, num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "odd.pth")
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
def test_what_is_taken_for_weights_is_named(start: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / "model.safetensors")


def test_scripts_and_nested_dictionaries_say_what_to_save(tmp_path: Path) -> None:
    torch.save({"student": {"a": torch.zeros(1)}, "teacher": {}}, tmp_path / "dino.pth")
    with pytest.raises(DataError, match=r"'student' \(dict\), 'teacher' \(dict\); save one of them"):
        read_file(tmp_path / "dino.pth")
    with zipfile.ZipFile(tmp_path / "jit.pt", "w") as archive:
        archive.writestr("jit/constants.pkl", b"")
    with pytest.raises(DataError, match="a TorchScript archive"):
        read_file(tmp_path / "jit.pt")
