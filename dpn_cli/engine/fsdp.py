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
from dpn_cli.run.precision import precision_of


class ShardedModel(nn.Module):
    """A sharded copy of a network, and the `unsharded` network, whose weights are gathered when they are needed.

    A block's weights are gathered on every rank while the block is computed, all others for the full pass. With bf16 a
    block's matrices are gathered in it; gradients are averaged in float32. A weight without axes cannot be sharded: the
    unsharded network and the copy share it.

    After `shard` the unsharded network has no weights, except inside `evaluating`, until `gather` or `reallocate`.
    """

    def __init__(self, unsharded: nn.Module, runtime: Runtime, world: World) -> None:
        super().__init__()
        self._unsharded = (unsharded,)  # in a tuple, or its weights would be this module's too
        self._shapes = {name: value.shape for name, value in unsharded.named_parameters()}
        undivided = [parameter for parameter in unsharded.parameters() if not parameter.ndim]
        self.network = copy.deepcopy(unsharded, {id(parameter): parameter for parameter in undivided})
        self.undivided = [parameter for parameter in undivided if parameter.requires_grad]
        # Only matrices are cast: the precision of all else is autocast's choice, as it is without shards.
        bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fsdp_options: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.type, (world.size,)),
            "ignored_params": set(undivided),
        }
        precision = precision_of(runtime, world.device, unsharded)
        for block in blocks_of(self.network):
            if runtime.compile:
                block.compile()
            if precision == "bf16":
                fully_shard(matrices_of(block), mp_policy=bf16, **fsdp_options)
            fully_shard(block, **fsdp_options)
        fully_shard(self.network, **fsdp_options)

    @property
    def unsharded(self) -> nn.Module:
        """The network that this module is a copy of."""
        return self._unsharded[0]

    def forward(self, *inputs: Any) -> Any:
        """Run the sharded network."""
        return self.network(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients inside the block, without communication."""
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.network.set_requires_gradient_sync(True)

    def average_undivided(self) -> None:
        """Average over the ranks the gradients of the weights that are not sharded."""
        for parameter in self.undivided:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @torch.no_grad()
    def shard(self) -> None:
        """Shard the weights of the unsharded network over the ranks, and free them there."""
        unsharded = self.unsharded.state_dict()
        for name, value in self.network.state_dict().items():
            value.copy_(shard_like(value, unsharded[name]))
        self._free()

    def reallocate(self) -> None:
        """Allocate weights in the unsharded network where it has none, so that others can be loaded."""
        for name, parameter in self.unsharded.named_parameters():
            if parameter.shape != self._shapes[name]:
                parameter.data = parameter.new_empty(self._shapes[name])

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Gather sharded weights, by name, into the unsharded network. All ranks must call it."""
        parameters, buffers = dict(self.unsharded.named_parameters()), dict(self.unsharded.named_buffers())
        for name, value in gather_tensors(weights):
            if name in parameters:
                parameters[name].data = value if parameters[name].ndim else parameters[name].data
            else:
                buffers[name].copy_(value)

    @contextmanager
    def evaluating(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Gather sharded weights into the unsharded network, in eval mode, inside the block. All ranks enter it."""
        self.gather(weights)
        self.unsharded.eval()
        try:
            yield
        finally:
            self.unsharded.train()
            self._free()

    def _free(self) -> None:
        for parameter in self.unsharded.parameters():
            if parameter.ndim:
                parameter.data = parameter.new_empty(0)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a network, or of the networks inside it."""
    return [block for module in network.modules() for block in getattr(module, "blocks", ())]


def matrices_of(module: nn.Module) -> list[nn.Module]:
    """Return the linear and attention layers inside a module."""
    layers: list[nn.Module] = []
    for child in module.children():
        layers += [child] if isinstance(child, nn.Linear | nn.MultiheadAttention) else matrices_of(child)
    return layers


def gather_tensors(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, the sharded ones gathered. All ranks must read all of them."""
    for name, value in weights.items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(reference: Tensor, value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor where `like` is sharded, else the tensor; without communication."""
    if not isinstance(reference, DTensor):
        return value
    value = value.to(reference.device)
    return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)


def local(value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
