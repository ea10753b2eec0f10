"""Worker processes end with the block that uses them, whatever ends it, and their death is one clear error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, dataloader

from dpn_cli import metrics
from dpn_cli.data import workers
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.pixels import PixelSet, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.workers import open_loader, watch_processes
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch
from dpn_cli.errors import NonFiniteError, StoppedError, WorkerError
from dpn_cli.run import signals
from dpn_cli.run.distributed import World
from support.engine import loss_fn, make_job, random_batches, small_vit
from support.images import write_class_folders
from support.time_limits import wait_for_error

ALONE = World(0, 1, torch.device("cpu"))

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


class Stuck(Numbers):
    """Reads the first numbers and then waits for ever, as from a disk that has gone."""

    def __getitem__(self, index: int) -> int:
        if index > 1:
            multiprocessing.Event().wait()
        return index


def test_a_death_is_reported_after_another_thread_took_its_exit_code() -> None:
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    _, status = os.waitpid(process.pid, 0)  # as the thread of a process pool does
    popen = process._popen  # type: ignore[attr-defined]  # where that thread writes the exit code down
    late = threading.Timer(0.1, lambda: setattr(popen, "returncode", os.waitstatus_to_exitcode(status)))
    late.start()
    with pytest.raises(WorkerError, match=f"process {process.pid} was killed by SIGKILL"), watch_processes([process]):
        raise RuntimeError("the pool is broken")
    late.join()


def only_one() -> multiprocessing.process.BaseProcess:
    (worker,) = multiprocessing.active_children()
    return worker


def test_workers_end_with_the_block_though_its_iterator_lives_on() -> None:
    with open_loader(Numbers(), 2, batch_size=10) as items:
        assert next(items).tolist() == list(range(10))
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_workers_end_with_an_exception_though_its_traceback_lives_on() -> None:
    def broken() -> None:
        with open_loader(Numbers(), 2, batch_size=10) as items:
            next(items)
            raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        broken()
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()


def test_a_worker_that_does_not_come_back_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    with open_loader(Stuck(), 1, batch_size=2) as items:
        next(items)
        process = only_one()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("reading", [False, True])
def test_the_death_of_a_worker_is_one_error_that_names_it(reading: bool) -> None:
    pids: list[int | None] = []

    def work() -> None:
        with open_loader(Stuck(), 1, batch_size=2) as items:
            next(items)
            pids.append(only_one().pid)
            only_one().kill()
            next(items) if reading else wait_for_error()

    with pytest.raises(WorkerError) as caught:
        work()
    assert re.search(rf"process {pids[0]} was killed by SIGKILL: .* use a smaller -j", str(caught.value))
    assert not multiprocessing.active_children()


def test_the_death_of_a_worker_is_reported_while_the_workers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(items: Any) -> None:
        items._workers[1].kill()
        # The signal of its death has come: torch's handler raises an error, ours leaves it for later.
        os.waitid(os.P_PID, items._workers[1].pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_try_put_index", begin)
    with pytest.raises(WorkerError, match="killed by SIGKILL"), open_loader(Numbers(), 2, batch_size=2):
        pass
    assert not multiprocessing.active_children()


def test_the_death_of_a_worker_is_not_reported_while_another_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is raised in a function that is called at a fork is printed, and dropped."""
    start = BaseProcess.start

    def begin(process: BaseProcess) -> None:
        others = multiprocessing.active_children()
        for other in others:
            other.kill()
            os.waitid(os.P_PID, other.pid or 0, os.WEXITED | os.WNOWAIT)  # the signal of its death has come
        start(process)
        started.append(len(others))

    started: list[int] = []
    monkeypatch.setattr(BaseProcess, "start", begin)
    with pytest.raises(WorkerError, match="killed by SIGKILL"), open_loader(Numbers(), 2, batch_size=2):
        pass
    assert started == [0, 1]


@pytest.mark.parametrize(
    "error", [RuntimeError("DataLoader worker (pid(s) 1234) exited unexpectedly"), ConnectionResetError(), EOFError()]
)
def test_the_death_of_a_worker_is_reported_behind_another_error(error: Exception) -> None:
    def work() -> None:
        with open_loader(Numbers(), 1, batch_size=2):
            with suppress(WorkerError):
                only_one().kill()
                wait_for_error()
            raise error

    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        work()


def test_unrelated_errors_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "DYING", 0)
    with pytest.raises(RuntimeError, match="of something else"), open_loader(Numbers(), 1, batch_size=2):
        raise RuntimeError("of something else")


def test_without_workers_an_error_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(processes: list[int], seconds: float) -> list[int]:
        waited.append(seconds)
        return []

    monkeypatch.setattr(workers, "wait", wait)
    with pytest.raises(RuntimeError, match="of something else"), open_loader(Numbers(), 0, batch_size=2):
        raise RuntimeError("of something else")
    assert waited == [0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-signal.SIGBUS, "process 12 was killed by SIGBUS: shared memory"),
        (-signal.SIGSEGV, "process 12 was killed by SIGSEGV: -j 0"),
        (3, "process 12 ended with exit code 3; -j 0"),
    ],
)
def test_the_cause_of_a_workers_death_is_reported(code: int, message: str) -> None:
    assert message in workers._cause_of_death(12, code)


def test_a_dead_worker_ends_a_run_and_an_evaluation_with_one_line() -> None:
    for then, message in ((None, "dead; .*--resume"), (signals.NO_RESULT, "dead; no result was written")):
        with pytest.raises(WorkerError, match=message), signals.listen(*[then] if then else []):
            raise WorkerError("dead")
    assert WorkerError.exit_code == 1


def test_every_stream_of_the_data_closes(tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path, classes=2, each=8))
    with stream(split, lambda pixels: resize(pixels, (8, 8)), 2, workers=1) as parts:
        assert len(next(parts).images) == 2
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
    with closing(crop_batches(split, Augmentation((8, 8)), 4, 0, ALONE, workers=1)(0)) as batches:
        next(batches)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("invalid", [False, True])
def test_scoring_leaves_no_worker(invalid: bool, tmp_path: Path) -> None:
    split = ClassFolders(write_class_folders(tmp_path, classes=2, each=8))

    def logits(images: Tensor) -> Tensor:
        if invalid:
            raise ValueError
        return torch.randn(len(images), 2)

    with suppress(ValueError):
        metrics.score(
            logits, split, lambda pixels: resize(pixels, (8, 8)), 2, ALONE, loss="softmax", batch_size=4, workers=2
        )
    assert not multiprocessing.active_children()


def test_a_score_of_other_images_than_the_splits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = ClassFolders(write_class_folders(tmp_path, classes=2, each=4))

    def short(*arguments: object, **more: object) -> Generator[PixelSet, None, None]:
        yield PixelSet(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(metrics, "stream", lambda *arguments, **more: closing(short()))
    with pytest.raises(RuntimeError, match="3 images were scored .* but the split has 8"):
        metrics.score(
            lambda images: torch.zeros(len(images), 2),
            split,
            lambda pixels: resize(pixels, (8, 8)),
            2,
            ALONE,
            loss="softmax",
            batch_size=4,
        )


@pytest.mark.parametrize("options", ["to the end", "two ranks", "broken", "not finite", "stopped"])
def test_a_training_closes_its_batches(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[Generator[Batch, None, None]](), list[int]()

    def noted() -> Generator[Batch, None, None]:
        try:
            yield from random_batches()(0)
        finally:
            closed.append(len(opened))

    def batches(start: int) -> Generator[Batch, None, None]:
        opened.append(noted())  # alive for as long as the test is
        return opened[-1]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if options == "broken":
            raise ValueError
        return loss_fn(model, batch) * (float("nan") if options == "not finite" else 1)

    if options == "stopped":
        calls = iter([None, None, signal.SIGTERM])
        monkeypatch.setattr(signals, "requested_signal", lambda: next(calls))
    world = World(0, 2, ALONE.device) if options == "two ranks" else ALONE
    with suppress(ValueError, NonFiniteError, StoppedError):
        engine.fit(small_vit(), make_job(4, loss_fn=loss, batches=batches, world=world))
    assert len(closed) == len(opened) == (2 if options == "two ranks" else 1)


def test_a_stop_reaches_the_other_ranks_as_it_is() -> None:
    error = pickle.loads(pickle.dumps(StoppedError(signal.SIGTERM, "no result")))
    assert (str(error), error.signal_number, error.exit_code) == ("stopped by SIGTERM; no result", signal.SIGTERM, 75)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_lost_terminal_stops_programs_started_without_nohup(nohup: bool) -> None:
    initial = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with signals.listen():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.requested_signal() == (None if nohup else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, initial)
