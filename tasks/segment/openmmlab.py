"""Our networks in mmsegmentation: a backbone and the linear head for its configurations, and the way from a run.

mmsegmentation imports this module by ``custom_imports``; nothing else does. It comes with the extra ``mmseg``, or as
OpenMMLab's own packages with compiled operators. `openmmlab_ade20k.py` next to it is a whole configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpn_cli.errors import DpnError
from dpn_cli.weights.backbone import load_backbone
from dpn_cli.weights.locate import open_checkpoint

try:
    from mmengine.model import BaseModule
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead
    from mmseg.registry import MODELS
except ModuleNotFoundError as error:
    raise DpnError(
        f"mmsegmentation is not whole ({error.name} is missing): pip install 'dpn-cli[mmseg]'; the packages mmcv-lite "
        "and mmsegmentation alone do not import"
    ) from error


@MODELS.register_module()
class DPNBackbone(BaseModule):
    """A ViT of any stem; returns feature maps (b, d, h/p, w/p) of the blocks in `out_indices`.

    The arguments are those of `load_backbone`, for one image size: mmsegmentation's crop. With `final_norm` the maps
    pass the ViT's last LayerNorm; Appendix G has none.
    """

    def __init__(
        self,
        arch: str | None = None,
        stem: str | None = "dpn",
        checkpoint: str | None = None,
        image_size: int = 512,
        drop_path: float = 0.0,
        out_indices: Sequence[int] = (-1,),
        final_norm: bool = False,
        init_cfg: None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.vit = load_backbone(
            arch, stem=stem, checkpoint=checkpoint, image_size=image_size, drop_path=drop_path, align_corners=False
        )
        depth = len(self.vit.blocks)
        self.indices, self.final_norm = [index % depth for index in out_indices], final_norm
        if not final_norm:
            self.vit.norm.requires_grad_(False)

    def init_weights(self) -> None:
        """Keep the weights: they are loaded already, and mmengine would call timm's ``init_weights`` over them."""
        self._is_init = True

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map normalised images (b, 3, h, w) to feature maps."""
        return tuple(
            self.vit.forward_intermediates(
                image, indices=self.indices, norm=self.final_norm, output_fmt="NCHW", intermediates_only=True
            )
        )


@MODELS.register_module()
class LinearHead(BaseDecodeHead):
    """One linear layer on the last feature map: §6.3's decoder.

    `checkpoint` is a run's weights.safetensors whose head to start from. The rest are BaseDecodeHead's arguments.
    """

    def __init__(self, checkpoint: str | None = None, **arguments: object) -> None:
        super().__init__(**{"dropout_ratio": 0, "align_corners": False, **arguments})
        self.checkpoint = checkpoint

    def init_weights(self) -> None:
        """Fill the layer: from the checkpoint's head, or mmsegmentation's normal of 0.01."""
        super().init_weights()
        if self.checkpoint is not None:
            state = open_checkpoint(self.checkpoint).state
            if "head.weight" not in state or state["head.weight"].shape[0] != self.num_classes:
                raise DpnError(f"checkpoint={self.checkpoint!r}: it has no head of {self.num_classes} classes")
            with torch.no_grad():
                self.conv_seg.weight.copy_(state["head.weight"][:, :, None, None])
                self.conv_seg.bias.copy_(state["head.bias"])

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Map feature maps to logits (b, classes, h/p, w/p) of the last one."""
        logits: Tensor = self.cls_seg(self._transform_inputs(inputs))
        return logits
