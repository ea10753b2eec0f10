"""The state of a training between two steps: weights, optimizer, and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn


class Ema(ModelEmaV3):  # type: ignore[misc]  # timm has no types
    """The exponential moving average of a network's weights.

    The decay rises to `decay` as (1 + step) / (10 + step), TensorFlow's rule; timm's own warm-up rises otherwise.
    """

    def get_decay(self, step: int | None = None) -> float:
        """Return the decay in the update of `step`, counted from 0."""
        assert step is not None
        limit: float = self.decay
        return min(limit, (1 + step) / (10 + step))

    @property
    def average(self) -> dict[str, Tensor]:
        """The averaged weights by name."""
        state: dict[str, Tensor] = self.module.state_dict()
        return state

    @contextmanager
    def applied(self, network: nn.Module) -> Iterator[None]:
        """Load the average into the network inside the block."""
        trained = {name: value.detach().clone() for name, value in network.state_dict().items()}
        network.load_state_dict(self.average)
        try:
            yield
        finally:
            network.load_state_dict(trained)


def state_of(
    network: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Flatten weights and optimizer state into named tensors, and the rest into plain values."""
    tensors = {f"model.{name}": value for name, value in network.state_dict().items()}
    state = optimizer.state_dict()
    for index, slots in state["state"].items():
        tensors.update({f"optim.{index}.{slot}": value for slot, value in slots.items() if isinstance(value, Tensor)})
    tensors.update({f"ema.{name}": value for name, value in (ema.average if ema else {}).items()})
    return tensors, state["param_groups"]


def evaluated_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a saved training that were evaluated: the average if there is one."""
    kind = "ema." if any(name.startswith("ema.") for name in tensors) else "model."
    return {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}


def restore(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
) -> None:
    """Put back what `state_of` took apart; `state` holds the optimizer's groups."""
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    network.load_state_dict(weights)
    for name, value in (ema.average if ema else {}).items():
        value.copy_(tensors[f"ema.{name}"])
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optim."):
            _, index, slot = name.split(".", 2)
            slots.setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict({"state": slots, "param_groups": state["groups"]})
