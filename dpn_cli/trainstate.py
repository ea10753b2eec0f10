"""What a training is made of between two steps: weights, optimizer, and the running average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """The exponential moving average of a network's weights.

    The decay rises to `decay` as (1 + step) / (10 + step), so that the start is soon forgotten (TensorFlow's rule).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network, self.decay = network, decay
        self.average = {name: value.detach().clone() for name, value in network.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the update of `step`, counted from 0."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        state = self.network.state_dict()
        torch._foreach_lerp_([self.average[name] for name in state], list(state.values()), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network the average for a while."""
        trained = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average)
        try:
            yield
        finally:
            self.network.load_state_dict(trained)

    def finish(self) -> None:
        """Give the network the average for good."""
        self.network.load_state_dict(self.average)


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
    """Return those weights of a saved training that its evaluation was of: the average where there is one."""
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
