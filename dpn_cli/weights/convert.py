"""Inspection of weight files, and conversion to another format with a numerical check before writing."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpn_cli import __version__
from dpn_cli.arch import Act, size_name
from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.vit import DPNViT
from dpn_cli.run.artifact_kinds import kind_of
from dpn_cli.run.files import replace_file
from dpn_cli.weights.backbone import Backbone, describe_backbone, load_backbone, load_with_head
from dpn_cli.weights.formats import Checkpoint, check_facts, read_file
from dpn_cli.weights.formats.state_dict import Rgb
from dpn_cli.weights.formats.timm_vit import KEY
from dpn_cli.weights.infer_config import infer_config
from dpn_cli.weights.safetensors_io import save_weights

TOLERANCE = 1e-5
PROOF_IMAGES, PROOF_SEED = 4, 0


@dataclass(frozen=True)
class Facts:
    """Facts about a file that the user states; None leaves the reader's value."""

    eps: float | None = None
    act: Act | None = None
    heads: int | None = None
    grid: tuple[int, int] | None = None
    mean: Rgb | None = None
    std: Rgb | None = None

    def apply(self, source: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the stated facts. Raises `DpnError` for facts that do not fit it."""
        given_facts = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        assumed = {name: text for name, text in source.assumed.items() if name not in given_facts}
        notes = [f"{name} {value} as stated by the user" for name, value in given_facts.items()]
        applied = replace(source, **given_facts, assumed=assumed, notes=[*source.notes, *notes])
        attention = source.state.get("blocks.0.attn.qkv.weight")
        if self.heads and attention is not None and len(attention) // 3 % self.heads:
            width = len(attention) // 3
            raise DpnError(f"--heads {self.heads}: {self.heads} heads do not divide its attention's {width} features")
        try:
            check_facts(applied)
        except ValueError as error:
            raise DpnError(
                f"{', '.join(f'--{name} {value}' for name, value in given_facts.items())}: {error}"
            ) from error
        return applied


def inspect(source: Checkpoint, image_size: int | tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the architecture of a weight file and the report of loading it at `image_size` (default: the file's).

    Raises `DpnError` when it cannot be loaded.
    """
    model = load_backbone(checkpoint=source.copy(), stem=None, image_size=image_size)
    config, size, head = model.config, model.config.size, source.state.get("head.weight")
    report = model.report.to_dict()
    name, patch = size_name(size), "x".join(map(str, sorted(set(config.patch))))
    return {
        "source": source.source,
        "format": source.format,
        "kind": kind_of(source.about),
        "digest": source.digest,
        "arch": f"{name}/{patch}" if name else None,
        "width": size.width,
        "depth": size.depth,
        "mlp": size.mlp,
        "heads": size.heads,
        "attn_width": config.attn_width or size.width,
        "parameters": report["parameters"],
        "stem": config.stem,
        "norm": config.norm,
        "placement": config.placement,
        "norm_options": config.norm_options.model_dump(exclude_defaults=True),
        "patch": list(config.patch),
        "grid": list(infer_config(source.copy()).grid),
        "image_size": list(config.image_size),
        "posemb": config.posemb,
        "pool": config.pool,
        "mean_beside_class_token": config.mean_beside_class_token,
        "pre_logits": config.pre_logits,
        "pre_norm": config.pre_norm,
        "fc_norm": config.fc_norm,
        "registers": config.registers,
        "distillation_token": config.distillation_token,
        "layer_scale": config.layer_scale is not None,
        "swiglu": config.swiglu,
        "classes": None if head is None else len(head),
        "eps": config.eps,
        "act": config.act,
        "mean": list(model.mean),
        "std": list(model.std),
        **{key: report[key] for key in ("renamed", "resized", "dropped", "new", "assumed", "notes")},
    }


def convert(
    source: Checkpoint,
    target: Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    to: Literal["dpn", "timm"] = "dpn",
) -> dict[str, Any]:
    """Write the network of `source`, head included, to a safetensors file; returns its path, digest and error.

    The written file is reloaded, for ``to="timm"`` by timm into timm's model. Its outputs on seeded random images must
    agree within `TOLERANCE`, relative to the largest, in double precision, since rounding is not the file's fault.
    Raises `DpnError` when they do not, or when timm's model cannot hold the network; then nothing is written. Raises
    `SaveError` when writing fails.
    """
    model = load_with_head(source, image_size)
    state = model.state_dict() if to == "dpn" else timm_state(model)
    description = describe_backbone(model) if to == "dpn" else describe_timm(model)
    metadata = {**description, **source.about, "origin": origin_metadata(model)}
    images = proof_images(model)
    error = 0.0

    def write(temporary: Path) -> None:
        nonlocal error
        save_weights(temporary, state, metadata)
        reloaded = load_with_head(read_file(temporary), None) if to == "dpn" else build_timm(temporary)
        overflow = max_relative_difference(model, model, images)  # infinite where outputs are no numbers, else zero
        error = max(
            overflow, max_relative_difference(copy.deepcopy(model).double(), reloaded.double(), images.double())
        )
        if not error <= TOLERANCE:
            raise DpnError(
                f"{target}: not written: outputs on {PROOF_IMAGES} random images differ by {error:.1e} (relative), "
                f"more than {TOLERANCE:.0e}, from those of {source.source}; please report the file's origin"
            )

    digest = replace_file(target, write)
    return {
        "path": str(target),
        "digest": digest,
        "layout": to,
        "parameters": model.report.parameters,
        "image_size": list(model.config.image_size),
        "images": PROOF_IMAGES,
        "difference": error,
        "report": model.report.to_dict(),
    }


def origin_metadata(model: Backbone) -> str:
    """Return the source of the weights and the changes since, as JSON for a file's metadata."""
    report = model.report
    return json.dumps({"source": report.source, "format": report.format, "digest": report.digest,
                       "resized": report.resized, "new": report.new, "assumed": report.assumed,
                       "notes": report.notes, "dpn": __version__})  # fmt: skip


def proof_images(model: Backbone) -> Tensor:
    """Return the seeded random images (n, 3, h, w) for comparing two networks."""
    shape = PROOF_IMAGES, 3, *model.config.image_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(PROOF_SEED))


def relative_difference(outputs: Tensor, other_outputs: Tensor) -> float:
    """Return the largest difference of outputs from others, relative to the largest; infinite if one is not finite."""
    if not (outputs.isfinite().all() and other_outputs.isfinite().all()):
        return math.inf
    return float((outputs - other_outputs).abs().max() / outputs.abs().max().clamp(min=1e-30))


@torch.no_grad()
def max_relative_difference(model: Any, other: Any, images: Tensor) -> float:
    """Return the largest relative difference of tokens and outputs of two ViTs, image by image."""
    return max(
        max(
            relative_difference(model.forward_features(image), other.forward_features(image)),
            relative_difference(model(image), other(image)),
        )
        for image in torch.split(images, 1)
    )


def timm_state(model: DPNViT) -> dict[str, Tensor]:
    """Return the state dict of timm's VisionTransformer for the same network, class token with a position of zero.

    Raises `DpnError` when timm's VisionTransformer cannot hold it, with the reason.
    """
    config = model.config
    reasons = {
        "no norm where this stem has one (its NaFlexViT takes the setting and ignores it)": config.stem
        not in ("none", "post"),
        "no such norms in its blocks": _timm_blocks(config) is None,
        "no registers in networks with a distillation token": config.distillation_token and config.registers > 0,
        "no distillation token in networks of SwiGLU": config.distillation_token and config.swiglu,
        "no class token that joins behind the first block": config.class_token_at > 0,
        "no pre_logits layer": config.pre_logits,
        "no rotary positions": config.posemb == "rope",
        "no attention of another width than the trunk": config.attn_width is not None,
        "no bias in a projection whose norm is followed by another": config.pre_norm and config.stem == "post",
    }
    for reason, is_met in reasons.items():
        if is_met:
            raise DpnError(f"--to timm: {config}: timm's VisionTransformer has {reason}; use --to dpn")
    state = dict(model.state_dict())
    if config.pre_norm:  # timm's projection has no bias then; ours goes into the positions of the patches
        state["pos_embed"] = state["pos_embed"] + state.pop("patch_embed.proj.bias")
    if config.prefix_tokens:
        zeros = torch.zeros(1, config.prefix_tokens, config.size.width)
        state["pos_embed"] = torch.cat([zeros, state["pos_embed"]], dim=1)
    if config.distillation_token and config.num_classes and not config.distillation_head:
        state |= {f"head_dist.{leaf}": state[f"head.{leaf}"] for leaf in ("weight", "bias")}
    return state


def _timm_blocks(config: ViTConfig) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a timm model with such blocks and tokens, and its arguments; None if timm has none."""
    plain = "vit_base_patch16_224"
    if config.swiglu:
        plain = "vit_giant_patch14_reg4_dinov2"
    elif config.distillation_token:
        plain = "deit_base_distilled_patch16_224"
    options = config.norm_options.model_copy(update={"subln_init": True, "class_token_at": None})
    final = {"final_norm": False} if options.final == "none" and not config.fc_norm else {}
    # The initialisation of Sub-LN no longer matters, and `timm_state` refuses a class token that joins late.
    match config.norm, config.placement, options.model_copy(update={"final": "ln"} if final else {}):
        case "ln" | "none", "pre,pre", options if options == NormOptions():
            return plain, final
        case "none", "pre,pre", options if options == NormOptions(final="same"):
            return plain, {"final_norm": False}
        case "ln", "subln", options if options == NormOptions():
            return plain, {"scale_attn_norm": True, "scale_mlp_norm": True, **final}
        case "ln", "post,post", options if options == NormOptions(post="branch") and plain == "vit_base_patch16_224":
            return "vit_base_patch16_rpn_224", {"qkv_bias": True, **final}
    return None


def describe_timm(model: Backbone) -> dict[str, str]:
    """Return safetensors metadata with the fields of timm's config.json: model name, arguments and inputs."""
    config = model.config
    # Any of timm's ViTs with these blocks will do, since the arguments override the rest of its definition.
    name, blocks = _timm_blocks(config) or ("", {})
    arguments = {
        **blocks,
        "img_size": list(config.image_size),
        "patch_size": list(config.patch),
        "embed_dim": config.size.width,
        "depth": config.size.depth,
        "num_heads": config.size.heads,
        "mlp_ratio": (config.mlp_rows + 0.5) / config.size.width,  # timm cuts the product off
        "num_classes": config.num_classes,
        "class_token": config.has_class_token,
        "reg_tokens": config.registers,
        "no_embed_class": False,
        "init_values": config.layer_scale,
        "global_pool": {"tok": "token", "gap": "avg", "map": "map"}[config.pool],
        "pre_norm": config.pre_norm,
        "fc_norm": config.fc_norm,
        "act_layer": "silu" if config.swiglu else config.act,
    }
    if config.stem == "post":
        arguments["embed_norm_layer"] = "layernorm"
    description = {
        "norm": config.norm,
        "architecture": name,
        "model_args": arguments,
        "norm_eps": config.eps,
        "pretrained_cfg": {"mean": list(model.mean), "std": list(model.std), "input_size": [3, *config.image_size]},
    }
    return {KEY: json.dumps(description)}


def build_timm(path: Path) -> nn.Module:
    """Build timm's VisionTransformer from a file that `convert` wrote for it, and load it strictly."""
    import timm
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()[KEY])
    model: nn.Module = timm.create_model(
        description["architecture"],
        norm_layer=partial(nn.LayerNorm, eps=description["norm_eps"]),
        **description["model_args"],
    )
    if description.get("norm") == "none":
        for block in model.get_submodule("blocks").children():
            block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    model.load_state_dict(load_file(path))
    return model.eval()
