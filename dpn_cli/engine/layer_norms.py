"""Norms of gradients layer by layer, as in Figures 2 and 4 of arXiv 2302.01327."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

EMBEDDING, OTHER = "embedding", "other"
# What a parameter belongs to, by its name inside any network; a block is called by its number, counted from 1.
LAYERS = {
    r"patch_embed\.proj\.": EMBEDDING,
    r"patch_embed\.norm_in\.": "first norm",
    r"(patch_embed\.norm|norm_posemb)\.": "second norm",
    r"(pos_embed|positional_embedding)$": "positions",
    r"cls_token$": "class token",
    r"head\.": "head",
}
BLOCK = re.compile(r"(^|\.)(res)?blocks\.(\d+)\.")


def layer_name(parameter: str) -> str:
    """Return the layer of a parameter by its name: "embedding" is the patch projection, "block 1" the first block."""
    if block := BLOCK.search(parameter):
        return f"block {1 + int(block[3])}"
    return next((layer for name, layer in LAYERS.items() if re.search(rf"(^|\.){name}", parameter)), OTHER)


class LayerNorms:
    """The L2 norm of the gradient of all parameters of each layer of a network, those that are trained."""

    def __init__(self, network: nn.Module) -> None:
        trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self.names = list(dict.fromkeys(layer_name(name) for name, _ in trained))
        self.layers = [self.names.index(layer_name(name)) for name, _ in trained]

    def compute(self) -> Tensor:
        """Return the norms (layers,) of the gradients that there are now, float32, in one pass over them."""
        there = [
            (layer, one.grad) for layer, one in zip(self.layers, self.parameters, strict=True) if one.grad is not None
        ]
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in there])).float()
        layers = torch.tensor([layer for layer, _ in there], device=norms.device)
        return norms.new_zeros(len(self.names)).index_add(0, layers, norms.square()).sqrt()

    def named(self, norms: Sequence[float]) -> dict[str, float]:
        """Return norms by the names of their layers."""
        return dict(zip(self.names, norms, strict=True))
