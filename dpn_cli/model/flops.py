"""Multiply-adds of a ViT, counted from its shape: the result of torch's counter depends on its version and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from dpn_cli.model.config import ViTConfig
from dpn_cli.model.norms.dtn import POOLED
from dpn_cli.model.stem import stem_norm


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of the forward pass of one image.

    projection: of the patches.
    blocks: linear layers of all blocks, without the last layer of each block.
    last: the last linear layer of each block.
    attention: the two products of attention.
    mixing: products of DTN's norms.
    ends: pooling, pre-logits and head.
    """

    projection: int
    blocks: int
    last: int
    attention: int
    mixing: int
    ends: int

    @property
    def forward(self) -> int:
        """Their sum; the FLOPs are twice as many."""
        return self.projection + self.blocks + self.last + self.attention + self.mixing + self.ends


def count_macs(config: ViTConfig) -> Macs:
    """Count the multiply-adds of one image through a network; norms but DTN, biases and activations are left out.

    A linear layer has inputs x outputs for every token. Attention has two products, of queries with keys and of
    weights with values, each tokens x tokens x width.
    """
    size, patches = config.size, config.grid[0] * config.grid[1]
    width, tokens = size.width, patches + config.prefix_tokens
    full_blocks = size.depth - config.class_token_at  # those before it joins have patches only
    block_tokens = config.class_token_at * patches + full_blocks * tokens
    attn_width = config.attn_width or width
    read_tokens = 1 + config.distillation_head  # each by a head of its own
    ends = read_tokens * width * config.num_classes + (
        (1 + config.distillation_token) * width**2 if config.pre_logits else 0
    )
    if config.pool == "map":  # one query attends to the patches, and an MLP follows
        ends += 2 * patches * width**2 + 2 * patches * width + 2 * width**2 + 2 * width * size.mlp
    return Macs(
        projection=patches * 3 * config.patch[0] * config.patch[1] * width,
        blocks=block_tokens * (4 * width * attn_width + width * config.mlp_rows),
        last=block_tokens * width * size.mlp,
        attention=2 * (config.class_token_at * patches**2 + full_blocks * tokens**2) * attn_width,
        mixing=_count_mixing(config),
        ends=ends,
    )


def _count_mixing(config: ViTConfig) -> int:
    """Count DTN's products: means of the tokens and of their squares, first along rows and then along columns.

    The equations (arXiv 2112.02624) have tokens x tokens x width for each; along rows and columns it is tokens x (rows
    + columns) x width.
    """
    size = config.size
    rows, columns = (min(side, POOLED) if config.norm_options.dtn == "released" else side for side in config.grid)
    if config.placement == "subln":
        widths = 2 * size.width + (config.attn_width or size.width) + size.mlp
    elif config.placement == "normformer":
        widths = 3 * size.width + size.mlp
    else:
        widths = (1 + config.placement.count("+") + config.placement.count(",")) * size.width
    return config.dtn_blocks * 2 * rows * columns * (rows + columns) * widths


def training_flops(config: ViTConfig, *, grad_checkpointing: bool = False, stem_only: bool = False) -> int:
    """Return the FLOPs of the forward and backward pass of one image; a multiply-add is two.

    The backward pass has two products for each one of the forward pass, the gradients of both factors. The projection
    has one if nothing in front of it is learned. Fused attention recomputes its first product, which makes it 3.5 times
    the forward pass. Checkpointed blocks are recomputed up to their last layer, whose output no gradient needs.
    With `stem_only` the weights behind the stem are frozen and have no gradients.
    """
    macs = count_macs(config)
    # The input of the projection has a gradient if a norm in front of it is learned.
    has_learned_input = any(True for _ in stem_norm(config.stem, "norm_in", 1, config.eps).parameters())
    projection = (3 if has_learned_input else 2) * macs.projection
    recomputed = macs.blocks + macs.attention + macs.mixing if grad_checkpointing else 0
    linear = (2 if stem_only else 3) * (macs.blocks + macs.last + macs.ends)
    return 2 * (projection + linear + 3 * macs.mixing + recomputed) + 7 * macs.attention
