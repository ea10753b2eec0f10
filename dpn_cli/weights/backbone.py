"""Build and load the Vision Transformer of every task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dpn_cli.arch import Pool, Posemb, Stem, check_image_size, check_norm, check_placement, check_stem, parse_arch
from dpn_cli.config.network import BackboneConfig, NormOptions
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.norms import has_running_norms, set_start_progress
from dpn_cli.model.vit import DPNViT, posemb_sincos2d, resample_posemb
from dpn_cli.weights.formats import Checkpoint, State, network_metadata
from dpn_cli.weights.infer_config import infer_config
from dpn_cli.weights.load_report import SCRATCH, LoadReport
from dpn_cli.weights.locate import open_checkpoint
from dpn_cli.weights.safetensors_io import write_weights

HEAD = ("head.weight", "head.bias")
DISTILLATION_HEAD = ("head_dist.weight", "head_dist.bias")
Rgb = tuple[float, float, float]
# Mean and standard deviation of inputs from -1 to 1.
HALF: Rgb = (0.5, 0.5, 0.5)


class Backbone(DPNViT):
    """A `DPNViT` with its load report and its input range."""

    input_mean: Tensor
    input_std: Tensor

    def __init__(self, config: ViTConfig, mean: Rgb, std: Rgb, report: LoadReport) -> None:
        super().__init__(config)
        self.mean, self.std, self.report = mean, std, report
        if config.drop_path and config.size.depth == 1:
            report.notes.append(f"backbone.drop_path={config.drop_path:g} does nothing in a network of one block")
        for name, values in (("input_mean", mean), ("input_std", std)):
            self.register_buffer(name, torch.tensor(values, device="cpu")[:, None, None], persistent=False)

    def normalize(self, image: Tensor) -> Tensor:
        """Map uint8 pixels (b, 3, h, w) to the input range that the weights were trained with."""
        full = torch.promote_types(self.input_mean.dtype, torch.float32)
        floats = image.to(full, copy=True)  # one allocation: new memory costs more than the arithmetic
        return floats.div_(255).sub_(self.input_mean).div_(self.input_std)


def load_backbone(
    arch: str | None = None,
    *,
    stem: str | None = None,
    norm: str | None = None,
    placement: str | None = None,
    norm_options: NormOptions | Mapping[str, Any] | None = None,
    checkpoint: str | Checkpoint | None = None,
    image_size: int | tuple[int, int] | None = 224,
    num_classes: int = 0,
    head: Literal["new", "load"] = "new",
    pool: Pool | None = None,
    pre_logits: bool | None = None,
    posemb: Posemb | None = None,
    registers: int | None = None,
    distillation_token: bool | None = None,
    layer_scale: float | None = None,
    swiglu: bool | None = None,
    drop_path: float = 0.0,
    drop_path_rescale: bool = True,
    dropout: float = 0.0,
    grad_checkpointing: bool = False,
    align_corners: bool = True,
    seed: int = 0,
) -> Backbone:
    """Build a ViT and fill it from a weight file, or with big_vision's initialisation.

    Args:
        arch: ``"SIZE/PATCH"``; None infers it from the checkpoint.
        stem: one of Table 6's; must equal the checkpoint's. None takes the checkpoint's, dpn from scratch.
        norm: norm of the blocks, one of `arch.NORMS`; as `stem`, with ln from scratch.
        placement: positions of the norms in a block, one of `arch.PLACEMENTS`; as `stem`, with pre,pre from scratch.
        norm_options: options of the norms, see `NormOptions`; as `stem`.
        checkpoint: a source for `open_checkpoint`, or an open checkpoint; None or ``"none"`` starts from scratch.
        image_size: pixels, one number or (height, width); position embeddings are resampled to it. None takes
            the checkpoint's size, and 224 from scratch.
        num_classes: classes of the head; 0 for none. A new head is zero.
        head: ``"load"`` takes the checkpoint's head, which must have `num_classes`; ``"new"`` drops it.
        pool: ``"tok"``, ``"gap"`` or ``"map"``; None takes the checkpoint's, or ``"tok"`` from scratch.
        pre_logits: from scratch only: add the dense tanh layer before the head.
        posemb: ``"learn"``, ``"sincos2d"`` or ``"rope"``, both fixed; None takes the checkpoint's, or ``"learn"``.
        registers, distillation_token, layer_scale, swiglu: as in `ViTConfig`; None takes the checkpoint's, or none
            from scratch. With a checkpoint `layer_scale` only says that there is one.
        drop_path: stochastic depth rate of the last block; block l of L gets l / (L - 1) of it.
        drop_path_rescale: divide by the probability of keeping a branch (Scenic, timm); big_vision does not.
        dropout: rate after the position embedding, the attention and both layers of the MLP.
        grad_checkpointing: recompute activations of the blocks in the backward pass.
        align_corners: mode of resampling position embeddings, see `resample_posemb`.
        seed: of the initialisation from scratch.

    Raises:
        DpnError: unknown arch or stem, or a checkpoint of another network.
        DataError: a missing, damaged or unreachable file, or an incomplete network; lists ``-`` and ``+`` tensors.
    """
    options = None if norm_options is None else NormOptions.model_validate(dict(norm_options))
    parts: dict[str, Any] = {
        "pre_logits": pre_logits,
        "posemb": posemb,
        "registers": registers,
        "distillation_token": distillation_token,
        "layer_scale": layer_scale,
        "swiglu": swiglu,
    }
    parts = {key: value for key, value in parts.items() if value is not None}
    dropped: dict[str, Any] = {"drop_path": drop_path, "drop_path_rescale": drop_path_rescale, "dropout": dropout}
    if checkpoint is None or checkpoint == "none":
        config = config_from_scratch(arch, stem, norm, placement, options, image_size, pool)
        config = replace(config, num_classes=num_classes, **dropped, **parts)
        model = Backbone(config, HALF, HALF, LoadReport(SCRATCH, f"big_vision init, seed {seed}"))
        model.initialize(seed)
    else:
        source = open_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
        _check_stem_agrees(source, check_stem(stem) if stem else None)
        _check_norms_agree(source, norm and check_norm(norm), placement and check_placement(placement), options)
        config = replace(infer_config(source, arch, pool, image_size), num_classes=num_classes, **dropped)
        model = _load(source, config, parts, head, align_corners)
    _set_grad_checkpointing(model, grad_checkpointing)
    model.report.parameters = sum(parameter.numel() for parameter in model.parameters())
    model.report.network = str(model.config)
    return model


def _set_grad_checkpointing(model: Backbone, enabled: bool) -> None:
    """Turn recomputation on or off. Raises `DpnError` where it would change running statistics."""
    if enabled and has_running_norms(model):
        raise DpnError(
            f"backbone.grad_checkpointing: --norm {model.config.norm} would count every batch twice in its running "
            "statistics; use a smaller --micro-batch-size instead"
        )
    model.set_grad_checkpointing(enabled)


def config_from_scratch(
    arch: str | None,
    stem: str | None,
    norm: str | None,
    placement: str | None,
    options: NormOptions | None,
    image_size: int | tuple[int, int] | None,
    pool: Pool | None,
) -> ViTConfig:
    """Return the config of a network from scratch, without a head. Raises `DpnError` without an architecture."""
    if arch is None:
        raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
    size, side = parse_arch(arch)
    return ViTConfig(
        size,
        (side, side),
        check_image_size(image_size or 224, (side, side)),
        check_stem(stem or "dpn"),
        pool or "tok",
        norm=check_norm(norm or "ln"),
        placement=check_placement(placement or "pre,pre"),
        norm_options=options or NormOptions(),
    )


def backbone_of(section: BackboneConfig, **overrides: Any) -> Backbone:
    """Load the network of a config's section, whose keys are arguments of `load_backbone`; `overrides` replace them."""
    return load_backbone(**{**section.model_dump(), **overrides})


def load_with_head(source: Checkpoint, image_size: int | tuple[int, int] | None) -> Backbone:
    """Load a network with its head, if it has one, for evaluation; `source` stays usable."""
    head = source.state.get("head.weight")
    classes = 0 if head is None else len(head)
    model = load_backbone(
        checkpoint=source.copy(),
        stem=None,
        image_size=image_size,
        num_classes=classes,
        head="load" if classes else "new",
    )
    model.eval()
    return model


def export_backbone(model: Backbone, path: Path, extra: Mapping[str, str] | None = None) -> str:
    """Write a network in our layout as safetensors with its description; returns the file's SHA-256.

    `load_backbone` reads it back to the bit. The write is atomic. Raises `SaveError` when it fails.
    """
    return write_weights(path, model.state_dict(), {**describe_backbone(model), **(extra or {})})


def describe_backbone(model: Backbone) -> dict[str, str]:
    """Return the safetensors metadata from which `load_backbone` rebuilds this network."""
    return network_metadata(as_checkpoint(model, {}))


def as_checkpoint(model: Backbone, state: State) -> Checkpoint:
    """Return this network as a reader would, with `state` for its tensors."""
    config = model.config
    return Checkpoint(
        state,
        "dpn",
        config.stem,
        config.eps,
        config.act,
        heads=config.size.heads,
        grid=config.grid,
        pool=config.pool,
        mean=model.mean,
        std=model.std,
        posemb=config.posemb,
        norm=config.norm,
        placement=config.placement,
        norm_options=config.norm_options,
    )


def _check_norms_agree(
    source: Checkpoint, norm: str | None, placement: str | None, options: NormOptions | None
) -> None:
    """Raise `DpnError` if the requested norms of the blocks differ from the checkpoint's."""
    for option, requested, actual in (
        ("--norm", norm, source.norm),
        ("--placement", placement, source.placement),
        ("backbone.norm_options", options, source.norm_options),
    ):
        if requested is not None and requested != actual:
            raise DpnError(
                f"{option} {requested}: {source.source} was trained with {actual}. Ways out: leave it out to use "
                f"this network as it is; --checkpoint with weights that were trained with {requested}; --checkpoint "
                "none to train from scratch"
            )


def _check_parts_agree(source: Checkpoint, config: ViTConfig, parts: Mapping[str, Any]) -> None:
    """Raise `DpnError` if requested parts of the network differ from the checkpoint's."""
    for key, value in parts.items():
        actual = getattr(config, key)
        if key == "layer_scale":  # a file has the scales, and not what they began with
            value, actual = bool(value), bool(actual)
        if value != actual:
            raise DpnError(f"backbone.{key}={value}: {source.source} was trained with {actual}; leave the key out")


def _check_stem_agrees(source: Checkpoint, stem: Stem | None) -> None:
    if stem in (None, source.stem):
        return
    retrofit = "'dpn checkpoint retrofit' for a start of training from this one; " if source.stem == "none" else ""
    raise DpnError(
        f"--stem {stem}: {source.source} has stem {source.stem!r} and its norms cannot be guessed. "
        f"Ways out: leave --stem out to use this network as it is; --checkpoint with weights that were trained "
        f"with stem {stem!r}; {retrofit if stem == 'dpn' else ''}--checkpoint none to train from scratch"
    )


def _load(source: Checkpoint, config: ViTConfig, parts: Mapping[str, Any], head: str, align_corners: bool) -> Backbone:
    """Build the network and move the tensors into it. Raises as `load_backbone` does."""
    _check_parts_agree(source, config, parts)
    if head == "load" and config.distillation_token and DISTILLATION_HEAD[0] in source.state:
        config = replace(config, distillation_head=True)
    report = LoadReport(
        source.source,
        source.format,
        source.digest,
        renamed=source.renamed,
        dropped=list(source.dropped),
        new=list(source.added),
        assumed=list(source.assumed.values()),
        notes=list(source.notes),
    )
    with torch.device("meta"):
        model = Backbone(config, source.mean, source.std, report)
    state = source.state
    _fit_state(state, model, source, head, align_corners)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if expected != shapes:
        _raise_mismatch(report.source, expected, shapes)
    weights = {name: torch.empty(shape) for name, shape in expected.items()}
    for name, value in weights.items():
        value.copy_(state.pop(name))  # one by one, so that a file's tensors are freed as they are copied
    model.load_state_dict(weights, assign=True)
    set_start_progress(model)
    return model


def _raise_mismatch(source: str, expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> NoReturn:
    """Raise the error about tensors that do not fit: `DpnError` for another number of classes, else `DataError`."""
    mismatched = {name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)}
    head, new = shapes.get(HEAD[0], ()), expected.get(HEAD[0], ())
    if mismatched == set(HEAD) and len(head) == len(new) == 2 and head[1] == new[1]:
        raise DpnError(f"{source}: its head has {head[0]} classes, not the {new[0]} that were asked for")
    raise DataError(
        f"{source}: not the tensors of one whole ViT (- missing, + left over: "
        f"{_difference(expected, shapes)}); save the network's state dict alone, and all of it"
    )


def _fit_state(state: State, model: Backbone, source: Checkpoint, head: str, align_corners: bool) -> None:
    """Adapt the tensors, in place, to the network's image size, head and pooling."""
    config, report = model.config, model.report
    unused_prefixes = (
        ("attn_pool.", "dist_token", "head_dist.", *(() if config.has_class_token else ("cls_token",)))
        if config.pool == "gap"
        else ()
    )
    for name in [name for name in state if unused_prefixes and name.startswith(unused_prefixes)]:
        state.pop(name)
        report.dropped.append(name)
    if head == "new":
        report.dropped += [name for name in (*HEAD, *DISTILLATION_HEAD) if state.pop(name, None) is not None]
        if config.num_classes:
            state["head.weight"] = torch.zeros(config.num_classes, config.size.width)
            state["head.bias"] = torch.zeros(config.num_classes)
            report.new += [f"{name} (zero)" for name in HEAD]
    if config.posemb == "sincos2d":
        state["pos_embed"] = posemb_sincos2d(config.grid, config.size.width)
        report.notes.append("the position embedding is big_vision's fixed sin-cos one")
    elif config.posemb == "rope":
        state["pos_embed"] = torch.zeros(1, config.grid[0] * config.grid[1], config.size.width)
    elif "pos_embed" in state and source.grid is not None and source.grid != config.grid:
        old_grid = source.grid
        if tuple(state["pos_embed"].shape) == (1, old_grid[0] * old_grid[1], config.size.width):
            state["pos_embed"] = resample_posemb(state["pos_embed"], old_grid, config.grid, align_corners=align_corners)
            report.resized.append(
                f"pos_embed {old_grid[0]}x{old_grid[1]} -> {config.grid[0]}x{config.grid[1]} "
                f"(bilinear, align_corners={align_corners})"
            )


def _difference(expected: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], most: int = 12) -> str:
    """List missing (-) and unexpected (+) tensors; a tensor of another shape is both."""
    lines = [f"- {name} {shape}" for name, shape in expected.items() if shapes.get(name) != shape]
    lines += [f"+ {name} {shape}" for name, shape in shapes.items() if expected.get(name) != shape]
    suffix = f", and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + suffix
