"""`fit`: the one training loop of all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpn_cli.config.schema import Runtime
from dpn_cli.config.training import NORM_AVERAGE_STEPS
from dpn_cli.engine.cross_batch_loss import CrossBatchLoss
from dpn_cli.engine.fsdp import ShardedModel, gather_tensors
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.engine.nan_guard import FiniteCheck
from dpn_cli.engine.optim import build_optimizer, lr_factor, set_lr
from dpn_cli.engine.state import Ema, empty_state, restore, state_of
from dpn_cli.engine.step_rate import StepRate
from dpn_cli.engine.trainer_args import Batch as Batch
from dpn_cli.engine.trainer_args import Batches as Batches
from dpn_cli.engine.trainer_args import FitResult as FitResult
from dpn_cli.engine.trainer_args import LossFn as LossFn
from dpn_cli.engine.trainer_args import Outputs as Outputs
from dpn_cli.engine.trainer_args import TrainJob as TrainJob
from dpn_cli.errors import DpnError, StoppedError, WorkerError
from dpn_cli.model.norms import has_running_norms
from dpn_cli.run import distributed, signals
from dpn_cli.run.console import ProgressTick
from dpn_cli.run.distributed import World
from dpn_cli.run.gpu_share import MEASURED_STEPS, measure
from dpn_cli.run.precision import autocast

# What a checkpoint calls the sums of the norms of layers.
NORMS = "norms.sums"


def fit(model: nn.Module, job: TrainJob) -> FitResult:
    """Train `model`, which `prepare` returned, in place; evaluate it at the end, and every `evaluate_every` steps.

    A resumed training ends as an uninterrupted one, on a CPU bit for bit. The global batch never changes: when memory
    runs out, the micro-batch halves.

    Raises:
        DpnError: the ranks are more than the batch has rows, or do not divide it where a row depends on others.
        NonFiniteError: loss or gradient norm is NaN or infinite; the optimizer's step was not taken.
        OutOfMemoryError: one row does not fit into memory.
        StoppedError: a signal asked to stop; the state is saved.
        WorkerError: another rank has ended; the state is saved unless it was sharded.
    """
    check_batch_size(model, job)
    training = _Training(model, job)
    with training.reallocating_at_end():
        start, unevaluated = training.resume()
        if (
            job.world.size > 1 and not training.sharded_model
        ):  # the ranks of a sharded network compute every pass together
            with closing(job.batches(start)) as stream:
                training.gradients.find_micro_batch(next(stream))
        steps, result = job.schedule.steps, training.start_clock(start)
        log_every = max(1, steps // 50)
        if unevaluated:
            result.metrics = training.evaluate(start)
        with closing(job.batches(start)) as stream:
            batch = training.fetch(stream, result) if start < steps else None
            for step in range(start, steps):
                with training.saving_on_lost_rank(step):
                    signal_number = signals.requested_signal()
                if signal_number is not None:
                    training.save("last", step)
                    raise StoppedError(signal_number)
                assert batch is not None, f"the batches ended before step {step}"
                last = step + 1 == steps
                lr = job.lr * lr_factor(job.schedule, step)
                logged = (
                    last or (step + 1) % log_every == 0 or (job.layer_norms and step + 1 == steps - NORM_AVERAGE_STEPS)
                )
                with training.saving_on_lost_rank(step):
                    pending = training.gradients.compute(batch, step, logged=logged)
                # Load the next batch while a GPU is still busy with the gradients.
                batch = None if last else training.fetch(stream, result)
                result.loss, *norms = training.update(pending, step, lr, now=logged)
                result.steps, result.seconds = step + 1, training.seconds()
                if last or step + 1 - start == MEASURED_STEPS:
                    measure(job.world.device)
                tick = training.tick(result, lr, logged=logged)
                if logged:
                    training.log(tick, norms)
                if job.evaluate and (last or (job.evaluate_every and (step + 1) % job.evaluate_every == 0)):
                    result.metrics = training.evaluate(step + 1)
                elif not last and (step + 1) % job.runtime.checkpoint_every == 0:
                    training.save("last", step + 1)
        result.micro_batch = training.micro_batch.size
        training.load_final_weights()
    return result


def check_batch_size(model: nn.Module, job: TrainJob) -> None:
    """Raise `DpnError` unless every rank has rows of a batch, and equally many if rows depend on each other."""
    coupled = isinstance(job.loss_fn, CrossBatchLoss) or has_running_norms(model)
    if job.batch_size < job.world.size or (coupled and job.batch_size % job.world.size):
        refuse_batch(job.batch_size, job.world.size)


def refuse_batch(batch_size: int, ranks: int) -> NoReturn:
    """Raise the `DpnError` for a batch that is too small for the ranks, or that they do not divide."""
    if batch_size < ranks:
        raise DpnError(f"--batch-size {batch_size}: less than one for each of the {ranks} ranks; use {ranks} at least")
    raise DpnError(f"--batch-size {batch_size}: not divisible by the {ranks} ranks; use {batch_size // ranks * ranks}")


def prepare(model: nn.Module, runtime: Runtime, world: World) -> nn.Module:
    """Return `model` compiled, and wrapped in DDP or FSDP; training changes the weights of `model` itself.

    Call it once for several trainings: the compiled step is reused.
    """
    model.to(world.device)
    if runtime.shard:
        return ShardedModel(model, runtime, world)
    compiled = torch.compile(model) if runtime.compile else model
    return distributed.parallel(compiled, world)  # type: ignore[arg-type]  # torch.compile keeps an nn.Module one


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network that `prepare` wrapped."""
    if isinstance(model, ShardedModel):
        return model.unsharded
    if isinstance(model, DistributedDataParallel):
        model = model.module
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


class _Training:
    """The state of one training between two steps, and the parts of a step that `fit` calls."""

    def __init__(self, model: nn.Module, job: TrainJob) -> None:
        self.model, self.job = model, job
        self.sharded_model = model if isinstance(model, ShardedModel) else None
        self.network = self.sharded_model.network if self.sharded_model else unwrap(model)
        self.best = -math.inf
        self.start_time = 0.0
        self.rate = StepRate()
        rows = job.world.most(job.batch_size)
        self.micro_batch = job.micro_batch or MicroBatch.choose(job.runtime, rows, self.network, job.world.device)
        self.result = FitResult(0, math.nan, 0.0, 0.0, self.micro_batch.size)
        if self.sharded_model:
            self.sharded_model.shard()
        self.optimizer = build_optimizer(self.network.named_parameters(), job.optim, job.lr)
        # torch's fused step for sharded gradients does not check `found_inf`.
        self.finite = FiniteCheck(self.optimizer, late=job.world.device.type == "cuda" and not self.sharded_model)
        self.gradients = Gradients(model, self.network, job, self.micro_batch)
        self.ema = Ema(self.network, job.ema_decay) if job.ema_decay else None
        self.model.train()

    @contextmanager
    def reallocating_at_end(self) -> Iterator[None]:
        """Give an unsharded network its weights back after the block, however it ends."""
        try:
            yield
        finally:
            if self.sharded_model:
                self.sharded_model.reallocate()

    @property
    def eval_weights(self) -> dict[str, Tensor]:
        """The weights by name that are evaluated and saved: the moving average if there is one."""
        return self.ema.average if self.ema else self.network.state_dict()

    def load_final_weights(self) -> None:
        """Load the trained weights, or their average, into the network."""
        if self.sharded_model:
            self.sharded_model.gather(self.eval_weights)
        elif self.ema:
            self.network.load_state_dict(self.ema.average)

    def resume(self) -> tuple[int, bool]:
        """Restore the last checkpoint; returns its step (0 without one), and whether it still has to be evaluated."""
        outputs = self.job.outputs
        empty = empty_state(self.network, self.optimizer, self.ema) if self.sharded_model else None
        saved = outputs.checkpoints.load("last", outputs.warn, empty) if outputs.checkpoints else None
        state: dict[str, Any] = saved[1] if saved else {"step": 0, "best": None}
        step, pending_eval = int(state["step"]), bool(state.get("due"))
        self.best = -math.inf if state["best"] is None else state["best"]
        self.micro_batch.shrink_to(state.get("micro_batch"))
        self.result.earlier = state.get("seconds", 0.0), state.get("wait_seconds", 0.0)
        if saved:
            restore(self.network, self.optimizer, self.ema, *saved)
            self.gradients.loss_sum += state.get("loss_sum", 0.0)
            self.gradients.loss_steps = int(state.get("loss_steps", 0))
            if self.gradients.layer_grad_norms and NORMS in saved[0]:
                self.gradients.layer_grad_norms.restore(saved[0][NORMS], int(state["norm_steps"]))
            outputs.info(f"continues after step {step} of {self.job.schedule.steps}, the last one saved")
        if outputs.log and self.job.world.leads:
            outputs.log.truncate(step, evaluated=not pending_eval)
            if missing := outputs.log.record_lost(step, state.get("records", 0)):
                path = outputs.log.path
                outputs.warn(f"{path}: {missing} records up to step {step} are gone, and this run's curve lacks them")
        return step, pending_eval

    def start_clock(self, step: int) -> FitResult:
        """Start the clock after `step` steps; returns the result of earlier sessions."""
        result = self.result
        result.steps, result.micro_batch = step, self.micro_batch.size
        result.seconds, result.wait_seconds = result.earlier
        self.start_time = time.perf_counter() - result.seconds
        self.rate.restart(result.seconds, step)
        return result

    def seconds(self) -> float:
        """Return the seconds of this session and of earlier ones."""
        return time.perf_counter() - self.start_time

    @contextmanager
    def saving_on_lost_rank(self, step: int) -> Iterator[None]:
        """Save the state after `step` steps if another rank is lost inside the block.

        Rank 0 has the full state, unless the network is sharded, or its running norms have seen part of the next batch.
        Only the next mean of the loss in the log then lacks the other rank's rows.
        """
        try:
            with distributed.detect_lost_rank():
                yield
        except WorkerError:
            if not (self.sharded_model or has_running_norms(self.network)):
                self._write("last", step)
            raise

    def save(self, name: str, step: int, *, pending_eval: bool = False) -> None:
        """Save the state after `step` steps; with `pending_eval` it still has to be evaluated."""
        if self.job.outputs.checkpoints:
            self.gradients.share_loss_sum()
        self._write(name, step, pending_eval=pending_eval)
        distributed.barrier()

    def _write(self, name: str, step: int, *, pending_eval: bool = False) -> None:
        """Save this rank's shard of the state; without shards rank 0 saves all of it."""
        self.finite.confirm()
        outputs, world = self.job.outputs, self.job.world
        sharded = (
            self.sharded_model is not None and name == "last"
        )  # the best weights are saved unsharded, for any reader
        if outputs.checkpoints and (world.leads or self.sharded_model):
            tensors, groups = state_of(self.network, self.optimizer, self.ema)
            if self.sharded_model and not sharded:
                tensors = {
                    f"model.{key}": tensor.cpu() for key, tensor in gather_tensors(self.eval_weights) if world.leads
                }
            best = self.best if math.isfinite(self.best) else None
            records = outputs.log.count() if outputs.log else 0
            state = {"step": step, "best": best, "groups": groups, "due": pending_eval, "records": records}
            state["micro_batch"] = self.micro_batch.size if self.micro_batch.shrunk else None
            state |= {"seconds": self.seconds(), "wait_seconds": self.result.wait_seconds}
            state |= {"loss_sum": self.gradients.loss_sum.item(), "loss_steps": self.gradients.loss_steps}
            if layers := self.gradients.layer_grad_norms:
                tensors[NORMS], state["norm_steps"] = layers.sums, layers.steps
            if sharded:
                outputs.checkpoints.save_parts(name, tensors, state, world)
            elif world.leads:
                outputs.checkpoints.save(name, tensors, state)

    def fetch(self, stream: Iterator[Batch], result: FitResult) -> Batch | None:
        """Return the next batch; the time counts as waiting unless a GPU was busy meanwhile."""
        event = None
        if self.job.world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        start_time = time.perf_counter()
        batch = next(stream, None)
        if event is None or event.query():  # type: ignore[no-untyped-call]
            result.wait_seconds += time.perf_counter() - start_time
        return batch

    def update(self, pending: Tensor, step: int, lr: float, *, now: bool) -> list[float]:
        """Take the optimizer step if loss and gradient norm are finite; returns both, and the norms of layers.

        On a GPU returns the values that were read last, unless `now`.
        """
        values = self.finite.read(pending, step, now=now)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(self.network, step)
        return values

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, log, and save the weights if they are the best; returns the metrics.

        The state is saved first, because a signal during the evaluation would lose it.
        """
        job, evaluate = self.job, self.job.evaluate
        assert evaluate
        if job.evaluate_every:
            self.save("last", step, pending_eval=True)
        self.model.eval()
        eval_context: AbstractContextManager[None] = self.ema.applied(self.network) if self.ema else nullcontext()
        if self.sharded_model:
            eval_context = self.sharded_model.evaluating(self.eval_weights)
        with eval_context, torch.inference_mode(), autocast(job.runtime, job.world.device, self.network):
            metrics = evaluate()
        self.model.train()
        self.rate.restart(self.seconds(), step)
        if job.outputs.log and job.world.leads:
            job.outputs.log.write({"step": step, **metrics})
        if job.keep_best and job.evaluate_every and metrics[job.monitor] > self.best:
            self.best = metrics[job.monitor]
            self.save("best", step)
        return metrics

    def tick(self, result: FitResult, lr: float, *, logged: bool) -> ProgressTick:
        """Show the state after a step. It does not communicate."""
        steps, (earlier_seconds, earlier_wait_seconds) = self.job.schedule.steps, result.earlier
        step_seconds = self.rate.seconds_per_step(result.seconds, result.steps)
        tick = ProgressTick(
            step=result.steps,
            steps=steps,
            loss=result.loss,
            lr=lr,
            images_per_second=self.job.batch_size / step_seconds,
            wait_share=(result.wait_seconds - earlier_wait_seconds) / (result.seconds - earlier_seconds),
            seconds_left=(steps - result.steps) * step_seconds,
            logged=logged,
        )
        self.job.outputs.tick(tick)
        return tick

    def log(self, tick: ProgressTick, norms: list[float]) -> None:
        """Log the state after a step, with the gradient's norm, then those of layers."""
        log, layers = self.job.outputs.log, self.gradients.layer_grad_norms
        by_layer = {"layer_norms": layers.by_layer(norms[1:]), "layer_norms_steps": layers.mean_steps} if layers else {}
        if log and self.job.world.leads:
            log.write(
                {
                    "step": tick.step,
                    "loss": tick.loss,
                    "lr": tick.lr,
                    "grad_norm": norms[0],
                    "images_per_second": round(tick.images_per_second, 2),
                    "wait_share": round(tick.wait_share, 5),
                    **self.job.gauges(),
                    **by_layer,
                }
            )
