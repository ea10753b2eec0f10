"""The network: a ViT, and one linear layer from patch tokens to class logits (§6.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.data.resize import Size
from dpn_cli.model.vit import TRUNCATED_NORMAL_STD, resample_posemb
from dpn_cli.weights.backbone import Backbone

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Parts of a ViT that patch tokens never meet; the final norm is one more unless the config wants it.
UNUSED = ("pre_logits.", "attn_pool.", "fc_norm.")


class LinearSegmenter(nn.Module):
    """Patch tokens of the last block, through the ViT's head one by one.

    The class token goes through the blocks and is dropped before the head (Segmenter, arXiv 2105.05633). Without
    `final_norm` the ViT's last LayerNorm is passed by: Appendix G says ``out_with_norm=False``.
    """

    def __init__(self, vit: Backbone, *, final_norm: bool) -> None:
        super().__init__()
        self.vit, self.final_norm = vit, final_norm
        for name, parameter in vit.named_parameters():
            if name.startswith(UNUSED if final_norm else (*UNUSED, "norm.")):
                parameter.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        """Map normalised images (b, 3, h, w) of the network's size to logits per patch (b, classes, h/p, w/p)."""
        (tokens,) = self.vit.forward_intermediates(
            image, indices=1, norm=self.final_norm, output_fmt="NLC", intermediates_only=True
        )
        logits: Tensor = self.vit.head(tokens)
        return rearrange(logits, "b (h w) k -> b k h w", h=image.shape[-2] // self.vit.config.patch[0])

    @contextmanager
    def at_size(self, size: Size) -> Iterator[None]:
        """Let the network take images of another size for a while, with its position embedding resampled to it."""
        vit, pos_embed = self.vit, self.vit.pos_embed
        patch, image_size = vit.config.patch, vit.config.image_size
        grid = size[0] // patch[0], size[1] // patch[1]
        table = resample_posemb(pos_embed.detach(), vit.config.grid, grid, align_corners=False)
        vit.pos_embed = nn.Parameter(table, requires_grad=False)
        vit.patch_embed.set_input_size(size)
        vit.set_grid(grid)
        try:
            yield
        finally:
            vit.pos_embed = pos_embed
            vit.patch_embed.set_input_size(image_size)
            vit.set_grid(vit.config.grid)


def initialize_head(vit: Backbone, method: Literal["truncated_normal", "lecun_normal", "zero"], seed: int) -> None:
    """Fill the head: Segmenter's normal of 0.02, flax's default, or zero; the bias is zero.

    Appendix G does not say which. The network's report says what was done.
    """
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(vit.head, nn.Linear)
    weight = torch.zeros(vit.head.weight.shape)
    if method == "truncated_normal":
        nn.init.trunc_normal_(weight, std=0.02, generator=generator)
    elif method == "lecun_normal":
        std = weight.shape[1] ** -0.5 / TRUNCATED_NORMAL_STD
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    with torch.no_grad():
        vit.head.weight.copy_(weight)
        vit.head.bias.zero_()
    initialized = {"head.weight (zero)": f"head.weight ({method.replace('_', ' ')})"}
    vit.report.new = [initialized.get(name, name) for name in vit.report.new]


def use_imagenet_inputs(vit: Backbone) -> None:
    """Normalise by ImageNet's mean and standard deviation, as Appendix G does whatever the pre-training did."""
    vit.mean, vit.std = IMAGENET_MEAN, IMAGENET_STD
    vit.input_mean.copy_(torch.tensor(vit.mean)[:, None, None])
    vit.input_std.copy_(torch.tensor(vit.std)[:, None, None])


def normalize(vit: Backbone, image: Tensor, extent: Tensor) -> Tensor:
    """Normalise uint8 images (b, 3, h, w) whose real size is `extent` (b, 2); padding becomes zero."""
    rows = torch.arange(image.shape[-2], device=image.device) < extent[:, :1]
    columns = torch.arange(image.shape[-1], device=image.device) < extent[:, 1:]
    return vit.normalize(image).mul_(rows[:, None, :, None] & columns[:, None, None, :])
