"""Share of the tokens' variance that brightness and contrast of their patches explain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from einops import rearrange
from torch import Tensor, nn

from dpn_cli.weights.backbone import Backbone

# The shares that are measured: which of the features (1, brightness, contrast) explain the tokens.
FEATURES: dict[str, tuple[int, ...]] = {"brightness": (0, 1), "contrast": (0, 2), "both": (0, 1, 2)}


def cut_patches(image: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the patches (b, h * w, p * q * c) of images (b, c, h * p, w * q), flattened as the stem does."""
    patches: Tensor = rearrange(image, "b c (h p) (w q) -> b (h w) (p q c)", p=patch[0], q=patch[1])
    return patches


class ExplainedVariance:
    """Share of the tokens' variance that brightness and contrast explain, by least squares over all patches.

    Tokens are the stem's, before positions; brightness is the mean of a patch over its pixels and channels in the
    network's input range, contrast their standard deviation. The share is 1 - sum |t - prediction|^2 / sum |t - mean|^2
    over all channels of the tokens; what is explained is only what is linear in both.
    """

    def __init__(self, model: Backbone) -> None:
        self.patch = model.config.patch
        width = model.config.size.width
        self.features = torch.zeros(3, 3, dtype=torch.float64)
        self.products = torch.zeros(3, width, dtype=torch.float64)
        self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, image: Tensor, tokens: Tensor) -> None:
        """Take normalised images (b, 3, h, w) and what the stem made of them, (b, n, d)."""
        patches = cut_patches(image, self.patch).flatten(0, 1).double()
        contrast, brightness = torch.std_mean(patches, dim=1, correction=0)
        x = torch.stack([torch.ones_like(brightness), brightness, contrast], dim=1)
        t = tokens.flatten(0, 1).double()
        self.features += (x.T @ x).cpu()
        self.products += (x.T @ t).cpu()
        self.squares += t.square().sum().cpu()

    def shares(self) -> dict[str, float | None]:
        """Return the shares by what explains; None when the tokens do not vary."""
        mean = self.products[0] / self.features[0, 0]
        total = self.squares - self.features[0, 0] * mean.square().sum()
        if total <= 1e-12 * self.squares:
            return dict.fromkeys(FEATURES)
        return {name: float(1 - self._residual(list(components)) / total) for name, components in FEATURES.items()}

    def _residual(self, components: list[int]) -> Tensor:
        """Return the sum of squares that a fit on some of the features leaves."""
        products = self.products[components]
        # The pseudo-inverse: on one colour everywhere, contrast is a multiple of the constant.
        coefficients = torch.linalg.pinv(self.features[components][:, components], hermitian=True) @ products
        residual: Tensor = self.squares - (coefficients * products).sum()
        return residual

    @contextmanager
    def record(self, model: Backbone) -> Iterator[None]:
        """Take every image and its tokens while the network runs."""

        def add_batch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.add(inputs[0], output)

        hook = model.patch_embed.register_forward_hook(add_batch)
        try:
            yield
        finally:
            hook.remove()
