"""The Vision Transformer of all tasks: timm's, with our patch stem, pre-logits and big_vision's conventions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, DropPath, GluMlp, Mlp, SwiGLUPacked
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from dpn_cli.arch import check_image_size
from dpn_cli.model.block import NormBlock
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.norms import Tokens, token_norm
from dpn_cli.model.norms.dtn import DynamicTokenNorm
from dpn_cli.model.rotary import RotaryPositions
from dpn_cli.model.stem import PatchStem, stem_norm

# JAX divides by this so that a normal truncated at two sigma keeps its standard deviation.
TRUNCATED_NORMAL_STD = 0.87962566103423978


class DPNViT(VisionTransformer):
    """A ViT whose stem is one of Table 6's, with timm's methods and big_vision's order of operations.

    ``forward_features(image)`` returns tokens (b, 1+n, d) after the final norm ((b, n, d) without a class token),
    ``forward_head(tokens, pre_logits=True)`` the representation (b, d). ``forward(image)`` returns logits (b, classes),
    or the representation if the network has no head. The class token joins after the position embedding, before the
    block ``config.class_token_at``, and has no position embedding; so do the distillation token and the registers
    behind it, in this order. With a distillation token the representation is its mean with the class token. Weights are
    uninitialised until `initialize` or a checkpoint fills them.
    """

    pos_embed: nn.Parameter

    def __init__(self, config: ViTConfig) -> None:
        size, options = config.size, config.norm_options
        stem_kind = config.norm if options.stem == "same" else "ln"
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch,
            num_classes=config.num_classes,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=size.heads if config.attn_width is None else 1,  # replaced below
            mlp_ratio=(config.mlp_rows + 0.5) / size.width,  # timm cuts the product off
            class_token=config.has_class_token,
            reg_tokens=config.registers,
            init_values=config.layer_scale,
            mlp_layer=SwiGLUPacked if config.swiglu else Mlp,
            global_pool={"tok": "token", "gap": "avg", "map": "map"}[config.pool],
            no_embed_class=True,
            pre_norm=config.pre_norm,
            fc_norm=config.fc_norm,
            drop_path_rate=config.drop_path,
            pos_drop_rate=config.dropout,  # big_vision drops after the positions, the attention and both MLP layers
            proj_drop_rate=config.dropout,
            embed_layer=partial(PatchStem, stem=config.stem, eps=config.eps, norm=stem_kind),
            norm_layer=partial(nn.LayerNorm, eps=config.eps),
            block_fn=Block if config.plain_norms else NormBlock,
            act_layer="silu" if config.swiglu else config.act,
            weight_init="skip",
        )
        self.config = config
        self.num_prefix_tokens = config.prefix_tokens  # where timm's methods cut the tokens
        self.dist_token = nn.Parameter(torch.empty(1, 1, size.width)) if config.distillation_token else None
        self.head_dist = nn.Linear(size.width, config.num_classes) if config.distillation_head else None
        self.norm_posemb = stem_norm(config.stem, "norm_posemb", size.width, config.eps, stem_kind)
        self.pre_logits = nn.Linear(size.width, size.width) if config.pre_logits else None
        if config.attn_width is not None:
            for block in self.blocks:
                head_width = config.attn_width // size.heads
                block.attn = Attention(
                    size.width, size.heads, attn_head_dim=head_width, qkv_bias=True, proj_drop=config.dropout
                )
        for index, block in enumerate(self.blocks):
            if isinstance(block, NormBlock):
                block.set_norms(config, index)
        if options.final != "ln":
            self.norm = self._final_norm(config)
        if config.class_token_at:
            self.blocks[config.class_token_at].register_forward_pre_hook(self._prepend_tokens)
        for module in self.modules():
            if isinstance(module, DropPath):
                module.scale_by_keep = config.drop_path_rescale
        if config.posemb != "learn":
            self._fix_positions()

    def _fix_positions(self) -> None:
        """Leave the table of positions out of the training; rotary ones are where timm would norm queries and keys."""
        self.pos_embed.requires_grad_(False)
        if self.config.posemb != "rope":
            return
        rotary = RotaryPositions(self.config.grid, self.blocks[0].attn.head_dim)
        for block in self.blocks:
            block.attn.q_norm = block.attn.k_norm = rotary

    @staticmethod
    def _final_norm(config: ViTConfig) -> nn.Module:
        """Build the norm after the blocks where it is another than LayerNorm, or none."""
        if config.norm_options.final == "none":
            return nn.Identity()
        tokens = Tokens(config.size.heads, None if config.prefix_tokens else config.grid)
        return token_norm(
            config.norm, config.size.width, eps=config.norm_eps, tokens=tokens, options=config.norm_options
        )

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = self.norm_posemb(x + self.pos_embed)
        if not self.config.class_token_at:
            (x,) = self._prepend_tokens(self, (x,))
        dropped: Tensor = self.pos_drop(x)
        return dropped

    def _prepend_tokens(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        """Prepend class token, distillation token and registers to the tokens (b, n, d) that enter a module."""
        (x,) = inputs
        tokens = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        # shape[0], not len(x), which is a plain int: torch.export would make the batch size a constant.
        return (torch.cat([*(token.expand(x.shape[0], -1, -1) for token in tokens), x], dim=1) if tokens else x,)

    def representation(self, x: Tensor) -> Tensor:
        """Map pooled or dense tokens (..., d) to the head's input: tanh(pre_logits(x)), or x without pre-logits."""
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens (b, n, d) to the representation (b, d), or to logits (b, classes)."""
        if self.dist_token is None:
            x = self.head_drop(self.representation(self.fc_norm(self.pool(x))))
            logits: Tensor = x if pre_logits else self.head(x)
            return logits
        both = self.head_drop(self.representation(self.fc_norm(x[:, :2])))
        if pre_logits or self.head_dist is None:
            mean: Tensor = both.mean(1)
            return mean if pre_logits else self.head(mean)
        mean_logits: Tensor = (self.head(both[:, 0]) + self.head_dist(both[:, 1])) / 2
        return mean_logits

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a zero one (big_vision's start for fine-tuning); 0 classes removes it.

        Overrides timm's method, which draws random weights and does not know `config`.
        """
        if global_pool is not None and global_pool != self.global_pool:
            raise ValueError("pooling is fixed when the backbone is loaded; use load_backbone(pool=...)")
        device = self.patch_embed.proj.weight.device
        self.num_classes = num_classes
        self.head = nn.Linear(self.embed_dim, num_classes, device=device) if num_classes else nn.Identity()
        self.head_dist = None
        self.config = replace(self.config, num_classes=num_classes, distillation_head=False)
        self.zero_head()

    def zero_head(self) -> None:
        """Set the head's weight and bias to zero."""
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def set_input_size(self, img_size: tuple[int, int] | None = None, patch_size: object = None) -> None:
        """Change the image size in pixels, resampling the position embedding as the paper's code does.

        Overrides timm's method, which resamples otherwise and does not know `config`.
        """
        if patch_size is not None and patch_size != self.config.patch:
            raise ValueError("the patch size is fixed: the first norm has one weight per pixel of a patch")
        if img_size is None or img_size == self.config.image_size:
            return
        new_config = replace(self.config, image_size=check_image_size(img_size, self.config.patch))
        self.pos_embed = nn.Parameter(
            resample_posemb(self.pos_embed.detach(), self.config.grid, new_config.grid),
            requires_grad=self.pos_embed.requires_grad,
        )
        self.patch_embed.set_input_size(img_size)
        self.set_grid(new_config.grid)
        self.config = new_config

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Set the rows and columns of the grid in the norms that mix tokens, and in rotary positions."""
        for module in self.modules():
            if isinstance(module, DynamicTokenNorm | RotaryPositions):
                module.set_grid(grid)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every weight with big_vision's initialisation (models/vit.py); a pure function of `seed`.

        Attention and MLP weights are Xavier-uniform, with q, k and v as separate matrices. The patch projection and
        pre-logits are LeCun-normal, the position embedding normal(1/sqrt(d)), MLP biases normal(1e-6), class token and
        head zero. What big_vision's ViT lacks is as in timm: registers normal(1e-6), distillation token normal(0.02),
        LayerScale constant. The halves of a SwiGLU layer are separate matrices.
        """
        g = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if hasattr(module, "reset_parameters") and not isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()  # norms: scale 1, bias 0, no statistics yet
        nn.init.constant_(self.patch_embed.proj.bias, 0.0)
        _lecun_normal(self.patch_embed.proj.weight, g)
        if self.pre_logits is not None:
            _lecun_normal(self.pre_logits.weight, g)
            nn.init.zeros_(self.pre_logits.bias)
        if self.config.posemb == "sincos2d":
            self.pos_embed.copy_(posemb_sincos2d(self.config.grid, self.embed_dim))
        elif self.config.posemb == "rope":
            nn.init.zeros_(self.pos_embed)
        else:
            _normal(self.pos_embed, 1 / math.sqrt(self.embed_dim), g)
        self._initialize_tokens(g)
        if self.attn_pool is not None:
            _xavier_uniform(self.attn_pool.latent[0], g)
            pool = self.attn_pool
            _initialize_attention((pool.q, pool.kv, pool.proj), (pool.q.weight, *pool.kv.weight.chunk(2)), g)
            _initialize_mlp(pool.mlp, g)
        for block in self.blocks:
            attn = block.attn
            _initialize_attention((attn.qkv, attn.proj), attn.qkv.weight.chunk(3), g)
            _initialize_mlp(block.mlp, g)
            if self.config.placement == "subln" and self.config.norm_options.subln_init:
                block.scale_for_sub_ln(self.config.size.depth)
            if isinstance(block, NormBlock) and block.res_scale is not None:
                nn.init.ones_(block.res_scale)
        self.zero_head()

    def _initialize_tokens(self, g: torch.Generator) -> None:
        """Fill the tokens in front of the patches'."""
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        for token, std in ((self.dist_token, 0.02), (self.reg_token, 1e-6)):
            if token is not None:
                _normal(token, std, g)


def resample_posemb(
    posemb: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], *, align_corners: bool = True
) -> Tensor:
    """Resample a position embedding (1, h*w, d) from grid `old_grid` to grid `new_grid`, bilinearly.

    ``align_corners=True`` equals scipy.ndimage.zoom(order=1), which big_vision uses (App. D and E);
    ``False`` equals jax.image.resize, which antialiases when it shrinks (App. G).
    """
    if old_grid == new_grid:
        return posemb
    shrinks = new_grid[0] < old_grid[0] or new_grid[1] < old_grid[1]
    # In float64: timm's resample_abs_pos_embed computes in float32 and is off by 1e-6 of the values.
    table = rearrange(posemb.double(), "1 (h w) d -> 1 d h w", h=old_grid[0], w=old_grid[1])
    table = F.interpolate(
        table, new_grid, mode="bilinear", align_corners=align_corners, antialias=shrinks and not align_corners
    )
    return rearrange(table, "1 d h w -> 1 (h w) d").to(posemb.dtype)


def posemb_sincos2d(grid: tuple[int, int], width: int) -> Tensor:
    """Return big_vision's fixed position embedding (1, h*w, width): sin and cos of x, then of y (MoCo v3)."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    omega = 10_000.0 ** -(torch.arange(width // 4) / (width // 4 - 1))
    x, y = x.reshape(-1, 1) * omega, y.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None]


def _initialize_attention(layers: Sequence[nn.Linear], inputs: Iterable[Tensor], g: torch.Generator) -> None:
    """Fill `inputs`, which are q, k and v as separate matrices, then the projection, the last of `layers`."""
    for weight in (*inputs, layers[-1].weight):
        _xavier_uniform(weight, g)
    for layer in layers:
        nn.init.zeros_(layer.bias)


def _initialize_mlp(mlp: Mlp | GluMlp, g: torch.Generator) -> None:
    for weight in (*mlp.fc1.weight.chunk(2 if isinstance(mlp, GluMlp) else 1), mlp.fc2.weight):
        _xavier_uniform(weight, g)
    for layer in (mlp.fc1, mlp.fc2):
        _normal(layer.bias, 1e-6, g)


# These three functions draw on the CPU, so that the weights do not depend on the device.


def _xavier_uniform(weight: Tensor, g: torch.Generator) -> None:
    weight.copy_(nn.init.xavier_uniform_(torch.empty(weight.shape), generator=g))


def _lecun_normal(weight: Tensor, g: torch.Generator) -> None:
    std = 1 / math.sqrt(weight[0].numel()) / TRUNCATED_NORMAL_STD
    weight.copy_(nn.init.trunc_normal_(torch.empty(weight.shape), std=std, a=-2 * std, b=2 * std, generator=g))


def _normal(weight: Tensor, std: float, g: torch.Generator) -> None:
    weight.copy_(nn.init.normal_(torch.empty(weight.shape), std=std, generator=g))
