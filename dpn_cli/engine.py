"""`fit`: the one training loop of all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpn_cli import distributed, stopping
from dpn_cli.console import Tick
from dpn_cli.coupled import Batch as Batch
from dpn_cli.distributed import World
from dpn_cli.errors import DpnError, NonFiniteError, StoppedError
from dpn_cli.gradients import Gradients
from dpn_cli.gradients import LossFn as LossFn
from dpn_cli.memory import MicroBatch
from dpn_cli.optim import build_optimizer, lr_factor, set_lr
from dpn_cli.recipe import Optim, Runtime, Schedule
from dpn_cli.runstate import Checkpoints, MetricsLog
from dpn_cli.trainstate import Ema, restore, state_of

Batches = Callable[[int], Generator[Batch, None, None]]
"""``batches(step)`` yields this rank's rows of every global batch from a step on: a pure function of the step.

Who iterates closes the generator: processes that read the data end with it.
"""
Evaluate = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Looks:
    """When a training is evaluated: at its end and every so many steps; ``best`` is where `watch` was highest."""

    evaluate: Evaluate | None
    every: int = 0
    watch: str = "accuracy"
    keep_best: bool = True


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
    info: Callable[[str], None] = lambda text: None


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
    keep_best: bool = True,
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
        keep_best: whether the weights with the best metric are saved, as ``best``.

    Raises:
        NonFiniteError: loss or gradient norm is NaN or infinite; before the optimizer step.
        OutOfMemoryError: one row does not fit.
        StoppedError: a signal asked to stop; the state is saved.
    """
    if training.batch_size % world.size:
        refuse_batch(training.batch_size, world.size)
    looks = Looks(evaluate, evaluate_every, watch, keep_best)
    loop = _Loop(model, loss_fn, training, runtime, world, outputs, micro, looks)
    start, due = loop.resume()
    if world.size > 1:
        with closing(batches(start)) as stream:
            loop.gradients.probe(next(stream))
    steps, schedule = training.schedule.steps, training.schedule
    result = FitResult(start, math.nan, 0.0, 0.0, micro.size)
    log_every = max(1, steps // 50)
    began = time.perf_counter()
    if due:
        result.metrics = loop.look(start)
    with closing(batches(start)) as stream:
        batch = loop.fetch(stream, result) if start < steps else None
        for step in range(start, steps):
            if (number := stopping.requested()) is not None:
                loop.save("last", step)
                raise StoppedError(number)
            assert batch is not None, f"the batches ended before step {step}"
            last = step + 1 == steps
            lr = training.lr * lr_factor(schedule, step)
            pending = loop.gradients.backward(batch, step)
            # A GPU is still busy with the gradients: the next batch is made meanwhile.
            batch = None if last else loop.fetch(stream, result)
            result.loss, norm = loop.update(pending, step, lr)
            result.steps, result.seconds = step + 1, time.perf_counter() - began
            if last or (step + 1) % log_every == 0:
                loop.report(result, lr, norm, (step + 1 - start) * training.batch_size)
            if evaluate and (last or (evaluate_every and (step + 1) % evaluate_every == 0)):
                result.metrics = loop.look(step + 1)
            elif not last and (step + 1) % runtime.checkpoint_every == 0:
                loop.save("last", step + 1)
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
        looks: Looks,
    ) -> None:
        self.model, self.training, self.runtime = model, training, runtime
        self.world, self.outputs, self.looks = world, outputs, looks
        self.best = -math.inf
        self.network = unwrap(model)
        self.optimizer = build_optimizer(self.network.named_parameters(), training.optim, training.lr)
        self.gradients = Gradients(
            model,
            self.network,
            loss_fn,
            lambda: precision_of(runtime, world.device),
            training.seed,
            training.optim.clip_norm,
            world,
            micro,
            outputs.warn,
        )
        self.ema = Ema(self.network, training.ema) if training.ema else None
        self.model.train()

    def resume(self) -> tuple[int, bool]:
        """Restore the last checkpoint; returns its step (0 without one), and whether it has to be evaluated."""
        saved = self.outputs.checkpoints.load("last", self.outputs.warn) if self.outputs.checkpoints else None
        state: dict[str, Any] = saved[1] if saved else {"step": 0, "best": None}
        step, due = int(state["step"]), bool(state.get("due"))
        self.best = -math.inf if state["best"] is None else state["best"]
        if saved:
            restore(self.network, self.optimizer, self.ema, *saved)
            self.outputs.info(f"continues after step {step} of {self.training.schedule.steps}, which was saved last")
        if self.outputs.log and self.world.leads:
            self.outputs.log.truncate(step, evaluated=not due)
            if lost := self.outputs.log.note_lost(step, state.get("records", 0)):
                path = self.outputs.log.path
                self.outputs.warn(f"{path}: {lost} records up to step {step} are gone, and this run's curve lacks them")
        return step, due

    def save(self, name: str, step: int, *, due: bool = False) -> None:
        """Save the state after `step` steps; with `due` it has yet to be evaluated."""
        if self.outputs.checkpoints and self.world.leads:
            tensors, groups = state_of(self.network, self.optimizer, self.ema)
            best = self.best if math.isfinite(self.best) else None
            records = self.outputs.log.count() if self.outputs.log else 0
            state = {"step": step, "best": best, "groups": groups, "due": due, "records": records}
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

    def look(self, step: int) -> dict[str, float]:
        """Evaluate and log; on the way, what a signal during the evaluation would lose is saved, and the best."""
        evaluate, watch = self.looks.evaluate, self.looks.watch
        assert evaluate
        if self.looks.every:
            self.save("last", step, due=True)
        self.model.eval()
        averaged = self.ema.applied() if self.ema else nullcontext()
        with averaged, torch.inference_mode(), precision_of(self.runtime, self.world.device):
            metrics = evaluate()
        self.model.train()
        if self.outputs.log and self.world.leads:
            self.outputs.log.write({"step": step, **metrics})
        if self.looks.every and metrics[watch] > self.best:
            self.best = metrics[watch]
            if self.looks.keep_best:
                self.save("best", step)
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
