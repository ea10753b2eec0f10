"""Record what old releases of vit-pytorch and open_clip compute, one release per call.

    pip install --no-deps --target OLD vit-pytorch==0.40.2
    PYTHONPATH=OLD python tests/goldens/record_old_versions.py vit_pytorch_0.40.2

Every weight is drawn at random, so that none can be left out unnoticed. Arrays: the state dict under ``state/``,
an image (NCHW), the tokens before the pooling where the library gives them, and the output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def perturb(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def vit_pytorch(kind: str) -> Any:
    from vit_pytorch import SimpleViT, ViT

    shape = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "mlp_dim": 64}
    return SimpleViT(**shape, heads=2) if kind == "simple" else ViT(**shape, heads=2)


def open_clip_patchnorm() -> Any:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(32, 8, width=48, layers=2, heads=3, mlp_ratio=2, output_dim=10, input_patchnorm=True)


MODELS: dict[str, Any] = {
    "vit_pytorch_0.40.2": lambda: vit_pytorch("vit"),
    "vit_pytorch_0.40.2_simple": lambda: vit_pytorch("simple"),
    "vit_pytorch_1.0.0": lambda: vit_pytorch("vit"),
    "open_clip_2.20.0_patchnorm": open_clip_patchnorm,
}

if __name__ == "__main__":
    name = sys.argv[1]
    torch.manual_seed(0)
    model = perturb(MODELS[name]())
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(image)
    arrays = {f"state/{key}": value.numpy() for key, value in model.state_dict().items()}
    np.savez_compressed(Path(__file__).with_name(f"{name}.npz"), image=image, output=output, **arrays)
