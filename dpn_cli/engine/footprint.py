"""Device memory of a training step, summed over a pass with tensors that have sizes and no contents."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpn_cli.config.schema import Optim
from dpn_cli.engine.fsdp import blocks_of
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.weights.backbone import Backbone

# Full copies of a block that FSDP holds together: its weights as they arrive and in place and those of the next block;
# its gradients and the buffer that sends them.
WEIGHTS_AT_ONCE, GRADIENTS_AT_ONCE = 3, 2


def step_bytes(
    model: Backbone,
    optim: Optim,
    batch: int,
    rows: int,
    *,
    bf16: bool = False,
    shards: int = 1,
    ema: bool = False,
) -> int:
    """Return the peak bytes of tensors in a training step of a classifier on a device, after the first step.

    Weights, their average, the optimizer's state, gradients and activations count; libraries' memory and the next
    batches do not. Nothing is computed.

    Args:
        model: the network, on the CPU; left as it is.
        optim: the optimizer.
        batch: the images of a batch on the device.
        rows: images of a micro-batch.
        bf16: True where matrices are multiplied in bfloat16.
        shards: devices over which FSDP spreads the network.
        ema: True with averaged weights.
    """
    weights = _bytes(model.parameters())
    trained = _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    state = trained // 2 if optim.state_dtype == "bfloat16" else trained
    resident_bytes = weights + state + (trained if optim.name == "adam" else 0) + (weights if ema else 0)
    passes = 2 if rows < batch else 1  # the second pass already holds the gradients of the first
    if shards == 1:
        return resident_bytes + max(trained, _peak(model, rows, passes, bf16=bf16, gradients=True))
    blocks = [_bytes(block.parameters()) for block in blocks_of(model)]
    unsharded, block = weights - sum(blocks), max(blocks)
    gathered = WEIGHTS_AT_ONCE * (block // 2 if bf16 else block) + GRADIENTS_AT_ONCE * block
    # Until the last micro-batch of a batch, each device adds up whole gradients.
    peak = _peak(model, rows, passes, bf16=bf16, gradients=passes > 1)
    return (resident_bytes + trained) // shards + unsharded + gathered + peak


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak(model: Backbone, rows: int, passes: int, *, bf16: bool, gradients: bool) -> int:
    """Return the peak bytes of forward and backward passes without the weights, with or without their gradients."""
    fake_mode = FakeTensorMode()
    fake_tensors: dict[int, Tensor] = {id(buffer): fake_mode.from_tensor(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        fake_tensors[id(parameter)] = nn.Parameter(fake_mode.from_tensor(parameter.detach()), parameter.requires_grad)
    network = copy.deepcopy(model, dict(fake_tensors)).train()
    if not gradients:
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_free_gradient)
    with fake_mode, _Storages(list(fake_tensors.values())) as storages:
        for _ in range(passes):
            image = torch.empty(rows, 3, *model.config.image_size, dtype=torch.uint8)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = sigmoid_xent(
                    network(network.normalize(image)).float(), torch.empty(rows, model.config.num_classes)
                )
            loss.backward()  # type: ignore[no-untyped-call]
            del image, loss
    return int(storages.peak_bytes)


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Sum of the memory that operations allocate while it is in use, without that of `excluded` tensors."""

    def __init__(self, excluded: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes, self.peak_bytes = 0, 0
        self._live_storages: dict[int, Any] = {t.untyped_storage()._cdata: t.untyped_storage() for t in excluded}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live_storages:
            return

        def free(_: object) -> None:
            del self._live_storages[key]
            self.current_bytes -= size

        self._live_storages[key] = weakref.ref(storage, free)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
