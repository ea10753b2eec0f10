"""Networks whose every weight matters to the output."""

from __future__ import annotations

from typing import Any

import timm
import torch

from dpn_cli.weights.backbone import Backbone


def perturb(model: Any) -> Any:
    """Add noise to every parameter, so that each one matters to the output; returns the network in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def perturbed_timm_model(name: str, **arguments: Any) -> Any:
    """Build a timm model with noise on every parameter."""
    return perturb(timm.create_model(name, num_classes=7, **arguments))


CENTRE = slice(3, 5)


def set_stem_norm(model: Backbone) -> None:
    """Set the stem's first norm: scale 2 in the middle of the green channel, else 1; the bias is the row number."""
    scale, bias = torch.ones(8, 8, 3), torch.zeros(8, 8, 3)
    scale[CENTRE, CENTRE, 1] = 2
    bias += torch.arange(8.0)[:, None, None]
    norm = model.patch_embed.norm_in
    norm.load_state_dict({"weight": scale.flatten(), "bias": bias.flatten()})
