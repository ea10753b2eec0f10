"""The Vision Transformer of all tasks: timm's, with our patch stem, pre-logits and big_vision's conventions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, DropPath, Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dpn_cli.arch import Pool, Size, Stem, check_image_size, size_name
from dpn_cli.model.stem import Affine, PatchStem, stem_norm

# JAX divides by this so that a normal truncated at two sigma keeps its standard deviation.
TRUNCATED_NORMAL_STD = 0.87962566103423978


@dataclass(frozen=True)
class ViTConfig:
    """All that decides the network's function apart from its weights; sizes in pixels."""

    size: Size
    patch: tuple[int, int]
    image_size: tuple[int, int]
    stem: Stem = "dpn"
    pool: Pool = "tok"
    pre_logits: bool = False
    posemb: Literal["learn", "sincos2d"] = "learn"
    eps: float = 1e-6  # flax's LayerNorm default, since arXiv 2302.01327 states none; torch's is 1e-5
    act: Literal["gelu_tanh", "gelu", "quick_gelu"] = "gelu_tanh"  # flax's gelu is the tanh form
    num_classes: int = 0
    drop_path: float = 0.0
    drop_path_rescale: bool = True  # Scenic's and timm's rule; big_vision's MLP-Mixer leaves what is kept as it is
    dropout: float = 0.0
    pre_norm: bool = False  # CLIP's ln_pre: a norm of all tokens, class token and positions included
    fc_norm: bool = False  # the final norm follows the pooling instead of the blocks
    attn_width: int | None = None  # heads times head width where that is not the trunk's width

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and row (h, w)."""
        return self.image_size[0] // self.patch[0], self.image_size[1] // self.patch[1]

    @property
    def arch(self) -> str:
        """The network's name as ``--arch`` takes it: ``"B/32"``; other trunks are described."""
        return f"{size_name(self.size) or self.size}/{self.patch[0]}"

    def __str__(self) -> str:
        return f"{self.arch}, stem {self.stem}, {self.image_size[0]}x{self.image_size[1]} px"


class DPNViT(VisionTransformer):
    """A ViT whose stem is one of Table 6's, with timm's methods and big_vision's order of operations.

    ``forward_features(image)`` gives tokens (b, 1+n, d) after the final norm ((b, n, d) without a class token),
    ``forward_head(tokens, pre_logits=True)`` the representation (b, d), ``forward(image)`` logits (b, classes), or
    the representation when there is no head. The class token joins after the position embedding and has none of
    its own. Weights are uninitialised until `initialize` or a checkpoint fills them.
    """

    pos_embed: nn.Parameter

    def __init__(self, config: ViTConfig) -> None:
        size = config.size
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch,
            num_classes=config.num_classes,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=size.heads if config.attn_width is None else 1,  # replaced below
            mlp_ratio=(size.mlp + 0.5) / size.width,  # timm cuts the product off
            class_token=config.pool == "tok",
            global_pool={"tok": "token", "gap": "avg", "map": "map"}[config.pool],
            no_embed_class=True,
            pre_norm=config.pre_norm,
            fc_norm=config.fc_norm,
            drop_path_rate=config.drop_path,
            pos_drop_rate=config.dropout,  # big_vision drops after the positions, the attention and both MLP layers
            proj_drop_rate=config.dropout,
            embed_layer=partial(PatchStem, stem=config.stem, eps=config.eps),
            norm_layer=partial(nn.LayerNorm, eps=config.eps),
            act_layer=config.act,
            weight_init="skip",
        )
        self.config = config
        self.norm_posemb = stem_norm(config.stem, "norm_posemb", size.width, config.eps)
        self.pre_logits = nn.Linear(size.width, size.width) if config.pre_logits else None
        if config.attn_width is not None:
            for block in self.blocks:
                head_width = config.attn_width // size.heads
                block.attn = Attention(
                    size.width, size.heads, attn_head_dim=head_width, qkv_bias=True, proj_drop=config.dropout
                )
        for module in self.modules():
            if isinstance(module, DropPath):
                module.scale_by_keep = config.drop_path_rescale
        if config.posemb == "sincos2d":
            self.pos_embed.requires_grad_(False)

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = self.norm_posemb(x + self.pos_embed)
        if self.cls_token is not None:
            # shape[0] and not len(x), which is a plain int: torch.export would take the batch for a constant.
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        dropped: Tensor = self.pos_drop(x)
        return dropped

    def representation(self, x: Tensor) -> Tensor:
        """Map pooled or dense tokens (..., d) to what the head reads: tanh(pre_logits(x)) where there is one."""
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens (b, n, d) to the representation (b, d), or to logits (b, classes)."""
        x = self.head_drop(self.representation(self.fc_norm(self.pool(x))))
        logits: Tensor = x if pre_logits else self.head(x)
        return logits

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a zero one (big_vision's start for fine-tuning); 0 classes removes it.

        Part of timm's interface: timm's own method would draw random weights and leave `config` behind.
        """
        if global_pool is not None and global_pool != self.global_pool:
            raise ValueError("pooling is fixed when the backbone is loaded; use load_backbone(pool=...)")
        device = self.norm.weight.device
        self.num_classes = num_classes
        self.head = nn.Linear(self.embed_dim, num_classes, device=device) if num_classes else nn.Identity()
        self.config = replace(self.config, num_classes=num_classes)
        self.zero_head()

    def zero_head(self) -> None:
        """Set the head's weight and bias to zero."""
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def set_input_size(self, img_size: tuple[int, int] | None = None, patch_size: object = None) -> None:
        """Change the image size in pixels, resampling the position embedding as the paper's code does.

        Part of timm's interface: timm's own method resamples otherwise and leaves `config` behind.
        """
        if patch_size is not None and patch_size != self.config.patch:
            raise ValueError("the patch size is fixed: the first norm has one weight per pixel of a patch")
        if img_size is None or img_size == self.config.image_size:
            return
        new = replace(self.config, image_size=check_image_size(img_size, self.config.patch))
        self.pos_embed = nn.Parameter(
            resample_posemb(self.pos_embed.detach(), self.config.grid, new.grid),
            requires_grad=self.pos_embed.requires_grad,
        )
        self.patch_embed.set_input_size(img_size)
        self.config = new

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every weight with big_vision's initialisation (models/vit.py); a pure function of `seed`.

        Attention and MLP weights are Xavier-uniform with q, k, v taken apart, the patch projection and pre-logits
        LeCun-normal, the position embedding normal(1/sqrt(d)), MLP biases normal(1e-6), class token and head zero.
        """
        g = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | Affine):
                module.reset_parameters()  # scale 1, bias 0
        nn.init.constant_(self.patch_embed.proj.bias, 0.0)
        _lecun_normal(self.patch_embed.proj.weight, g)
        if self.pre_logits is not None:
            _lecun_normal(self.pre_logits.weight, g)
            nn.init.zeros_(self.pre_logits.bias)
        if self.config.posemb == "sincos2d":
            self.pos_embed.copy_(posemb_sincos2d(self.config.grid, self.embed_dim))
        else:
            _normal(self.pos_embed, 1 / math.sqrt(self.embed_dim), g)
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        if self.attn_pool is not None:
            _xavier_uniform(self.attn_pool.latent[0], g)
            pool = self.attn_pool
            _initialize_attention((pool.q, pool.kv, pool.proj), (pool.q.weight, *pool.kv.weight.chunk(2)), g)
            _initialize_mlp(pool.mlp, g)
        for block in self.blocks:
            attn = block.attn
            _initialize_attention((attn.qkv, attn.proj), attn.qkv.weight.chunk(3), g)
            _initialize_mlp(block.mlp, g)
        self.zero_head()


def resample_posemb(
    posemb: Tensor, old: tuple[int, int], new: tuple[int, int], *, align_corners: bool = True
) -> Tensor:
    """Resample a position embedding (1, h*w, d) from grid `old` to grid `new`, bilinearly.

    ``align_corners=True`` equals scipy.ndimage.zoom(order=1), which big_vision uses (App. D and E);
    ``False`` equals jax.image.resize, which antialiases when it shrinks (App. G).
    """
    if old == new:
        return posemb
    shrinks = new[0] < old[0] or new[1] < old[1]
    # In float64: timm's resample_abs_pos_embed computes in float32 and is off by 1e-6 of the values.
    table = rearrange(posemb.double(), "1 (h w) d -> 1 d h w", h=old[0], w=old[1])
    table = F.interpolate(
        table, new, mode="bilinear", align_corners=align_corners, antialias=shrinks and not align_corners
    )
    return rearrange(table, "1 d h w -> 1 (h w) d").to(posemb.dtype)


def posemb_sincos2d(grid: tuple[int, int], width: int) -> Tensor:
    """Return big_vision's fixed position embedding (1, h*w, width): sin and cos of x, then of y (MoCo v3)."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    omega = 10_000.0 ** -(torch.arange(width // 4) / (width // 4 - 1))
    x, y = x.reshape(-1, 1) * omega, y.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None]


def _initialize_attention(layers: Sequence[nn.Linear], inputs: Iterable[Tensor], g: torch.Generator) -> None:
    """Fill q, k and v, each as a matrix of its own, then the projection, which is the last of `layers`."""
    for weight in (*inputs, layers[-1].weight):
        _xavier_uniform(weight, g)
    for layer in layers:
        nn.init.zeros_(layer.bias)


def _initialize_mlp(mlp: Mlp, g: torch.Generator) -> None:
    for layer in (mlp.fc1, mlp.fc2):
        _xavier_uniform(layer.weight, g)
    for layer in (mlp.fc1, mlp.fc2):
        _normal(layer.bias, 1e-6, g)


# The three draw on the CPU, so that the weights do not depend on the device.


def _xavier_uniform(weight: Tensor, g: torch.Generator) -> None:
    weight.copy_(nn.init.xavier_uniform_(torch.empty(weight.shape), generator=g))


def _lecun_normal(weight: Tensor, g: torch.Generator) -> None:
    std = 1 / math.sqrt(weight[0].numel()) / TRUNCATED_NORMAL_STD
    weight.copy_(nn.init.trunc_normal_(torch.empty(weight.shape), std=std, a=-2 * std, b=2 * std, generator=g))


def _normal(weight: Tensor, std: float, g: torch.Generator) -> None:
    weight.copy_(nn.init.normal_(torch.empty(weight.shape), std=std, generator=g))
