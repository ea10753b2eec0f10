"""The gradients of a batch: micro-batches that fit into memory, added up over them and over the ranks, and clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpn_cli import distributed
from dpn_cli.coupled import Batch, CoupledLoss, GivenGradient, first_pass
from dpn_cli.distributed import World
from dpn_cli.errors import OutOfMemoryError
from dpn_cli.memory import MicroBatch, is_out_of_memory
from dpn_cli.optim import clip_gradients
from dpn_cli.seeds import fold

LossFn = Callable[[nn.Module, Batch], Tensor]
"""Loss of a batch: a scalar, the mean over its rows; a `CoupledLoss` where each row's loss depends on the others."""


class Gradients:
    """Gradients of `model`, the `network` as it is called: compiled, and spread over ranks.

    `precision` gives the autocast context of the forward pass, `seed` that of dropout. The micro-batch shrinks when
    memory runs out; the batch never does.
    """

    def __init__(
        self,
        model: nn.Module,
        network: nn.Module,
        loss_fn: LossFn,
        precision: Callable[[], torch.autocast],
        seed: int,
        clip_norm: float | None,
        world: World,
        micro: MicroBatch,
        warn: Callable[[str], None],
    ) -> None:
        self.model, self.network, self.loss_fn, self.precision = model, network, loss_fn, precision
        self.seed, self.clip_norm, self.world, self.micro, self.warn = seed, clip_norm, world, micro, warn
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        network.zero_grad(set_to_none=True)  # what a training that ended in an error may have left behind

    def backward(self, batch: Batch, step: int) -> Tensor:
        """Compute and clip the gradients of a batch; returns (loss over this rank's rows, global norm), pending."""
        while (loss := self._accumulate(batch, step)) is None:
            if self.world.size > 1 or self.micro.fixed:
                # The other ranks wait inside their backward pass: they cannot be told to start over.
                raise OutOfMemoryError(
                    f"out of memory at step {step} with micro-batches of {self.micro.size}; "
                    f"resume with --micro-batch-size {max(1, self.micro.size // 2)}"
                )
            self.micro.halve()
            rows = len(next(iter(batch.values())))
            self.warn(f"out of memory: micro-batches of {self.micro.size} from here on, the batch stays {rows}")
        return torch.stack([loss, clip_gradients(self.parameters, self.clip_norm)])

    def _accumulate(self, batch: Batch, step: int, rows_at_most: int | None = None) -> Tensor | None:
        """Add up the gradients of a batch in micro-batches; returns the loss, or None when memory ran out."""
        rows = len(next(iter(batch.values())))
        loss, loss_fn, done = torch.zeros((), device=self.world.device), self.loss_fn, 0
        probing, coupled = rows_at_most is not None, None
        try:
            if isinstance(loss_fn, CoupledLoss) and (probing or self.micro.size < rows):
                coupled, loss_fn = loss_fn, GivenGradient(loss_fn)
                with self.precision():
                    # A probe must not wait for the other ranks, which a coupled loss may do.
                    parts = None if probing else self._parts(batch, step, rows)
                    loss, batch = first_pass(coupled, self.model, batch, parts)
            for part in self._parts(batch, step, rows_at_most or rows):
                count = len(next(iter(part.values())))
                done += count
                with self._no_sync(probing or done < rows):
                    with self.precision():
                        value = loss_fn(self.model, part)
                    (value * (count / rows)).backward()  # type: ignore[no-untyped-call]
                if coupled is None:
                    loss += value.detach().float() * (count / rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return loss
        # Outside the handler, which holds on to the tensors of the failed pass.
        self.network.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _parts(self, batch: Batch, step: int, upto: int) -> Iterator[Batch]:
        """Yield the micro-batches of a batch, each with the random state that belongs to it."""
        rows = len(next(iter(batch.values())))
        for begin in range(0, upto, self.micro.size):
            # Dropout and drop path: a function of where in the training, never of what ran before.
            torch.manual_seed(fold(self.seed, step, self.world.rank * rows + begin))
            yield {name: value[begin : begin + self.micro.size] for name, value in batch.items()}

    def _no_sync(self, apart: bool) -> Any:
        return self.model.no_sync() if apart and isinstance(self.model, DistributedDataParallel) else nullcontext()

    def probe(self, batch: Batch) -> None:
        """Find a micro-batch that every rank has the memory for, before the ranks depend on each other."""
        while distributed.max_over_ranks(self._accumulate(batch, 0, rows_at_most=self.micro.size) is None):
            if self.micro.fixed:
                raise OutOfMemoryError(
                    f"out of memory with micro-batches of {self.micro.size}; use --micro-batch-size "
                    f"{max(1, self.micro.size // 2)}, or auto"
                )
            self.micro.halve()
            self.warn(f"out of memory: micro-batches of {self.micro.size} on every rank")
        self.network.zero_grad(set_to_none=True)
