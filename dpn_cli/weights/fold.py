"""Fold norms that are a scale and a shift in evaluation into the layers beside them: a plain ViT results."""

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
from dpn_cli.weights.backbone import Backbone, describe_backbone, load_whole
from dpn_cli.weights.convert import PROOF_IMAGES, TOLERANCE, origin, proof_images, relative_difference
from dpn_cli.weights.formats import Checkpoint, read_file
from dpn_cli.weights.safetensors_io import save_weights

Fold = tuple[Tensor, Tensor]


def fold_file(source: Checkpoint, target: Path) -> dict[str, Any]:
    """Write the network of `source`, head included, with its norms folded; returns what was written and how exact.

    The written file is loaded again and has to give the outputs of `source` on seeded random images within
    `TOLERANCE`, relative to the largest. Raises `DpnError` when it does not, and as `fold` does; nothing is written
    then. Raises `SaveError` when writing fails.
    """
    model = load_whole(source, None).double()  # what remains then is the rounding of the weights that are written
    before = model.config
    images = proof_images(model).double()
    with torch.no_grad():
        expected = model(images)
    folded = fold(model, source.source)
    metadata = {**describe_backbone(model), **source.about, "origin": origin(model)}
    state = {name: value.float() for name, value in model.state_dict().items()}
    error = 0.0

    def write(temporary: Path) -> None:
        nonlocal error
        save_weights(temporary, state, metadata)
        with torch.no_grad():
            error = relative_difference(expected, load_whole(read_file(temporary), None).double()(images))
        if not error <= TOLERANCE:
            raise DpnError(
                f"{target}: not written: outputs on {PROOF_IMAGES} random images differ by {error:.1e} (relative), "
                f"more than {TOLERANCE:.0e}, from those of {source.source}"
            )

    digest = replace_file(target, write)
    return {
        "path": str(target),
        "digest": digest,
        "before": str(before),
        "after": str(model.config),
        "folded": folded,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images": PROOF_IMAGES,
        "difference": error,
    }


@torch.no_grad()
def fold(model: Backbone, source: str = "the network") -> list[str]:
    """Fold the norms of a network in evaluation into the layers beside them, in place; returns their names.

    A norm y = s x + t goes into the linear layer behind it as W diag(s) and b + W t, or into the one before it as
    diag(s) W and s b + t. Raises `DpnError` when a norm of the blocks depends on its input, or when nothing but the
    residual stream is beside it, and when there is nothing to fold. NormFormer's scales of the heads are folded, too.
    """
    config, options, done = model.config, model.config.norm_options, list[str]()
    stem_folds = options.stem == "same" or config.stem == "affine_only"
    if config.norm == "none" or (config.norm == "ln" and not stem_folds):
        raise DpnError(
            f"{source}: {config} has no norm that can be folded: LayerNorm takes its statistics from the input"
        )
    if stem_folds:
        done += _fold_stem(model, source)
    if config.norm != "ln":
        for index, block in enumerate(model.blocks):
            done += _fold_block(block, f"blocks.{index}", source)
    if options.final == "same":
        behind = _layer_behind_final_norm(model, source)
        _fold_into_next(_remove_norm(model, "norm", "network", source), behind)
        done.append("norm")
    changes: dict[str, Any] = {"stem": "none"} if stem_folds else {}
    if config.norm != "ln":
        kept = NormOptions(final=options.final, class_token_at=options.class_token_at)
        changes |= {"norm": "none", "placement": "pre,pre", "norm_options": kept}
    model.config = replace(config, **changes)
    return done


def _fold_block(block: nn.Module, name: str, source: str) -> list[str]:
    assert isinstance(block, NormBlock)
    if block.res_scale is not None:
        raise DpnError(
            f"{source}: {name}.res_scale multiplies the residual stream, which more than one layer reads, and cannot "
            "be folded"
        )
    done = []
    for number, half in enumerate(block.norm_slots, 1):
        which, first, last = ("attn", "qkv", "proj") if number == 1 else ("mlp", "fc1", "fc2")
        layer: Any = getattr(block, which)
        after = f"post_norm{number}" if half.pre else f"norm{number}"
        if half.post and not half.on_branch:
            raise DpnError(
                f"{source}: {name}.{after} follows the residual sum, which more than one layer reads; only norms "
                "before a layer, and after it on the branch (norm_options.post=branch), can be folded"
            )
        if half.pre:
            _fold_into_next(_remove_norm(block, f"norm{number}", name, source), getattr(layer, first))
            done.append(f"{name}.norm{number}")
        if half.post:
            _fold_into_previous(_remove_norm(block, after, name, source), getattr(layer, last))
            done.append(f"{name}.{after}")
        if isinstance(layer.norm, HeadScale):
            scale = layer.norm.scale.double().repeat_interleave(layer.attn_dim // len(layer.norm.scale))
            _fold_into_next((scale, torch.zeros_like(scale)), layer.proj)
            layer.norm = nn.Identity()
        elif not isinstance(layer.norm, nn.Identity):
            _fold_into_next(_remove_norm(layer, "norm", f"{name}.{which}", source), getattr(layer, last))
            done.append(f"{name}.{which}.norm")
    block.norm_slots = NormSlots(True, False), NormSlots(True, False)
    return done


def _remove_norm(module: nn.Module, slot: str, name: str, source: str) -> Fold:
    """Take a norm out of a module; returns its scale and shift per feature."""
    affine = _affine(getattr(module, slot), f"{name}.{slot}", source)
    setattr(module, slot, nn.Identity())
    return affine


def _fold_stem(model: Backbone, source: str) -> list[str]:
    stem, done = model.patch_embed, []
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
        done.append(f"patch_embed.{name}")
    if not isinstance(model.norm_posemb, nn.Identity):
        scale, shift = _remove_norm(model, "norm_posemb", "network", source)
        stem.proj.weight.copy_(stem.proj.weight.double() * scale[:, None, None, None])
        stem.proj.bias.copy_(stem.proj.bias.double() * scale + shift)
        model.pos_embed.copy_(model.pos_embed.double() * scale)
        done.append("norm_posemb")
    return done


def _layer_behind_final_norm(model: Backbone, source: str) -> nn.Module:
    """Return the linear layer that alone reads the tokens behind the final norm, pooled or not."""
    if model.attn_pool is not None:
        layer: nn.Module = model.attn_pool.kv
    elif model.pre_logits is not None:
        layer = model.pre_logits
    else:
        layer = model.head
    if not isinstance(layer, nn.Linear):
        raise DpnError(
            f"{source}: no layer follows its final norm, into which it could be folded; the file has no head"
        )
    return layer


def _affine(norm: nn.Module, name: str, source: str) -> Fold:
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


def _fold_into_next(affine: Fold, layer: Any) -> None:
    scale, shift = affine
    weight = layer.weight.double()
    layer.bias.copy_(layer.bias.double() + weight @ shift)
    layer.weight.copy_(weight * scale)


def _fold_into_previous(affine: Fold, layer: Any) -> None:
    scale, shift = affine
    layer.weight.copy_(layer.weight.double() * scale[:, None])
    layer.bias.copy_(layer.bias.double() * scale + shift)
