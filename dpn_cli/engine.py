"""`fit`: the one training loop of all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpn_cli import distributed, stopping
from dpn_cli.console import Tick
from dpn_cli.coupled import CoupledLoss, GivenGradient, first_pass
from dpn_cli.distributed import World
from dpn_cli.errors import DpnError, NonFiniteError, OutOfMemoryError, StoppedError
from dpn_cli.memory import MicroBatch, is_out_of_memory
from dpn_cli.optim import build_optimizer, clip_gradients, lr_factor, set_lr
from dpn_cli.recipe import Optim, Runtime, Schedule
from dpn_cli.runstate import Checkpoints, MetricsLog
from dpn_cli.seeds import fold
from dpn_cli.trainstate import Ema, restore, state_of

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]
"""Loss of a batch: a scalar, the mean over its rows; a `CoupledLoss` where each row's loss depends on the others."""
Batches = Callable[[int], Iterator[Batch]]
"""``batches(step)`` yields this rank's rows of every global batch from a step on: a pure function of the step."""
Evaluate = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Training:
    """What is trained for how long: all that decides the final weights beside model, data and loss."""

    optim: Optim
    schedule: Schedule
    lr: float
    batch_size: int
    seed: int
    ema: float | None = None


@dataclass
class FitResult:
    """What a training did; times in seconds, of this process alone and not of an earlier, interrupted part."""

    steps: int
    loss: float
    seconds: float
    wait_seconds: float
    micro_batch: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Outputs:
    """Where a training writes and shows what it does; each may be left out."""

    checkpoints: Checkpoints | None = None
    log: MetricsLog | None = None
    tick: Callable[[Tick], None] = lambda tick: None
    warn: Callable[[str], None] = print


def fit(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    evaluate: Evaluate | None,
    training: Training,
    runtime: Runtime,
    world: World,
    outputs: Outputs,
    micro: MicroBatch,
    *,
    evaluate_every: int = 0,
    watch: str = "accuracy",
) -> FitResult:
    """Train `model` and evaluate it at the end, and every `evaluate_every` steps.

    With `Training.ema` it is the averaged weights that are evaluated, and that the model has in the end.

    Args:
        model: what `prepare` returned; trained in place.
        loss_fn: loss of a batch, given the model.
        batches: the rows of this rank from a step on.
        evaluate: metrics by name, with the model in eval mode; `watch` is the one that ``best`` maximises.
        training, runtime: what to compute, and how.
        world: this rank.
        outputs: checkpoints, log and display. A checkpoint found there is resumed from, bit for bit on a CPU.
        micro: the micro-batch; the global batch never changes, whatever memory does.

    Raises:
        NonFiniteError: loss or gradient norm is NaN or infinite; before the optimizer step.
        OutOfMemoryError: one row does not fit.
        StoppedError: a signal asked to stop; the state is saved.
    """
    if training.batch_size % world.size:
        refuse_batch(training.batch_size, world.size)
    loop = _Loop(model, loss_fn, training, runtime, world, outputs, micro)
    start, best = loop.resume()
    if world.size > 1:
        loop.probe(batches(start))
    stream, steps, schedule = batches(start), training.schedule.steps, training.schedule
    result = FitResult(start, math.nan, 0.0, 0.0, micro.size)
    log_every = max(1, steps // 50)
    began = time.perf_counter()
    batch = loop.fetch(stream, result) if start < steps else None
    for step in range(start, steps):
        if (number := stopping.requested()) is not None:
            loop.save("last", step, best)
            raise StoppedError(number)
        assert batch is not None, f"the batches ended before step {step}"
        last = step + 1 == steps
        lr = training.lr * lr_factor(schedule, step)
        pending = loop.backward(batch, step)
        # A GPU is still busy with the gradients: the next batch is made meanwhile.
        batch = None if last else loop.fetch(stream, result)
        result.loss, norm = loop.update(pending, step, lr)
        result.steps, result.seconds = step + 1, time.perf_counter() - began
        if last or (step + 1) % log_every == 0:
            loop.report(result, lr, norm, (step + 1 - start) * training.batch_size)
        if evaluate and (last or (evaluate_every and (step + 1) % evaluate_every == 0)):
            result.metrics = loop.evaluate(evaluate, step + 1)
            if evaluate_every and result.metrics[watch] > best:
                best = result.metrics[watch]
                loop.save("best", step + 1, best)
        if not last and (step + 1) % runtime.checkpoint_every == 0:
            loop.save("last", step + 1, best)
    result.micro_batch = micro.size
    if loop.ema:
        loop.ema.finish()
    return result


def refuse_batch(batch_size: int, ranks: int) -> NoReturn:
    """Raise the `DpnError` for a batch that the ranks do not divide."""
    raise DpnError(
        f"--batch-size {batch_size}: not divisible by the {ranks} ranks; use {batch_size // ranks * ranks or ranks}"
    )


def prepare(model: nn.Module, runtime: Runtime, world: World) -> nn.Module:
    """Return `model` compiled and spread over ranks as asked; its weights stay those of `model` itself.

    Do it once for many trainings: the compiled step is reused.
    """
    model.to(world.device)
    compiled = torch.compile(model) if runtime.compile else model
    return distributed.parallel(compiled, world)  # type: ignore[arg-type]  # torch.compile keeps an nn.Module one


def precision_of(runtime: Runtime, device: torch.device) -> torch.autocast:
    """Return the autocast context: bfloat16 on a GPU, float32 on a CPU, unless the recipe says."""
    bf16 = runtime.precision == "bf16" or (runtime.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside what `prepare` made."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


class _Loop:
    """The parts of one training that `fit` puts in order."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        training: Training,
        runtime: Runtime,
        world: World,
        outputs: Outputs,
        micro: MicroBatch,
    ) -> None:
        self.model, self.loss_fn, self.training, self.runtime = model, loss_fn, training, runtime
        self.world, self.outputs, self.micro = world, outputs, micro
        self.network = unwrap(model)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.network.named_parameters(), training.optim, training.lr)
        self.optimizer.zero_grad(set_to_none=True)  # what a training that ended in an error may have left behind
        self.ema = Ema(self.network, training.ema) if training.ema else None
        self.model.train()

    def resume(self) -> tuple[int, float]:
        """Restore the last checkpoint; returns its step (0 without one) and the best metric so far."""
        saved = self.outputs.checkpoints.load("last", self.outputs.warn) if self.outputs.checkpoints else None
        step, best = (saved[1]["step"], saved[1]["best"]) if saved else (0, None)
        if saved:
            restore(self.network, self.optimizer, self.ema, *saved)
        if self.outputs.log and self.world.leads:
            self.outputs.log.truncate(step)
        return step, -math.inf if best is None else best

    def save(self, name: str, step: int, best: float) -> None:
        """Save the state after `step` steps."""
        if self.outputs.checkpoints and self.world.leads:
            tensors, groups = state_of(self.network, self.optimizer, self.ema)
            state = {"step": step, "best": best if math.isfinite(best) else None, "groups": groups}
            self.outputs.checkpoints.save(name, tensors, state)
        distributed.barrier()

    def fetch(self, stream: Iterator[Batch], result: FitResult) -> Batch | None:
        """Take the next batch; its time counts as waiting unless a GPU was busy until the batch was there."""
        busy = None
        if self.world.device.type == "cuda":
            busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
            busy.record()
        began = time.perf_counter()
        batch = next(stream, None)
        if busy is None or busy.query():  # type: ignore[no-untyped-call]
            result.wait_seconds += time.perf_counter() - began
        return batch

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
            self.outputs.warn(
                f"out of memory: micro-batches of {self.micro.size} from here on, "
                f"the batch stays {self.training.batch_size}"
            )
        return torch.stack([loss, clip_gradients(self.parameters, self.training.optim.clip_norm)])

    def update(self, pending: Tensor, step: int, lr: float) -> tuple[float, float]:
        """Do the optimizer step if loss and norm are numbers, and return them."""
        loss_value, norm_value = pending.tolist()
        if not math.isfinite(loss_value + norm_value):
            raise NonFiniteError(
                f"step {step}: loss {loss_value}, gradient norm {norm_value}; nothing was updated. "
                "Lower the learning rate, or use --precision fp32"
            )
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(step)
        return loss_value, norm_value

    def _accumulate(self, batch: Batch, step: int, rows_at_most: int | None = None) -> Tensor | None:
        """Add up the gradients of a batch in micro-batches; returns the loss, or None when memory ran out."""
        rows = len(next(iter(batch.values())))
        loss, loss_fn, done = torch.zeros((), device=self.world.device), self.loss_fn, 0
        probing, coupled = rows_at_most is not None, None
        try:
            if isinstance(loss_fn, CoupledLoss) and (probing or self.micro.size < rows):
                coupled, loss_fn = loss_fn, GivenGradient(loss_fn)
                with precision_of(self.runtime, self.world.device):
                    # A probe must not wait for the other ranks, which a coupled loss may do.
                    parts = None if probing else self._parts(batch, step, rows)
                    loss, batch = first_pass(coupled, self.model, batch, parts)
            for part in self._parts(batch, step, rows_at_most or rows):
                count = len(next(iter(part.values())))
                done += count
                with self._no_sync(probing or done < rows):
                    with precision_of(self.runtime, self.world.device):
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
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _parts(self, batch: Batch, step: int, upto: int) -> Iterator[Batch]:
        """Yield the micro-batches of a batch, each with the random state that belongs to it."""
        rows = len(next(iter(batch.values())))
        for begin in range(0, upto, self.micro.size):
            # Dropout and drop path: a function of where in the training, never of what ran before.
            torch.manual_seed(fold(self.training.seed, step, self.world.rank * rows + begin))
            yield {name: value[begin : begin + self.micro.size] for name, value in batch.items()}

    def _no_sync(self, apart: bool) -> Any:
        return self.model.no_sync() if apart and isinstance(self.model, DistributedDataParallel) else nullcontext()

    def probe(self, stream: Iterator[Batch]) -> None:
        """Find a micro-batch that every rank has the memory for, before the ranks depend on each other."""
        batch = next(stream)
        while distributed.max_over_ranks(self._accumulate(batch, 0, rows_at_most=self.micro.size) is None):
            if self.micro.fixed:
                raise OutOfMemoryError(
                    f"out of memory with micro-batches of {self.micro.size}; use --micro-batch-size "
                    f"{max(1, self.micro.size // 2)}, or auto"
                )
            self.micro.halve()
            self.outputs.warn(f"out of memory: micro-batches of {self.micro.size} on every rank")
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        """Run the task's evaluation with the model in eval mode, and log it."""
        self.model.eval()
        averaged = self.ema.applied() if self.ema else nullcontext()
        with averaged, torch.inference_mode(), precision_of(self.runtime, self.world.device):
            metrics = evaluate()
        self.model.train()
        if self.outputs.log and self.world.leads:
            self.outputs.log.write({"step": step, **metrics})
        return metrics

    def report(self, result: FitResult, lr: float, norm: float, images: int) -> None:
        """Log and show the state after a step."""
        loss = distributed.reduce_over_ranks(torch.tensor(result.loss)).item() / self.world.size
        tick = Tick(
            result.steps,
            self.training.schedule.steps,
            loss,
            lr,
            images / result.seconds,
            result.wait_seconds / result.seconds,
        )
        self.outputs.tick(tick)
        if self.outputs.log and self.world.leads:
            self.outputs.log.write(
                {
                    "step": tick.step,
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": norm,
                    "images_per_second": round(tick.images_per_second, 2),
                    "wait_share": round(tick.wait_share, 5),
                }
            )
