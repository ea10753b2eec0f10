"""Fold norms that are a scale and a shift in evaluation into the adjacent layers, which gives a plain ViT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DpnError
from dpn_cli.model.block import HeadScale, NormBlock, NormSlots
from dpn_cli.model.norms import RunningNorm
from dpn_cli.model.stem import Affine, PatchStem
from dpn_cli.run.files import replace_file
from dpn_cli.weights.backbone import Backbone, describe_backbone, load_with_head
from dpn_cli.weights.convert import PROOF_IMAGES, TOLERANCE, origin_metadata, proof_images, relative_difference
from dpn_cli.weights.formats import Checkpoint, read_file
from dpn_cli.weights.safetensors_io import save_weights

ScaleShift = tuple[Tensor, Tensor]


def fold_file(source: Checkpoint, target: Path) -> dict[str, Any]:
    """Write the network of `source`, head included, with its norms folded; returns its path, digest and error.

    The outputs of the reloaded file on seeded random images must agree with those of `source` within `TOLERANCE`,
    relative to the largest. Raises `DpnError` when they do not, and as `fold` does; then nothing is written. Raises
    `SaveError` when writing fails.
    """
    model = load_with_head(source, None).double()  # so that the error is the rounding of the written weights alone
    original_config = model.config
    images = proof_images(model).double()
    with torch.no_grad():
        expected = model(images)
    folded = fold(model, source.source)
    metadata = {**describe_backbone(model), **source.about, "origin": origin_metadata(model)}
    state = {name: value.float() for name, value in model.state_dict().items()}
    error = 0.0

    def write(temporary: Path) -> None:
        nonlocal error
        save_weights(temporary, state, metadata)
        with torch.no_grad():
            error = relative_difference(expected, load_with_head(read_file(temporary), None).double()(images))
        if not error <= TOLERANCE:
            raise DpnError(
                f"{target}: not written: outputs on {PROOF_IMAGES} random images differ by {error:.1e} (relative), "
                f"more than {TOLERANCE:.0e}, from those of {source.source}"
            )

    digest = replace_file(target, write)
    return {
        "path": str(target),
        "digest": digest,
        "before": str(original_config),
        "after": str(model.config),
        "folded": folded,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images": PROOF_IMAGES,
        "difference": error,
    }


@torch.no_grad()
def fold(model: Backbone, source: str = "the network") -> list[str]:
    """Fold the norms of a network in evaluation into the adjacent layers, in place; returns their names.

    A norm y = s x + t is folded into the next linear layer as W diag(s) and b + W t, or into the previous one as
    diag(s) W and s b + t. NormFormer's head scales are folded, too. Raises `DpnError` when a norm of the blocks depends
    on its input, when a norm has no adjacent linear layer, and when the network has nothing to fold.
    """
    config, options, folded_names = model.config, model.config.norm_options, list[str]()
    stem_folds = options.stem == "same" or config.stem == "affine_only"
    if config.norm == "none" or (config.norm == "ln" and not stem_folds):
        raise DpnError(
            f"{source}: {config} has no norm that can be folded: LayerNorm takes its statistics from the input"
        )
    if stem_folds:
        folded_names += _fold_stem(model, source)
    if config.norm != "ln":
        for index, block in enumerate(model.blocks):
            folded_names += _fold_layer_scale(block, f"blocks.{index}")
            folded_names += _fold_block(block, f"blocks.{index}", source)
    if options.final == "same":
        next_layers = _readers_of_final_norm(model, source)
        affine = _remove_norm(model, "norm", "network", source)
        for layer in next_layers:
            _fold_into_next(affine, layer)
        folded_names.append("norm")
    changes: dict[str, Any] = {"stem": "none"} if stem_folds else {}
    if config.norm != "ln":
        remaining_options = NormOptions(final=options.final, class_token_at=options.class_token_at)
        changes |= {"norm": "none", "placement": "pre,pre", "norm_options": remaining_options, "layer_scale": None}
    model.config = replace(config, **changes)
    return folded_names


def _fold_layer_scale(block: nn.Module, name: str) -> list[str]:
    """Multiply LayerScale into the last layers of attention and MLP, before norms after these are folded."""
    folded_names = []
    for scale, branch, last in (("ls1", "attn", "proj"), ("ls2", "mlp", "fc2")):
        layer_scale = getattr(block, scale)
        if not isinstance(layer_scale, nn.Identity):
            gamma = layer_scale.gamma.double()
            _fold_into_previous((gamma, torch.zeros_like(gamma)), getattr(getattr(block, branch), last))
            setattr(block, scale, nn.Identity())
            folded_names.append(f"{name}.{scale}")
    return folded_names


def _fold_block(block: nn.Module, name: str, source: str) -> list[str]:
    assert isinstance(block, NormBlock)
    if block.res_scale is not None:
        raise DpnError(
            f"{source}: {name}.res_scale multiplies the residual stream, which more than one layer reads, and cannot "
            "be folded"
        )
    folded_names = []
    for number, slots in enumerate(block.norm_slots, 1):
        branch, first, last = ("attn", "qkv", "proj") if number == 1 else ("mlp", "fc1", "fc2")
        layer: Any = getattr(block, branch)
        post_norm = f"post_norm{number}" if slots.pre else f"norm{number}"
        if slots.post and not slots.on_branch:
            raise DpnError(
                f"{source}: {name}.{post_norm} follows the residual sum, which more than one layer reads; only norms "
                "before a layer, and after it on the branch (norm_options.post=branch), can be folded"
            )
        if slots.pre:
            _fold_into_next(_remove_norm(block, f"norm{number}", name, source), getattr(layer, first))
            folded_names.append(f"{name}.norm{number}")
        if slots.post:
            _fold_into_previous(_remove_norm(block, post_norm, name, source), getattr(layer, last))
            folded_names.append(f"{name}.{post_norm}")
        if isinstance(layer.norm, HeadScale):
            scale = layer.norm.scale.double().repeat_interleave(layer.attn_dim // len(layer.norm.scale))
            _fold_into_next((scale, torch.zeros_like(scale)), layer.proj)
            layer.norm = nn.Identity()
        elif not isinstance(layer.norm, nn.Identity):
            _fold_into_next(_remove_norm(layer, "norm", f"{name}.{branch}", source), getattr(layer, last))
            folded_names.append(f"{name}.{branch}.norm")
    block.norm_slots = NormSlots(True, False), NormSlots(True, False)
    return folded_names


def _remove_norm(module: nn.Module, slot: str, name: str, source: str) -> ScaleShift:
    """Replace a norm of a module by an identity; returns its scale and shift per feature."""
    affine = _affine(getattr(module, slot), f"{name}.{slot}", source)
    setattr(module, slot, nn.Identity())
    return affine


def _fold_stem(model: Backbone, source: str) -> list[str]:
    stem, folded_names = model.patch_embed, []
    assert isinstance(stem, PatchStem)
    for name in ("norm_in", "norm"):
        if isinstance(getattr(stem, name), nn.Identity):
            continue
        scale, shift = _remove_norm(stem, name, "patch_embed", source)
        weight, bias = stem.proj.weight.double(), stem.proj.bias.double()
        if name == "norm_in":  # over patches flattened as (row, column, channel)
            rows, columns = stem.patch_size
            scale, shift = (rearrange(value, "(p q c) -> c p q", p=rows, q=columns) for value in (scale, shift))
            weight, bias = weight * scale, bias + (weight * shift).sum((1, 2, 3))
        else:
            weight, bias = weight * scale[:, None, None, None], bias * scale + shift
        stem.proj.weight.copy_(weight)
        stem.proj.bias.copy_(bias)
        folded_names.append(f"patch_embed.{name}")
    if not isinstance(model.norm_posemb, nn.Identity):
        scale, shift = _remove_norm(model, "norm_posemb", "network", source)
        stem.proj.weight.copy_(stem.proj.weight.double() * scale[:, None, None, None])
        stem.proj.bias.copy_(stem.proj.bias.double() * scale + shift)
        model.pos_embed.copy_(model.pos_embed.double() * scale)
        folded_names.append("norm_posemb")
    return folded_names


def _readers_of_final_norm(model: Backbone, source: str) -> list[nn.Module]:
    """Return the linear layers that alone read the final norm's output, pooled or not: one, or two heads."""
    if model.attn_pool is not None:
        layers: list[nn.Module] = [model.attn_pool.kv]
    elif model.pre_logits is not None:
        layers = [model.pre_logits]
    else:
        layers = [model.head, *([] if model.head_dist is None else [model.head_dist])]
    if not all(isinstance(layer, nn.Linear) for layer in layers):
        raise DpnError(
            f"{source}: no layer follows its final norm, into which it could be folded; the file has no head"
        )
    return layers


def _affine(norm: nn.Module, name: str, source: str) -> ScaleShift:
    """Return scale and shift per feature of a norm in evaluation. Raises `DpnError` when it has none."""
    if isinstance(norm, Affine):
        return norm.weight.double(), norm.bias.double()
    pair = norm.affine() if isinstance(norm, RunningNorm) else None
    if pair is None:
        kind = type(norm).__name__
        raise DpnError(
            f"{source}: {name} is a {kind}, which depends on its input in evaluation and cannot be folded; "
            "bn, un, prepbn and powernorm without group_scale can"
        )
    return pair


def _fold_into_next(affine: ScaleShift, layer: Any) -> None:
    scale, shift = affine
    weight = layer.weight.double()
    layer.bias.copy_(layer.bias.double() + weight @ shift)
    layer.weight.copy_(weight * scale)


def _fold_into_previous(affine: ScaleShift, layer: Any) -> None:
    scale, shift = affine
    layer.weight.copy_(layer.weight.double() * scale[:, None])
    layer.bias.copy_(layer.bias.double() * scale + shift)
