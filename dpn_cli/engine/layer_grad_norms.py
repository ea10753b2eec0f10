"""Norms of gradients layer by layer, as in Figures 2 and 4 of arXiv 2302.01327."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpn_cli.engine.optim import gradient_norms

EMBEDDING, OTHER_LAYERS = "embedding", "other"
# Layers by a pattern of their parameters' names; a block is named by its number, counted from 1.
LAYERS = {
    r"patch_embed\.proj\.": EMBEDDING,
    r"patch_embed\.norm_in\.": "first norm",
    r"(patch_embed\.norm|norm_posemb)\.": "second norm",
    r"(pos_embed|positional_embedding)$": "positions",
    r"cls_token$": "class token",
    r"dist_token$": "distillation token",
    r"reg_token$": "registers",
    r"head(_dist)?\.": "head",
}
BLOCK = re.compile(r"(^|\.)(res)?blocks\.(\d+)\.")


def layer_name(parameter: str) -> str:
    """Return the layer of a parameter by its name: "embedding" is the patch projection, "block 1" the first block."""
    if block := BLOCK.search(parameter):
        return f"block {1 + int(block[3])}"
    return next((layer for name, layer in LAYERS.items() if re.search(rf"(^|\.){name}", parameter)), OTHER_LAYERS)


class LayerGradNorms:
    """The L2 norm of the gradient of all parameters of each layer of a network, as means over steps.

    Norms are summed on the network's device; only reading the means of `pop_means` waits for it.
    """

    def __init__(self, network: nn.Module) -> None:
        trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        self.names = list(dict.fromkeys(layer_name(name) for name, _ in trained))
        device = self.parameters[0].device
        self.layers = torch.tensor([self.names.index(layer_name(name)) for name, _ in trained], device=device)
        self.sums = torch.zeros(len(self.names), device=device)
        self.steps = self.mean_steps = 0

    @torch.no_grad()
    def add(self) -> Tensor:
        """Add the norms of the present gradients to those of earlier steps, in one pass.

        Returns the norm of each gradient that is not None, float32, in the order of the parameters.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norms = gradient_norms(gradients)
        layers = self.layers
        if len(gradients) < len(self.parameters):
            layers = layers[[parameter.grad is not None for parameter in self.parameters]]
        self.sums += norms.new_zeros(len(self.names)).index_add_(0, layers, norms.square()).sqrt_()
        self.steps += 1
        return norms

    def pop_means(self) -> Tensor:
        """Return the mean norms (layers,) over the steps since the last call; `mean_steps` is their number."""
        means = self.sums / self.steps
        self.mean_steps, self.steps = self.steps, 0
        self.sums.zero_()
        return means

    def restore(self, sums: Tensor, steps: int) -> None:
        """Continue with the sums of a checkpoint."""
        self.sums.copy_(sums)
        self.steps = steps

    def by_layer(self, norms: Sequence[float]) -> dict[str, float]:
        """Return norms by layer name."""
        return dict(zip(self.names, norms, strict=True))
