"""The state of a training between two steps: weights, optimizer, and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpn_cli.engine.fsdp import local
from dpn_cli.run.checkpoints import Empty


class Ema:
    """The exponential moving average of a network's weights, by name; sharded where the network is sharded.

    The decay rises to `decay` as (1 + step) / (10 + step), TensorFlow's rule. timm's average has another rule, and
    copies the module, which torch's FSDP2 refuses.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in network.state_dict().items()}

    def get_decay(self, step: int) -> float:
        """Return the decay in the update of `step`, counted from 0."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Move the average towards the network's weights; counts, which have no average, are copied."""
        weights = network.state_dict()
        pairs = [(local(value), local(weights[name])) for name, value in self.average.items()]
        averages, targets = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        torch._foreach_lerp_(averages, targets, weight=1 - self.get_decay(step))
        for value, target in pairs:
            if not value.is_floating_point():
                value.copy_(target)

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
    """Return weights and optimizer state as named tensors, and the optimizer's groups as plain values."""
    tensors = {f"model.{name}": value for name, value in network.state_dict().items()}
    state = optimizer.state_dict()
    for index, slots in state["state"].items():
        tensors.update({f"optim.{index}.{slot}": value for slot, value in slots.items() if isinstance(value, Tensor)})
    tensors.update({f"ema.{name}": value for name, value in (ema.average if ema else {}).items()})
    return tensors, state["param_groups"]


def empty_state(network: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> Empty:
    """Return a function that allocates the tensors of `state_of`, sharded where the network is sharded."""
    weights: dict[str, Tensor] = {f"model.{name}": value for name, value in network.state_dict().items()}
    weights |= {f"ema.{name}": value for name, value in (ema.average if ema else {}).items()}
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def empty(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        if name in weights:
            return weights[name].detach()
        kind, _, key = name.partition(".")
        like: Tensor | None = parameters[int(key.split(".")[0])] if kind == "optim" else None
        if like is None or like.shape != size:  # a count of steps, or sums of norms
            return torch.empty(size, dtype=dtype)
        return torch.zeros_like(like, dtype=dtype)

    return empty


def evaluated_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a saved training evaluates: their average if it has one."""
    kind = "ema." if any(name.startswith("ema.") for name in tensors) else "model."
    return {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}


def restore(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
) -> None:
    """Load the tensors of `state_of` into network, optimizer and average; `state` holds the optimizer's groups."""
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    network.load_state_dict(weights)
    for name, value in (ema.average if ema else {}).items():
        value.copy_(tensors[f"ema.{name}"])
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optim."):
            _, index, slot = name.split(".", 2)
            slots.setdefault(int(index), {})[slot] = value
    fused = [group.get("fused") for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": slots, "param_groups": state["groups"]})
    for group, setting in zip(optimizer.param_groups, fused, strict=True):
        if "fused" in group:
            group["fused"] = setting  # of this run: the saved optimizer may not have been sharded
