"""The text tower: open_clip's transformer from scratch, with the temperature of the logits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from dpn_cli.arch import Size


class TextTower(nn.Module):
    """Tokens (b, context) to features whose product with an image's unit features is the logit of the pair.

    They are the unit features of the text times the temperature, and one column more, the bias, where there is one.
    The transformer has no causal and no padding mask and is pooled at the last position, as big_vision's text tower;
    no parameter is missing in a batch, so ranks need no search for unused ones.

    Args:
        size: width, depth and heads.
        vocabulary, context: number of tokens known, and in a text.
        width: of the image tower's features, which texts are projected to.
        temperature, bias: where they start; the temperature is learned as its logarithm. No bias without one.
    """

    def __init__(
        self, size: Size, vocabulary: int, context: int, width: int, temperature: float, bias: float | None, seed: int
    ) -> None:
        super().__init__()
        self.size, self.vocabulary, self.context, self.width = size, vocabulary, context, width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.transformer = TextTransformer(
                context_length=context,
                vocab_size=vocabulary,
                width=size.width,
                heads=size.heads,
                layers=size.depth,
                mlp_ratio=size.mlp / size.width,
                output_dim=width,
                no_causal_mask=True,
                pool_type="last",
            )
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    # Named as in a ViT: by them `MicroBatch.choose` estimates what a row costs.
    @property
    def pos_embed(self) -> Tensor:
        """Position embedding (1, context, width)."""
        table: Tensor = self.transformer.positional_embedding
        return table[None]

    @property
    def embed_dim(self) -> int:
        """Width of the tokens."""
        return self.size.width

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers."""
        layers: nn.ModuleList = self.transformer.transformer.resblocks
        return layers

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the unit features (b, width) of tokens (b, context), in float32."""
        return F.normalize(self.transformer(tokens).float(), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return unit features times the temperature (b, width), or (b, width + 1) with the bias."""
        features = self.encode(tokens) * self.log_temperature.exp()
        return features if self.bias is None else torch.cat([features, self.bias.expand(len(tokens), 1)], dim=1)
