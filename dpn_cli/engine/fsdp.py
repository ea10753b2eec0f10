"""`ShardedModel`: a network whose weights, gradients and optimizer state are spread over the ranks by torch's FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dpn_cli.config.schema import Runtime
from dpn_cli.run.distributed import World


class ShardedModel(nn.Module):
    """A copy of a network of which each rank holds a part, and the `whole` network, which is there when it is needed.

    A block's weights come together on every rank while the block is computed, all others for the whole pass. With
    bf16 a block's matrices travel in it; gradients are averaged in float32. A weight without axes cannot be divided:
    the whole network and the copy share it.

    From `take` on the whole network has no weights, except inside `shown`, until `give` or `release`.
    """

    def __init__(self, whole: nn.Module, runtime: Runtime, world: World) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple, or its weights would be this module's as well
        self._shapes = {name: value.shape for name, value in whole.named_parameters()}
        undivided = [parameter for parameter in whole.parameters() if not parameter.ndim]
        self.network = copy.deepcopy(whole, {id(parameter): parameter for parameter in undivided})
        self.undivided = [parameter for parameter in undivided if parameter.requires_grad]
        # Only matrices are cast: the precision of all else is autocast's choice, as it is without shards.
        bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        how: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.type, (world.size,)),
            "ignored_params": set(undivided),
        }
        for block in blocks_of(self.network):
            if runtime.compile:
                block.compile()
            if runtime.precision_on(world.device.type) == "bf16":
                fully_shard(matrices_of(block), mp_policy=bf16, **how)
            fully_shard(block, **how)
        fully_shard(self.network, **how)

    @property
    def whole(self) -> nn.Module:
        """The network that this is a copy of."""
        return self._whole[0]

    def forward(self, *inputs: Any) -> Any:
        """Compute what the network computes."""
        return self.network(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on this rank alone inside the block, whole ones."""
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.network.set_requires_gradient_sync(True)

    def average_undivided(self) -> None:
        """Average the gradients of the weights that are not divided over the ranks."""
        for parameter in self.undivided:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @torch.no_grad()
    def take(self) -> None:
        """Take the whole network's weights, of which each rank keeps its parts, and free them."""
        whole = self.whole.state_dict()
        for name, value in self.network.state_dict().items():
            value.copy_(part_like(value, whole[name]))
        self._free()

    def release(self) -> None:
        """Give the whole network weights of its shapes for what is loaded next, where it has none."""
        for name, parameter in self.whole.named_parameters():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])

    def give(self, weights: Mapping[str, Tensor]) -> None:
        """Give the whole network weights, by name, of which every rank has a part. All ranks call it."""
        parameters, buffers = dict(self.whole.named_parameters()), dict(self.whole.named_buffers())
        for name, value in gather_tensors(weights):
            if name in parameters:
                parameters[name].data = value if parameters[name].ndim else parameters[name].data
            else:
                buffers[name].copy_(value)

    @contextmanager
    def shown(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the whole network such weights inside the block, and put it into eval mode. All ranks enter it."""
        self.give(weights)
        self.whole.eval()
        try:
            yield
        finally:
            self.whole.train()
            self._free()

    def _free(self) -> None:
        for parameter in self.whole.parameters():
            if parameter.ndim:
                parameter.data = parameter.new_empty(0)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a network, or of the networks inside it."""
    return [block for module in network.modules() for block in getattr(module, "blocks", ())]


def matrices_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers inside a module that multiply by matrices."""
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if isinstance(child, nn.Linear | nn.MultiheadAttention) else matrices_of(child)
    return found


def gather_tensors(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, whole ones of those that are in parts. All ranks take all of them."""
    for name, value in weights.items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def part_like(like: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor where `like` is one in parts, else the tensor; nothing is exchanged."""
    if not isinstance(like, DTensor):
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def local(value: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
