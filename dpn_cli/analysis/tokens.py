"""Token norms, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpn_cli.weights.backbone import Backbone


@dataclass(frozen=True)
class Lengths:
    """Lengths (L2 norms) of the tokens at one stage of a network.

    `low` and `high` are quantiles (5 and 95 %) of the patch tokens, `largest` the longest of them; `class_token` is the
    mean over images, None where there is none yet.
    """

    stage: str
    mean: float
    low: float
    high: float
    largest: float
    class_token: float | None


@dataclass
class TokenLengths:
    """Collects the lengths of tokens while images go through a network."""

    patches: int
    has_class_token: bool
    lengths_by_stage: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, stage: str, tokens: Tensor) -> None:
        """Take tokens (b, n, d), or (b, k + n, d) with a class token or registers in front."""
        self.lengths_by_stage.setdefault(stage, []).append(tokens.float().norm(dim=-1).cpu())

    def summary(self) -> list[Lengths]:
        """Return the lengths at every stage, in the order of the network."""
        return [
            _summary(stage, torch.cat(parts), self.patches, self.has_class_token)
            for stage, parts in self.lengths_by_stage.items()
        ]

    @contextmanager
    def record(self, model: Backbone) -> Iterator[None]:
        """Take the tokens after the stem, with positions, after every block and after the final norm."""
        with ExitStack() as stack:
            stages = [("stem", model.patch_embed), *_blocks(model)]
            if not isinstance(model.norm, nn.Identity):
                stages.append(("final norm", model.norm))
            for stage, module in stages:
                hook = module.register_forward_hook(lambda module, inputs, output, stage=stage: self.add(stage, output))
                stack.callback(hook.remove)
            first = model.blocks[0].register_forward_pre_hook(
                lambda module, inputs: self.add("with positions", inputs[0])
            )
            stack.callback(first.remove)
            yield


def _blocks(model: Backbone) -> list[tuple[str, nn.Module]]:
    return [(f"block {number}", block) for number, block in enumerate(model.blocks, 1)]


def _summary(stage: str, lengths: Tensor, patches: int, has_class_token: bool) -> Lengths:
    of_patches = lengths[:, -patches:].double()
    # torch.quantile takes 2^24 numbers at most.
    low, high = (float(of_patches.flatten().kthvalue(_rank(share, of_patches.numel()))[0]) for share in (0.05, 0.95))
    return Lengths(
        stage,
        float(of_patches.mean()),
        low,
        high,
        float(of_patches.max()),
        float(lengths[:, 0].double().mean()) if has_class_token and lengths.shape[1] > patches else None,
    )


def _rank(share: float, count: int) -> int:
    return 1 + round(share * (count - 1))
