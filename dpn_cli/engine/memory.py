"""Micro-batches: the rows that go through the network at once, so that a batch fits into memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpn_cli.config.schema import Runtime
from dpn_cli.errors import DpnError, OutOfMemoryError
from dpn_cli.model.norms import has_running_norms
from dpn_cli.run import distributed

# Forward activations that autograd retains, in bytes per token, block and unit of width, in float32.
ACTIVATION_BYTES = 34 * 4
# Bytes of activations of a micro-batch at most on a CPU, where running out of memory kills the process.
CPU_BUDGET = 1_500_000_000

# Torch's messages when memory runs out: on a CPU, in a CUDA call, and in a matrix product of cuBLAS.
OUT_OF_MEMORY = ("allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass
class MicroBatch:
    """The number of rows that go through the network at once; a `fixed` one never shrinks.

    `shrunk` is whether it has been halved.
    """

    size: int
    fixed: bool = False
    shrunk: bool = False

    @classmethod
    def choose(cls, runtime: Runtime, rows: int, model: nn.Module, device: torch.device) -> MicroBatch:
        """Return the config's micro-batch; for ``"auto"`` all `rows`, or as many as fit into 1.5 GB on a CPU.

        On a GPU a sharded network cannot try a micro-batch; it gets the rows that fit into half of the free memory.
        Raises `DpnError` when fewer rows would fit and the network's norms take statistics over them: only the user can
        change what such a network computes.
        """
        if runtime.micro_batch_size != "auto":
            return cls(min(runtime.micro_batch_size, rows), fixed=True)
        cost, size = activation_bytes(model), rows
        if device.type == "cpu" or runtime.shard:
            fits = max(1, _budget(device) // cost)
            size = min(rows, 1 << (fits.bit_length() - 1))
        has_batch_statistics = has_running_norms(model)
        if has_batch_statistics and size < rows:
            raise DpnError(
                f"--micro-batch-size auto: {rows} images at once do not fit, and this network's norms take their "
                f"statistics over the images that go through it at once; state the number, e.g. "
                f"--micro-batch-size {size}, or a smaller --batch-size"
            )
        return cls(size, fixed=has_batch_statistics)

    def halve(self) -> None:
        """Halve the micro-batch. Raises `OutOfMemoryError` when it is one row already."""
        if self.size == 1:
            raise OutOfMemoryError(
                "out of memory with one image at a time; use --set backbone.grad_checkpointing=true (of a text tower "
                "--set text.grad_checkpointing=true), a smaller --arch or --image-size, or another --device"
            )
        self.size, self.shrunk = math.ceil(self.size / 2), True

    def shrink_to(self, size: int | None) -> None:
        """Shrink to the size of an earlier session that ran out of memory; None where none did."""
        if size is not None and not self.fixed and size < self.size:
            self.size, self.shrunk = size, True


def activation_bytes(model: nn.Module) -> int:
    """Return about the largest number of bytes of activations that autograd retains for one row, in float32."""
    tokens: int = getattr(model, "pos_embed", torch.empty(1, 1, 1)).shape[1] + 1
    width: int = getattr(model, "embed_dim", 1)
    return tokens * width * len(getattr(model, "blocks", [0])) * ACTIVATION_BYTES


def _budget(device: torch.device) -> int:
    """Return the bytes allowed for activations: on a GPU half of the free memory of the rank with the least."""
    if device.type == "cpu":
        return CPU_BUDGET
    free, _ = torch.cuda.mem_get_info(device)
    return -distributed.max_over_ranks(-(free // 2))


def in_chunks(forward: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return the outputs of `forward` for independent rows, in as many chunks as memory needs.

    `forward` must not wait for other ranks, whose chunks may be of other sizes. Raises `OutOfMemoryError` when one row
    does not fit.
    """
    size = len(rows)
    while True:
        try:
            return (
                forward(rows) if size >= len(rows) else torch.cat([forward(chunk) for chunk in torch.split(rows, size)])
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size <= 1:
                raise OutOfMemoryError(
                    "out of memory with one image at a time, in an evaluation; use a smaller --image-size, or another "
                    "--device"
                ) from error
        size = math.ceil(size / 2)  # outside the handler, which holds the tensors of the failed pass
        if rows.device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the CPU ran out of memory."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(message in text for message in OUT_OF_MEMORY)
    )
