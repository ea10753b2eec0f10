"""The gradients of a batch: added up over micro-batches that fit into memory, averaged over ranks, and clipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpn_cli.engine.cross_batch_loss import CrossBatchLoss, SurrogateLoss, feature_gradient
from dpn_cli.engine.fsdp import ShardedModel
from dpn_cli.engine.layer_grad_norms import LayerGradNorms
from dpn_cli.engine.memory import MicroBatch, is_out_of_memory
from dpn_cli.engine.optim import clip_gradients
from dpn_cli.engine.seeds import fold
from dpn_cli.engine.trainer_args import Batch, LossFn, TrainJob
from dpn_cli.errors import OutOfMemoryError
from dpn_cli.model.norms import has_running_norms, set_progress
from dpn_cli.run import distributed
from dpn_cli.run.precision import autocast


class Gradients:
    """Computes the gradients of `network`, which `model` wraps: compiled, and spread over ranks.

    `micro_batch` shrinks when memory runs out; the batch never does.
    """

    def __init__(self, model: nn.Module, network: nn.Module, job: TrainJob, micro_batch: MicroBatch) -> None:
        self.model, self.network, self.job, self.micro_batch = model, network, job, micro_batch
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.layer_grad_norms = LayerGradNorms(network) if job.layer_norms else None
        # The losses over this rank's rows since the last logged step, and their number.
        self.loss_sum, self.loss_steps = torch.zeros((), device=job.world.device), 0
        network.zero_grad(set_to_none=True)  # an earlier training that failed may have left gradients

    def compute(self, batch: Batch, step: int, *, logged: bool = False) -> Tensor:
        """Compute and clip the gradients of a batch; returns (loss over this rank's rows, global norm), pending.

        For a `logged` step, the loss is the mean over the global batches since the last one, and the mean norms of each
        layer before clipping follow if the job asks for them. The ranks do not communicate after this until the next
        step: a rank lost here leaves the weights of the others unchanged.
        """
        loss_fn = self.job.loss_fn
        set_progress(self.network, step / self.job.schedule.steps)
        while True:
            try:
                if isinstance(loss_fn, CrossBatchLoss) and self.micro_batch.size < count_rows(batch):
                    loss, surrogate = self._first_pass(loss_fn, batch, step)
                    self._accumulate(SurrogateLoss(loss_fn), surrogate, step)
                else:
                    loss = self._accumulate(loss_fn, batch, step)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self.loss_sum += loss
                self.loss_steps += 1
                if logged:
                    loss = self._global_loss_sum() / self.loss_steps
                    self.loss_sum, self.loss_steps = torch.zeros_like(loss), 0
                norms = self.layer_grad_norms.add() if self.layer_grad_norms else None
                norm = clip_gradients(self.parameters, self.job.optim.clip_norm, norms)
                layers = self.layer_grad_norms.pop_means() if self.layer_grad_norms and logged else loss.new_empty(0)
                return torch.cat([torch.stack([loss, norm]), layers])
            self._shrink(step, count_rows(batch))  # outside the handler, which holds the tensors of the failed pass

    def share_loss_sum(self) -> None:
        """Replace each rank's sum of losses by the global one, which a checkpoint of any rank may hold."""
        self.loss_sum = self._global_loss_sum()

    def _global_loss_sum(self) -> Tensor:
        rows = len(self.job.world.rows(self.job.batch_size))
        return distributed.reduce_over_ranks(self.loss_sum * (rows / self.job.batch_size))

    def _accumulate(self, loss_fn: LossFn, batch: Batch, step: int, *, sync: bool = True) -> Tensor:
        """Add up the gradients of a batch in micro-batches, and over ranks if `sync`; returns the batch's loss."""
        rows = count_rows(batch)
        # DDP averages over ranks, whose numbers of rows may differ: weight this rank's gradients by its rows.
        mean_rows = self.job.batch_size / self.job.world.size
        loss = torch.zeros((), device=self.job.world.device)
        passes = self._passes(rows)
        for number, (chunk, count) in enumerate(self._micro_batches(batch, step), 1):
            with nullcontext() if sync and number == passes else self._no_sync():
                with autocast(self.job.runtime, self.job.world.device, self.network):
                    value = loss_fn(self.model, chunk)
                (value * (count / mean_rows)).backward()  # type: ignore[no-untyped-call]
            loss += value.detach().float() * (count / rows)
        if sync and isinstance(self.model, ShardedModel):
            self.model.average_undivided()
        return loss

    def _first_pass(self, loss_fn: CrossBatchLoss, batch: Batch, step: int) -> tuple[Tensor, Batch]:
        """Return the loss of a batch, and the batch on which `SurrogateLoss` has the gradients of that loss."""
        with autocast(self.job.runtime, self.job.world.device, self.network):
            chunks = (chunk for chunk, _ in self._micro_batches(batch, step))
            return feature_gradient(loss_fn, self.model, batch, chunks)

    def find_micro_batch(self, batch: Batch) -> None:
        """Halve the micro-batch until every rank has the memory for it, before the ranks depend on each other.

        Skipped for a network whose norms take statistics over all ranks: its micro-batch is fixed.
        """
        if has_running_norms(self.network):
            return
        while distributed.max_over_ranks(not self._fits(batch)):
            if self.micro_batch.fixed:
                raise OutOfMemoryError(
                    f"out of memory with micro-batches of {self.micro_batch.size}; use --micro-batch-size "
                    f"{max(1, self.micro_batch.size // 2)}, or auto"
                )
            self.micro_batch.halve()
            self.job.outputs.warn(f"out of memory: micro-batches of {self.micro_batch.size} on every rank")
        self.network.zero_grad(set_to_none=True)

    def _fits(self, batch: Batch) -> bool:
        """Return whether one micro-batch fits. It communicates nothing: a cross-batch loss gets a dummy one."""
        loss_fn, (chunk, _) = self.job.loss_fn, next(self._micro_batches(batch, 0))
        if isinstance(loss_fn, CrossBatchLoss):
            loss_fn, chunk = SurrogateLoss(loss_fn), SurrogateLoss.placeholder(chunk)
        try:
            self._accumulate(loss_fn, chunk, 0, sync=False)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        self._free()
        return False

    def _shrink(self, step: int, rows: int) -> None:
        """Halve the micro-batch of a rank that ran out of memory. Raises `OutOfMemoryError` where it may not."""
        self._free()
        if self.job.world.size > 1 or self.micro_batch.fixed:
            # The other ranks wait inside their backward pass and cannot start over.
            raise OutOfMemoryError(
                f"out of memory at step {step + 1} with micro-batches of {self.micro_batch.size}; "
                f"resume with --micro-batch-size {max(1, self.micro_batch.size // 2)}"
            )
        self.micro_batch.halve()
        self.job.outputs.warn(
            f"out of memory: micro-batches of {self.micro_batch.size} from here on, the batch stays {rows}"
        )

    def _free(self) -> None:
        """Free the gradients and cached memory of a failed pass."""
        self.network.zero_grad(set_to_none=True)
        if self.job.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _passes(self, rows: int) -> int:
        """Return the number of micro-batches of a batch; of a sharded network that of the rank with the most rows.

        The ranks of a sharded network compute each block together.
        """
        most = self.job.world.most(self.job.batch_size) if isinstance(self.model, ShardedModel) else rows
        return -(-most // self.micro_batch.size)

    def _micro_batches(self, batch: Batch, step: int) -> Iterator[tuple[Batch, int]]:
        """Yield the micro-batches of a batch with their numbers of rows, and seed the random state of each.

        A rank with too few rows repeats its first one, with a count of 0.
        """
        rows, size = count_rows(batch), self.micro_batch.size
        first = self.job.world.rows(self.job.batch_size).start
        for start in range(0, self._passes(rows) * size, size):
            # Dropout and drop path depend on step and row only, so that a resumed training draws the same.
            torch.manual_seed(fold(self.job.seed, step, first + start))
            chunk = slice(start, start + size) if start < rows else slice(0, 1)
            yield {name: value[chunk] for name, value in batch.items()}, max(0, min(size, rows - start))

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel | ShardedModel) else nullcontext()


def count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(batch.values())))
