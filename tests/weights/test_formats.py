"""Every format against the library that writes it: its own model, every weight random, saved by its own means.

The comparison is on tokens and outputs, at the native grid and at a larger one whose position embedding the source
model gets from SciPy. What the sources' models do with an image is their business; none of our code is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import scipy.ndimage
import torch
import torchvision
import vit_pytorch
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.weights.backbone import load_backbone
from dpn_cli.weights.convert import Facts
from dpn_cli.weights.formats import formats_of, read_file
from dpn_cli.weights.formats.state_dict import Contents
from support.backbones import perturb
from support.goldens import Arrays
from support.weight_files import (
    LARGER,
    NATIVE,
    Build,
    build_torchvision_vit,
    build_transformers_base,
    build_transformers_clip,
    build_transformers_vit,
    hf_builder,
    load_weight_file,
    make_images,
    naflex_builder,
    relative_error,
    timm_vit_builder,
)

Output = Callable[[Any, Tensor], Tensor]


def zoom(positions: Tensor, rows: int, slots: int) -> Tensor:
    """Enlarge a position embedding (.., slots + n, d) to `rows` per side with SciPy, its extra slots kept."""
    table = positions.detach().reshape(-1, positions.shape[-1]).numpy()
    side = int((len(table) - slots) ** 0.5)
    grid = table[slots:].reshape(side, side, -1)
    larger = scipy.ndimage.zoom(grid, (rows / side, rows / side, 1), order=1)
    return torch.from_numpy(np.concatenate([table[:slots], larger.reshape(rows * rows, -1)]))


def torchvision_plain(size: int) -> Any:
    return torchvision.models.VisionTransformer(size, 8, 2, 3, 48, 96, num_classes=5)


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
    "timm": (timm_vit_builder(), call, "pos_embed", 1),
    "timm no_embed_class": (timm_vit_builder(no_embed_class=True), call, "pos_embed", 0),
    "timm gap, fc_norm": (timm_vit_builder(class_token=False, global_pool="avg"), call, "pos_embed", 0),
    "timm map": (timm_vit_builder(class_token=False, global_pool="map"), call, "pos_embed", 0),
    "timm layer scale": (timm_vit_builder(init_values=0.5), call, "pos_embed", 1),
    "timm post": (timm_vit_builder(embed_norm_layer="layernorm"), call, "pos_embed", 1),
    "timm CLIP": (timm_vit_builder(pre_norm=True, norm_layer=nn.LayerNorm), call, "pos_embed", 1),
    "timm gap beside a class token": (timm_vit_builder(global_pool="avg"), call, "pos_embed", 1),
    "timm BEiT-3": (timm_vit_builder("beit3_base_patch16_224"), call, "pos_embed", 1),
    "timm NaFlexViT conv": (naflex_builder(dual=False), naflex_output, "embeds.pos_embed", 0),
    "timm NaFlexViT dual": (naflex_builder(dual=True), naflex_output, "embeds.pos_embed", 0),
    "torchvision": (torchvision_plain, call, "encoder.pos_embedding", 1),
    "torchvision pre_logits": (build_torchvision_vit, call, "encoder.pos_embedding", 1),
    "transformers": (build_transformers_vit, lambda m, x: m(x).logits, "vit.embeddings.position_embeddings", 1),
    "transformers pooler": (
        build_transformers_base,
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embeddings",
        1,
    ),
    "timm registers": (timm_vit_builder(reg_tokens=4), call, "pos_embed", 5),
    "timm registers, gap": (
        timm_vit_builder(reg_tokens=4, class_token=False, global_pool="avg", no_embed_class=True),
        call,
        "pos_embed",
        0,
    ),
    "timm distilled": (timm_vit_builder("deit_tiny_distilled_patch16_224"), call, "pos_embed", 2),
    "timm SwiGLU packed": (timm_vit_builder("vit_giant_patch14_dinov2"), call, "pos_embed", 1),
    "timm AIMv2": (timm_vit_builder("aimv2_large_patch14_224"), call, "pos_embed", 0),
    "transformers CLIP": (
        hf_builder("CLIPVisionModelWithProjection", projection_dim=5),
        lambda m, x: m(x).image_embeds,
        "vision_model.embeddings.position_embedding.weight",
        1,
    ),
    "transformers CLIP of two towers": (
        build_transformers_clip,
        lambda m, x: m.get_image_features(x).pooler_output,
        "vision_model.embeddings.position_embedding.weight",
        1,
    ),
    "transformers SigLIP": (
        hf_builder("SiglipVisionModel"),
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embedding.weight",
        0,
    ),
    "transformers DINOv2": (
        hf_builder("Dinov2Model", mlp_ratio=2),
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embeddings",
        1,
    ),
    "transformers DINOv2 SwiGLU, registers": (
        hf_builder("Dinov2WithRegistersModel", use_swiglu_ffn=True),
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embeddings",
        1,
    ),
    "transformers DeiT": (
        hf_builder("DeiTModel"),
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embeddings",
        2,
    ),
    "transformers DeiT of two heads": (
        hf_builder("DeiTForImageClassificationWithTeacher", num_labels=5),
        lambda m, x: m(x).logits,
        "deit.embeddings.position_embeddings",
        2,
    ),
    "transformers BEiT": (
        hf_builder("BeitModel", use_absolute_position_embeddings=True, layer_scale_init_value=0.5),
        lambda m, x: m(x).pooler_output,
        "embeddings.position_embeddings",
        1,
    ),
    "transformers DINOv3": (
        hf_builder("DINOv3ViTModel", num_register_tokens=4),
        lambda m, x: m(x).pooler_output,
        "",
        0,
    ),
    "transformers DINOv3 SwiGLU": (
        hf_builder("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu", key_bias=True),
        lambda m, x: m(x).pooler_output,
        "",
        0,
    ),
    "transformers I-JEPA": (
        hf_builder("IJepaForImageClassification", num_labels=5),
        lambda m, x: m(x).logits,
        "ijepa.embeddings.position_embeddings",
        0,
    ),
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


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_the_network_is_the_sources(name: str, tmp_path: Path) -> None:
    build, output, _, _ = SOURCES[name]
    expected = perturb(build(NATIVE))
    ours = load_weight_file(save(expected, name, tmp_path), name, NATIVE)
    assert relative_error(ours(make_images()), output(expected, make_images())) < 1e-5


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_the_network_is_the_sources_at_a_larger_image_too(name: str, tmp_path: Path) -> None:
    build, output, positions, slots = SOURCES[name]
    expected = perturb(build(NATIVE))
    ours = load_weight_file(save(expected, name, tmp_path), name, LARGER)
    larger, state = build(LARGER).eval(), expected.state_dict()
    if positions:
        key = next(name for name in state if name.endswith(positions))  # some versions have a prefix
        state[key] = zoom(state[key], LARGER // 8, slots).reshape(larger.state_dict()[key].shape)
    larger.load_state_dict(state)
    assert relative_error(ours(make_images(LARGER)), output(larger, make_images(LARGER))) < 1e-5
    corners = load_weight_file(save(expected, name, tmp_path), name, LARGER, align_corners=False)
    if positions:
        assert relative_error(corners(make_images(LARGER)), output(larger, make_images(LARGER))) > 3e-4


@torch.no_grad()
def test_factorized_positions_lie_along_their_own_axes(tmp_path: Path) -> None:
    theirs = perturb(naflex_builder(dual=False, rows=2, positions="factorized")(NATIVE))
    assert theirs.embeds.pos_embed_y.shape[1] == 2
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    source = read_file(tmp_path / "weights.pt")
    source.heads = 3
    ours = load_backbone(checkpoint=source, stem="none", image_size=None, num_classes=5, head="load").eval()
    assert ours.config.image_size == (16, 32)
    image = torch.randn(2, 3, 16, 32)
    assert relative_error(ours(image), theirs(image)) < 1e-5
    assert "factorized" in " ".join(ours.report.notes)


@torch.no_grad()
def test_dinov2s_own_names_are_read(tmp_path: Path) -> None:
    """Facebook's files have a position for the class token, none for registers, and a mask token."""
    theirs = perturb(timm_vit_builder("vit_giant_patch14_reg4_dinov2")(NATIVE))
    state = {name: value for name, value in theirs.state_dict().items() if not name.startswith("head.")}
    own_names = {"reg_token": "register_tokens"} | {
        name: name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3") for name in state if ".mlp." in name
    }
    state = {own_names.get(name, name): value for name, value in state.items()}
    position = torch.randn(1, 1, 48)
    state["pos_embed"] = torch.cat([position, state["pos_embed"]], 1)
    torch.save({**state, "mask_token": torch.zeros(1, 48)}, tmp_path / "dinov2.pth")
    theirs.cls_token.add_(position)
    source = read_file(tmp_path / "dinov2.pth")
    source.heads = 3
    ours = load_backbone(checkpoint=source, image_size=None).eval()
    assert relative_error(ours.forward_features(make_images()), theirs.forward_features(make_images())) < 1e-5
    assert "mask_token" in ours.report.dropped
    assert any("SwiGLU with the gate first" in fact for fact in ours.report.assumed)


@pytest.mark.parametrize("weights", [*torchvision.models.ViT_B_16_Weights, *torchvision.models.ViT_H_14_Weights])
def test_torchvisions_input_range_matches_its_weights(weights: Any, tmp_path: Path) -> None:
    preset = weights.transforms()
    torch.save(torchvision_plain(NATIVE).state_dict(), tmp_path / "weights.pt")
    actual = load_weight_file(tmp_path / "weights.pt", "torchvision", NATIVE)
    pixels = torch.randint(256, (2, 3, NATIVE, NATIVE), dtype=torch.uint8)
    expected = torchvision.transforms.functional.normalize(pixels / 255, preset.mean, preset.std)
    torch.testing.assert_close(actual.normalize(pixels), expected, atol=1e-6, rtol=0)
    assert any("ImageNet's mean and std" in fact for fact in actual.report.assumed)


@torch.no_grad()
def test_torchvisions_eps_is_assumed_and_can_be_stated(tmp_path: Path) -> None:
    norm = partial(nn.LayerNorm, eps=1e-5)
    theirs = perturb(torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5, norm_layer=norm))
    path = save(theirs, "torchvision", tmp_path)
    assert any("eps 1e-6" in fact for fact in load_weight_file(path, "torchvision", NATIVE).report.assumed)
    source = Facts(eps=1e-5, heads=3).apply(read_file(path))
    ours = load_backbone(checkpoint=source, stem=None, image_size=NATIVE, num_classes=5, head="load").eval()
    assert relative_error(ours(make_images()), theirs(make_images())) < 1e-5
    assert not any("eps" in fact for fact in ours.report.assumed)


def test_the_stem_is_inferred_from_names() -> None:
    stems = {"timm post": "post", "timm AIMv2": "post", "timm NaFlexViT dual": "dpn"} | {
        n: "dpn" for n in SOURCES if n.startswith("vit-pytorch")
    }
    for name, (build, _, _, _) in SOURCES.items():
        model = build(NATIVE)
        (actual,) = formats_of(list(model.state_dict()))
        config = {"model_type": "ijepa"} if "I-JEPA" in name else {}
        assert actual.read(Contents(dict(model.state_dict()), config=config)).stem == stems.get(name, "none"), name


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
    actual = load_backbone(
        checkpoint=source, stem=stem, image_size=32, num_classes=arrays["output"].shape[1], head="load"
    )
    assert relative_error(actual.eval()(torch.from_numpy(arrays["image"])), torch.from_numpy(arrays["output"])) < 1e-5


def wrong_eps(actual: Any) -> None:
    for module in actual.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5 if module.eps == 1e-6 else 1e-6


def wrong_gelu(actual: Any) -> None:
    for block in actual.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")


def permuted_projection(actual: Any) -> None:
    weight = actual.patch_embed.proj.weight
    flat = rearrange(weight, "d c p q -> d (c p q)").reshape(len(weight), *weight.shape[2:], 3)
    weight.copy_(flat.permute(0, 3, 1, 2).clone())


def permuted_norm(actual: Any) -> None:
    for parameter in actual.patch_embed.norm_in.parameters():
        parameter.copy_(rearrange(parameter, "(p q c) -> (c p q)", p=8, q=8).clone())


def swapped_norms(actual: Any) -> None:
    """For B/16 both have 768 features; here they are forced on each other as far as they go."""
    first, second = actual.patch_embed.norm_in, actual.patch_embed.norm
    first.weight[:48].copy_(second.weight)


def class_token_without_position(actual: Any) -> None:
    actual.cls_token.zero_()


def class_token_last(actual: Any) -> None:
    actual.pos_embed.copy_(actual.pos_embed.roll(1, dims=1))


def no_pre_logits(actual: Any) -> None:
    actual.pre_logits = None


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("timm", wrong_eps),
        ("timm", wrong_gelu),
        ("timm", permuted_projection),
        ("timm", class_token_without_position),
        ("timm", class_token_last),
        ("timm BEiT-3", wrong_eps),
        ("timm BEiT-3", class_token_without_position),
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
    expected = perturb(build(NATIVE))
    ours = load_weight_file(save(expected, name, tmp_path), name, NATIVE)
    spoil(ours)
    assert relative_error(ours(make_images()), output(expected, make_images())) > 2e-5
