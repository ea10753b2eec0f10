"""State dicts of networks with other norms, in the layouts of their authors."""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]


WIDTH, HEADS, SIDE, PATCH, CLASSES = 32, 4, 4, 4, 5


def make_random_state(shapes: dict[str, tuple[int, ...]]) -> State:
    """Random weights; variances are positive."""
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, value in state.items():
        if name.endswith("running_var"):
            value.abs_().add_(0.5)
        elif value.ndim in (2, 4) and "pos_proj" not in name:
            value.mul_(value[0].numel() ** -0.5)
    return state


def norm_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a norm with scale and bias."""
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def vit_shapes(depth: int, *, positions: int, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    """The names that both codes share with timm: all but the norms."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, positions, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        "head.weight": (CLASSES, WIDTH),
        "head.bias": (CLASSES,),
    }
    layers = {
        "attn.qkv": (3 * WIDTH, WIDTH),
        "attn.proj": (WIDTH, WIDTH),
        "mlp.fc1": (64, WIDTH),
        "mlp.fc2": (WIDTH, 64),
    }
    for block in range(depth):
        for layer, shape in layers.items():
            shapes[f"blocks.{block}.{layer}.weight"] = shape
            if layer != "attn.qkv" or qkv_bias:
                shapes[f"blocks.{block}.{layer}.bias"] = shape[:1]
    return shapes


def make_dtn_state(depth: int, first: int, *, variance_only: bool = False) -> State:
    """A network of ``vit_norm_mix.py``: DTN in the first blocks, LayerNorm in the others."""
    shapes = vit_shapes(depth, positions=SIDE**2, qkv_bias=False) | norm_shapes("norm")
    for block in range(depth):
        for norm in (f"blocks.{block}.norm1", f"blocks.{block}.norm2"):
            shapes |= norm_shapes(norm)
            if block < first:
                shapes |= {f"{norm}.pos_proj.weight": (HEADS, 3), f"{norm}.pos_proj.bias": (HEADS,)}
                logits = ["var_norm_weight"] if variance_only else ["mean_norm_weight", "var_norm_weight"]
                shapes |= {f"{norm}.{name}": (HEADS,) for name in logits}
    return make_random_state(shapes)


def make_slab_state(depth: int, *, linear_norm: bool) -> State:
    """A DeiT with ``LinearNorm``, half-way from LayerNorm, or with ``RepBN``, in its final norm too."""
    shapes = vit_shapes(depth, positions=SIDE**2 + 1, qkv_bias=True)
    norms = [*(f"blocks.{block}.norm{which}" for block in range(depth) for which in (1, 2)), "norm"]
    rep = "norm2." if linear_norm else ""
    for norm in norms:
        shapes |= {f"{norm}.{rep}alpha": (1,), **norm_shapes(f"{norm}.{rep}bn")}
        shapes |= {f"{norm}.{rep}bn.running_{name}": (WIDTH,) for name in ("mean", "var")}
        shapes |= norm_shapes(f"{norm}.norm1") if linear_norm else {}
    state = make_random_state(shapes)
    for norm in norms:
        state[f"{norm}.{rep}bn.num_batches_tracked"] = torch.tensor(300_000)
        if linear_norm:
            counts = {"warm": 0, "iter": 75_000, "total_step": 300_000}
            state |= {f"{norm}.{name}": torch.tensor(count) for name, count in counts.items()}
    return state
