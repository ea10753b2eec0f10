"""`dry_run_fit`: a few steps of a training on one batch, which tell what it takes and whether it can be resumed."""

from __future__ import annotations

import gc
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpn_cli.config.cost import Cost
from dpn_cli.engine.fit import Batch, Outputs, TrainJob, fit
from dpn_cli.engine.fsdp import gather_tensors
from dpn_cli.errors import DpnError, SaveError
from dpn_cli.run.checkpoints import Checkpoints, Empty, State
from dpn_cli.run.console import print_message
from dpn_cli.run.cores import cores, other_programs_seconds
from dpn_cli.run.distributed import World, barrier, from_all, from_leader, max_over_ranks, run_on_leader
from dpn_cli.run.precision import precision_of
from dpn_cli.weights.backbone import Backbone

# One step warms up and two are timed; the state is saved after those, and the last step is taken again from there.
STEPS, SAVED = 4, 3
# How far that step may end from where it ended first, in lengths of the step, where sums have no fixed order.
TOLERANCE = 0.5
# States on the disk at once: the last one, the one before it, and one that is being written; of the best one two more.
STATES, BEST_STATES = 3, 2
CANNOT = "--dry-run: a resumed training would not continue as the uninterrupted one"
NEXT = "please report it, with the output of 'dpn doctor'; a training that nothing interrupts is not concerned"
# Cores used by other programs from which the seconds of a dry run are no forecast.
BUSY = 0.25
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Sampled:
    """The evaluation of a few images, which stands for all evaluations of a training.

    Args:
        images: how many they are.
        evaluate: loads and scores them, with the network in eval mode.
        load: loads them only; both do so in this process.
        during: the images of one evaluation on the way.
        end: the images that are scored when the training has ended.
    """

    images: int
    evaluate: Callable[[], object]
    load: Callable[[], object] = lambda: None
    during: int = 0
    end: int = 0


@dataclass(frozen=True)
class DryRunSetup:
    """A training at its start: its network as `prepare` returns it, its job, and its evaluation.

    The job's batches are loaded in this process; those of the training by as many `workers`, where it is not 0.
    """

    model: nn.Module
    job: TrainJob
    sampled: Sampled = Sampled(1, lambda: None)
    workers: int = 0


@dataclass(frozen=True)
class _Measured:
    """Cost of the first steps: seconds of this rank, and bytes."""

    load_seconds: float
    step: float
    evaluation_loading: float
    evaluation: float
    memory: int


def dry_run_fit(build_setup: Callable[[], DryRunSetup], name: str, run_folder: Path, *, weights: int) -> Cost:
    """Train a few steps on one batch, evaluate, save, load into a new start, and go on; returns what a training takes.

    `begin` makes the training at its start, each time anew. States are written to a folder on the disk of the run's
    folder `next to`, and deleted. `weights` are the bytes that a training leaves. All ranks call it.

    Raises:
        SaveError: the state cannot be written or loaded, or the step after it does not end where it did before: on a
            CPU bit for bit, elsewhere up to the order of sums.
        DpnError: what `fit` raises, and where nothing can be written.
    """
    print_message(f"dry run of {name}: {STEPS} steps on one batch, then an evaluation")
    start_time, others = time.perf_counter(), other_programs_seconds()
    scene = build_setup()
    job, world, workers, scored = scene.job, scene.job.world, scene.workers, scene.sampled.images
    print_message(f"dry run of {name}: in {precision_of(job.runtime, world.device, scene.model)}")
    steps, states, evaluated = job.schedule.steps, _states(job), _count_evaluated(job, scene.sampled)
    with _scratch(run_folder, world) as scratch:
        with closing(job.batches(0)) as stream:
            load_time = time.perf_counter()
            batch = next(stream)
            load_seconds = time.perf_counter() - load_time
        measured = _measure_first_steps(scene, batch, Checkpoints(scratch), load_seconds)
        state = from_leader(sum(file.stat().st_size for file in (scratch / "last").iterdir()))
        if world.size == 1:  # other ranks are no other programs
            _describe_load(time.perf_counter() - start_time, others)
        print_message(f"dry run of {name}: the state is saved; a second start continues from it")
        del scene, job
        gc.collect()  # a GPU may not hold two networks
        _check_resume(build_setup(), batch, scratch)
    step = with_loading(measured.step, measured.load_seconds, workers)
    evaluation = with_loading(measured.evaluation, measured.evaluation_loading, workers)
    return Cost(
        name=name,
        memory=max_over_ranks(measured.memory),
        step_seconds=max(from_all(step)),
        steps=steps,
        trainings=1,
        evaluation_seconds=max(from_all(evaluation)) * evaluated / scored,
        kept=weights,
        passing=states * state,
    )


def _describe_load(seconds: float, others_before: float | None) -> None:
    """Say where other programs took much of this machine while the seconds of a dry run were measured."""
    if others_before is None or (others_after := other_programs_seconds()) is None:
        return
    used = (others_after - others_before) / seconds
    if used > BUSY:
        print_message(
            f"the machine is busy: other programs use {used:.1f} of {len(cores())} cores, so a step and an evaluation "
            "take longer now than they would alone"
        )


def summarize_network(network: Backbone) -> tuple[str, int]:
    """Return the name of a network in a table of costs, and the bytes of its weights."""
    return f"{network.config.arch} {network.config.stem}", 4 * network.report.parameters


def _states(job: TrainJob) -> int:
    """Return the largest number of states of a training on the disk."""
    return STATES + (BEST_STATES if job.evaluate_every and job.keep_best else 0)


def _count_evaluated(job: TrainJob, sampled: Sampled) -> int:
    """Return the number of images that a training evaluates."""
    interval = job.evaluate_every
    evaluations = -(-job.schedule.steps // interval) if interval else int(job.evaluate is not None)
    return evaluations * sampled.during + sampled.end


@contextmanager
def loaded_alone(workers: int) -> Iterator[None]:
    """Let this process load in one thread, as each of some workers does; in all of its threads without workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if workers else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_loading(computing: float, load_seconds: float, workers: int) -> float:
    """Return the seconds of what is loaded by this process, or by workers while something else is computed."""
    return max(computing, load_seconds / workers) if workers else computing + load_seconds


def _measure_first_steps(scene: DryRunSetup, batch: Batch, saved: Checkpoints, load_seconds: float) -> _Measured:
    """Train for the first time, with the state before the last step and the one behind it saved."""
    ticks, seconds, sampled = list[float](), [0.0, 0.0, 0.0], scene.sampled
    device = scene.job.world.device

    def load() -> None:
        with loaded_alone(scene.workers):
            sampled.load()

    def evaluate() -> dict[str, float]:
        sampled.evaluate()  # what is imported and compiled then does not count
        for index, work in enumerate((load, sampled.load, sampled.evaluate)):
            start_time = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[index] = time.perf_counter() - start_time
        return {}

    outputs = replace(scene.job.outputs, checkpoints=saved, log=None, tick=lambda _: ticks.append(time.perf_counter()))
    _forget_peak(device)
    fit(scene.model, _shorten_job(scene.job, batch, outputs, evaluate))
    step = (ticks[SAVED - 1] - ticks[0]) / (SAVED - 1)
    return _Measured(load_seconds, step, seconds[0], max(0.0, seconds[2] - seconds[1]), _peak(device))


def _check_resume(scene: DryRunSetup, batch: Batch, scratch: Path) -> None:
    """Take the last step again from the state before it, in a training that begins anew. Raises `SaveError`."""
    world = scene.job.world
    resumed = _Resumed(scratch)
    outputs = replace(scene.job.outputs, checkpoints=resumed, log=None, tick=lambda _: None)
    try:
        fit(scene.model, _shorten_job(scene.job, batch, outputs, dict))
    except (KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise
        raise SaveError(f"{CANNOT}; what was saved does not fit the training ({_line(error)}); {NEXT}") from error
    differences = from_leader(resumed.differences)
    bound = 0.0 if world.device.type == "cpu" else TOLERANCE
    if deviations := [
        f"{part} by {distance:.3g} of a step" for part, distance in differences.items() if not distance <= bound
    ]:
        raise SaveError(f"{CANNOT}; it ends elsewhere: {', '.join(deviations)}; {NEXT}")


def _shorten_job(job: TrainJob, batch: Batch, outputs: Outputs, evaluate: Callable[[], dict[str, float]]) -> TrainJob:
    """Return a job of a few steps on one batch, which saves before the last of them and evaluates at the end."""

    def repeated(start: int) -> Generator[Batch, None, None]:
        for _ in range(start, STEPS):
            yield batch

    return replace(
        job,
        batches=repeated,
        schedule=job.schedule.model_copy(update={"steps": STEPS, "warmup": 0, "decay_from": None}),
        runtime=job.runtime.model_copy(update={"checkpoint_every": SAVED}),
        evaluate=evaluate,
        evaluate_every=STEPS,  # the state is saved before it
        keep_best=False,
        outputs=outputs,
    )


class _Resumed(Checkpoints):
    """Gives the training the state before the last one, and compares what it would save with the last one: `off`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.differences = {"nothing was saved, all": torch.inf}

    def load(self, name: str, warn: Callable[[str], None], empty: Empty | None = None) -> State | None:
        """Return the state before the last one."""
        return super().load(f"{name}.previous", warn, empty)

    def save(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Compare the tensors with the ones saved as `name`."""
        previous, last = (super(_Resumed, self).load(state_name, print) for state_name in (f"{name}.previous", name))
        assert previous
        assert last
        self.differences = distances(
            previous[0], last[0], {key: tensor.detach().cpu() for key, tensor in tensors.items()}
        )

    def save_parts(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World) -> None:
        """Compare whole tensors, which all ranks put together."""
        self.save(name, dict(gather_tensors(tensors)), state)


def distances(
    previous: Mapping[str, Tensor], last: Mapping[str, Tensor], current: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the distance of `current` from `last`, relative to that of `last` from `previous`, by part of the state.

    Parts are the weights, their average, and each sum of the optimizer; only those that differ are returned.
    """
    differences, changes = dict[str, float](), dict[str, float]()
    for name in last.keys() | current.keys():
        part = re.sub(r"^(optim)\.\d+|^(model|ema)\..*", r"\1\2", name)
        if name not in last or name not in current or last[name].shape != current[name].shape:
            differences[part] = torch.inf
        elif not torch.equal(last[name], current[name]):
            differences[part] = differences.get(part, 0.0) + _square(last[name], current[name])
        if name in last and name in previous:
            changes[part] = changes.get(part, 0.0) + _square(last[name], previous[name])
    return {
        part: (square / changes[part]) ** 0.5 if changes.get(part) else torch.inf
        for part, square in differences.items()
    }


def _square(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor.double() - reference.double()).square().sum())


@contextmanager
def _scratch(run_folder: Path, world: World) -> Iterator[Path]:
    """Yield a new folder next to a run's folder, on all ranks, and delete it at the end. Raises `DpnError`."""

    def make() -> Path:
        existing_folder = next(folder for folder in run_folder.absolute().parents if folder.is_dir())
        try:
            return Path(tempfile.mkdtemp(prefix=".dpn-dry-run-", dir=existing_folder))
        except OSError as error:
            raise DpnError(
                f"-o {run_folder}: nothing can be written to {existing_folder} ({error.strerror}); pass another"
            ) from error

    path = run_on_leader(world, make)
    try:
        yield path
        barrier()
    finally:
        if world.leads:
            shutil.rmtree(path, ignore_errors=True)


def _forget_peak(device: torch.device) -> None:
    """Reset the peak of memory to the current use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            CLEAR.write_text("5")  # proc(5): resets the peak of the resident memory


def _peak(device: torch.device) -> int:
    """Return the peak of the memory in bytes: of the allocator on a GPU, else what of this process is resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        if match := re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text("utf-8"), re.MULTILINE):
            return 1024 * int(match[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
