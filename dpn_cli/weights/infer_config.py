"""Infer the architecture of a network from its tensors."""

from __future__ import annotations

import torch

from dpn_cli.arch import SIZES, Pool, Size, check_image_size, parse_arch, size_name
from dpn_cli.errors import DataError, DpnError
from dpn_cli.model.config import ViTConfig
from dpn_cli.weights.formats import Checkpoint
from dpn_cli.weights.formats.state_dict import split_positions

# The initial value that a network with LayerScale states; weights that are loaded replace it.
LAYER_SCALE = 1e-5


def infer_config(
    source: Checkpoint,
    arch: str | None = None,
    pool: Pool | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViTConfig:
    """Infer the architecture from tensor names and shapes and check it against `arch`.

    Raises `DataError` unless the tensors are a complete ViT, `DpnError` when it is not `arch`.
    """
    try:
        split_positions(source)
    except DataError as error:
        raise DataError(f"{source.source}: {error}") from error
    state = source.state
    if state.get("patch_embed.proj.weight", torch.empty(0, 0, 0, 0)).ndim != 4:
        raise DataError(f"{source.source}: its patch projection is not one of images; not a ViT of images")
    try:
        width, _, rows, columns = state["patch_embed.proj.weight"].shape
        depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        mlp = state["blocks.0.mlp.fc2.weight"].shape[1]
        swiglu = state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp
        attn_width = state["blocks.0.attn.qkv.weight"].shape[0] // 3
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{source.source}: - {error.args[0]} is missing; not a whole ViT") from error
    if min(width, rows, columns, mlp, attn_width) < 1:
        raise DataError(f"{source.source}: its tensors are empty; not a whole ViT")
    requested = parse_arch(arch) if arch else None
    heads = source.heads or (requested[0].heads if requested else _default_heads(source, width))
    size = Size(width, depth, mlp, heads)
    if requested and (requested != (size, rows) or rows != columns):
        file_arch = f"{size_name(size) or size}/{rows}"
        raise DpnError(f"--arch {arch}: {source.source} is {file_arch}; leave --arch out, or pass another checkpoint")
    if heads < 1 or attn_width % heads:
        raise DataError(
            f"{source.source}: {heads} heads do not divide its attention's {attn_width} features; "
            "state the number with 'dpn checkpoint convert --heads N'"
        )
    pool, has_extra_class_token = _pooling(source, pool)
    options = source.norm_options
    if pool != "tok" and not has_extra_class_token and "reg_token" not in state:
        options = options.model_copy(update={"class_token_at": None})
    file_size = None if source.grid is None else (source.grid[0] * rows, source.grid[1] * columns)
    pixels = check_image_size(image_size or file_size or 224, (rows, columns))
    try:
        return ViTConfig(
            size,
            (rows, columns),
            pixels,
            source.stem,
            pool,
            "pre_logits.weight" in state,
            source.posemb,
            source.eps,
            source.act,
            mean_beside_class_token=has_extra_class_token,
            pre_norm="norm_pre.weight" in state,
            fc_norm="fc_norm.weight" in state,
            attn_width=None if attn_width == width else attn_width,
            norm=source.norm,
            placement=source.placement,
            norm_options=options,
            registers=state["reg_token"].shape[1] if "reg_token" in state else 0,
            distillation_token="dist_token" in state and pool == "tok",
            layer_scale=LAYER_SCALE if "blocks.0.ls1.gamma" in state else None,
            swiglu=swiglu,
        )
    except DpnError as error:
        raise DpnError(f"{source.source}: {error}") from error


def _pooling(source: Checkpoint, pool: Pool | None) -> tuple[Pool, bool]:
    """Return the pooling, which must be the file's or "gap", and whether blocks have a class token that it ignores."""
    file_pool: Pool = "map" if "attn_pool.latent" in source.state else "tok" if "cls_token" in source.state else "gap"
    has_extra_class_token = file_pool == "tok" and source.pool == "gap"
    file_pool = "gap" if has_extra_class_token else file_pool
    if source.pool not in (None, file_pool):
        raise DataError(f"{source.source}: its pool is {source.pool!r} and its tensors are those of {file_pool!r}")
    if pool is not None and pool not in ("gap", file_pool):
        token = "class token that it pools by" if has_extra_class_token else "class token"
        missing = "attention pooling" if pool == "map" else token
        choices = " or ".join(dict.fromkeys([f"pool={file_pool}", "pool=gap"]))
        raise DpnError(f"backbone.pool={pool}: {source.source} has no {missing}; use {choices}")
    return pool or file_pool, has_extra_class_token


# Default heads by width: the standard sizes, shape-optimised, giant and gigantic ViTs.
DEFAULT_HEADS = {
    size.width: size.heads for name, size in SIZES.items() if name not in ("mu", "nano") and "*" not in name
}
DEFAULT_HEADS |= {1152: 16, 1408: 16, 1536: 16, 1664: 16}


def _default_heads(source: Checkpoint, width: int) -> int:
    if width not in DEFAULT_HEADS:
        raise DpnError(
            f"{source.source}: the file does not say how many attention heads its {width} features make; "
            f"'dpn checkpoint convert {source.source} OUT.safetensors --heads N' writes one that does"
        )
    source.assumed["heads"] = f"{DEFAULT_HEADS[width]} heads (usual for a width of {width})"
    return DEFAULT_HEADS[width]
