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

# Of a network in parts, whole copies of a block at once: its weights as they arrive and in place and those of the next
# block; its gradients and what is sent of them.
WEIGHTS_AT_ONCE, GRADIENTS_AT_ONCE = 3, 2


def step_bytes(
    model: Backbone,
    optim: Optim,
    batch: int,
    rows: int,
    *,
    bf16: bool = False,
    parts: int = 1,
    ema: bool = False,
) -> int:
    """Return the most bytes of tensors that a training step of a classifier has on a device, once there have been some.

    Weights, their average, the optimizer's state, gradients and activations count; what libraries take and the next
    batches do not. Nothing is computed.

    Args:
        model: the network, on the CPU; left as it is.
        optim: what has state.
        batch: the images of a batch on the device.
        rows: those of them that go through the network at once.
        bf16: whether matrices are multiplied in bfloat16.
        parts: over how many devices `Shards` spreads the network.
        ema: whether there are averaged weights.
    """
    weights = _bytes(model.parameters())
    trained = _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    state = trained // 2 if optim.state_dtype == "bfloat16" else trained
    kept = weights + state + (trained if optim.name == "adam" else 0) + (weights if ema else 0)
    passes = 2 if rows < batch else 1  # the gradients of the first are there in the second
    if parts == 1:
        return kept + max(trained, _peak(model, rows, passes, bf16=bf16, gradients=True))
    blocks = [_bytes(block.parameters()) for block in blocks_of(model)]
    others, block = weights - sum(blocks), max(blocks)
    gathered = WEIGHTS_AT_ONCE * (block // 2 if bf16 else block) + GRADIENTS_AT_ONCE * block
    # Until the last micro-batch of a batch, each device adds up whole gradients.
    peak = _peak(model, rows, passes, bf16=bf16, gradients=passes > 1)
    return (kept + trained) // parts + others + gathered + peak


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak(model: Backbone, rows: int, passes: int, *, bf16: bool, gradients: bool) -> int:
    """Return the most bytes that forward and backward passes have besides the weights, with their gradients or not."""
    fake = FakeTensorMode()
    own: dict[int, Tensor] = {id(buffer): fake.from_tensor(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        own[id(parameter)] = nn.Parameter(fake.from_tensor(parameter.detach()), parameter.requires_grad)
    network = copy.deepcopy(model, dict(own)).train()
    if not gradients:
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_free_gradient)
    with fake, _Storages(list(own.values())) as storages:
        for _ in range(passes):
            image = torch.empty(rows, 3, *model.config.image_size, dtype=torch.uint8)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = sigmoid_xent(
                    network(network.normalize(image)).float(), torch.empty(rows, model.config.num_classes)
                )
            loss.backward()  # type: ignore[no-untyped-call]
            del image, loss
    return int(storages.most)


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Adds up the memory that operations make, as long as it is in use; that of `known` tensors does not count."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._alive: dict[int, Any] = {t.untyped_storage()._cdata: t.untyped_storage() for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def free(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, free)
        self.now += size
        self.most = max(self.most, self.now)
