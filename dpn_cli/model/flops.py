"""Multiply-adds of a ViT, counted from its shape: what torch's counter sees depends on its version and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from dpn_cli.model.config import ViTConfig
from dpn_cli.model.norms.dtn import POOLED
from dpn_cli.model.stem import stem_norm


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of one image forward.

    `blocks` are the linear layers of all blocks but `last`, the last one of each; `attention` its two products;
    `mixing` those of DTN's norms, `ends` pooling, pre-logits and head.
    """

    projection: int
    blocks: int
    last: int
    attention: int
    mixing: int
    ends: int

    @property
    def forward(self) -> int:
        """All of them; twice as many FLOPs."""
        return self.projection + self.blocks + self.last + self.attention + self.mixing + self.ends


def count(config: ViTConfig) -> Macs:
    """Count the multiply-adds of one image through a network; norms but DTN, biases and activations are left out.

    A linear layer has inputs x outputs for every token. Attention has two products, of queries with keys and of
    weights with values, each tokens x tokens x width.
    """
    size, patches = config.size, config.grid[0] * config.grid[1]
    width, tokens = size.width, patches + config.has_class_token
    behind = size.depth - config.class_token_at  # blocks with all tokens; those before have the patches alone
    through = config.class_token_at * patches + behind * tokens
    inner = config.attn_width or width
    ends = width * config.num_classes + (width**2 if config.pre_logits else 0)
    if config.pool == "map":  # one query looks at all tokens, and an MLP follows
        ends += 2 * tokens * width**2 + 2 * tokens * width + 2 * width**2 + 2 * width * size.mlp
    return Macs(
        projection=patches * 3 * config.patch[0] * config.patch[1] * width,
        blocks=through * (4 * width * inner + width * size.mlp),
        last=through * width * size.mlp,
        attention=2 * (config.class_token_at * patches**2 + behind * tokens**2) * inner,
        mixing=_mixing(config),
        ends=ends,
    )


def _mixing(config: ViTConfig) -> int:
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
    """Return the FLOPs of one image forward and backward; a multiply-add is two.

    Backward has two products for each one of forward, the gradients of both factors; the projection has one where
    nothing in front of it is learned. Fused attention computes its first product again, which makes it 3.5 times
    forward; checkpointed blocks are computed again up to their last layer, whose output nothing in backward needs.
    With `stem_only` the weights behind the stem are frozen, and have no gradients of their own.
    """
    macs = count(config)
    # The input of the projection has a gradient where the stem learns something in front of it.
    learned = any(True for _ in stem_norm(config.stem, "norm_in", 1, config.eps).parameters())
    projection = (3 if learned else 2) * macs.projection
    again = macs.blocks + macs.attention + macs.mixing if grad_checkpointing else 0
    linear = (2 if stem_only else 3) * (macs.blocks + macs.last + macs.ends)
    return 2 * (projection + linear + 3 * macs.mixing + again) + 7 * macs.attention
