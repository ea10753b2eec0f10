"""Batches made in parts: whatever their size and the workers, the same pixels in the same order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, dataloader

from dpn_cli.data import collate
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.collate import (
    CHUNK_IMAGES,
    MAX_SHARED_BYTES,
    PREFETCH_CHUNKS,
    Example,
    chunk_size,
    chunks_in_memory,
    open_batches,
)
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.pixels import stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import Batch
from dpn_cli.errors import DataError, WorkerError
from dpn_cli.run.distributed import World
from support.images import write_class_folders
from support.time_limits import ERROR_LIMIT, wait_for_error
from tasks.segment.labels import LabelRule
from tasks.segment.loader import segment_batches
from tasks.segment.pairs import ScenePairs
from tasks.segment.transforms import SegmentAugmentation

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
RULE = LabelRule(5, 1, 0)
# Augmentations that draw from different sources, some of which look at other rows of the batch.
HOW = {
    "plain": Augmentation((16, 24)),
    "mixed": Augmentation((16, 24), mixup=0.5, layers=2, magnitude=15),
    "deit": Augmentation(
        (16, 16),
        crop="timm_bicubic",
        policy="rand-m9-mstd0.5-inc1",
        jitter=0.3,
        erase=0.5,
        repeats=3,
        mirrored=True,
    ),
    "views": Augmentation((16, 24), views=2),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ClassFolders:
    root = write_class_folders(tmp_path_factory.mktemp("images"))
    (root / "class1" / "002.jpg").write_bytes(b"none")
    return ClassFolders(root)


class Numbers(Dataset[Example]):
    """Numbers with the process that has made each; those from `stuck` on wait for ever."""

    def __init__(self, stuck: int = 1000) -> None:
        self.stuck, self.made = stuck, multiprocessing.Semaphore(0)

    def __getitem__(self, item: int) -> Example:
        if item >= self.stuck:
            signal.pause()
        self.made.release()
        if item < 0:
            return DataError(f"item {item}")
        return torch.full((2,), item), item, os.getpid()


def batches_of(length: int, count: int = 100) -> list[range]:
    return [range(start, start + length) for start in range(0, length * count, length)]


def opened(data: Numbers, batches: Any, workers: int) -> Any:
    return open_batches(data, batches, workers, image_bytes=16)


def several(loader: str, folder: ClassFolders, workers: int) -> list[Batch]:
    """The first batches of one of the loaders, for a rank with rows of its own."""
    if loader == "stream":
        with stream(folder, partial(resize, size=(8, 8)), 6, workers=workers, skip_bad=True) as parts:
            return [{"image": p.images, "label": p.labels, "rows": torch.tensor(p.rows)} for p in parts]
    world = World(1, 3, CPU, grain=1)
    if loader == "segment":
        crops = SegmentAugmentation((16, 16), scale=(128, 64))
        made = segment_batches(ScenePairs(0, 7), RULE, crops, 5, 7, ALONE, workers=workers)(2)
    else:
        mode, observed = HOW[loader], list[int]()
        made = crop_batches(folder, mode, 18, 7, world, workers=workers, skip_bad=True, on_skip=observed.append)(2)
    with closing(made) as chosen:
        return list(islice(chosen, 3))


@pytest.mark.parametrize("loader", [*HOW, "segment", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_size_of_parts_changes_no_pixel(
    loader: str, workers: int, folder: ClassFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = several(loader, folder, 0)
    assert max(len(batch["label"]) for batch in full) > 4
    for size in (4, 1) if workers else (4, 3, 1):
        monkeypatch.setattr(collate, "CHUNK_IMAGES", size)
        parts = several(loader, folder, workers)
        assert len(parts) == len(full)
        for one, other in zip(parts, full, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].dtype == other[name].dtype
                assert torch.equal(one[name], other[name])


def test_all_workers_make_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "CHUNK_IMAGES", 2)
    with opened(Numbers(), batches_of(8), 2) as made:
        (images, numbers, process), errors = next(made)
        assert not errors
        assert (numbers.tolist(), images[:, 1].tolist()) == (list(range(8)), list(range(8)))
        assert process.unique().numel() == 2
        assert next(made).columns[1].tolist() == list(range(8, 16))


def test_one_batch_is_made_while_another_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "CHUNK_IMAGES", 1)
    data = Numbers()
    with opened(data, batches_of(8), 1) as made:
        next(made)
        for _ in range(16):  # more than the worker has ready by itself
            assert data.made.acquire(timeout=20)


def test_batches_end_with_the_last_and_lengths_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "CHUNK_IMAGES", 2)
    for workers in (0, 1):
        with opened(Numbers(), [range(5), range(1), range(4)], workers) as made:
            assert [columns[1].tolist() for columns, _ in made] == [[0, 1, 2, 3, 4], [0], [0, 1, 2, 3]]


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_come_in_the_order_of_the_items_and_leave_the_rest(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collate, "CHUNK_IMAGES", 2)
    with opened(Numbers(), [[-3, -1, 5, -2, 7], [-4]], workers) as made:
        columns, errors = next(made)
        assert [column.tolist() for column in columns[:2]] == [[[5, 5], [7, 7]], [5, 7]]
        assert [str(error) for error in errors] == ["item -3", "item -1", "item -2"]
        columns, errors = next(made)
        assert (columns, len(errors)) == ([], 1)


def none_left() -> bool:
    """Whether neither a worker nor the thread is left."""
    threads = [thread.name for thread in threading.enumerate() if "(_make)" in thread.name]
    return not threads and not multiprocessing.active_children()


def test_closing_waits_for_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "CHUNK_IMAGES", 1)
    monkeypatch.setattr(collate, "PATIENCE", ERROR_LIMIT)
    monkeypatch.setattr(collate, "kill_processes", lambda processes: pytest.fail("the thread was not woken up"))
    monkeypatch.setattr("dpn_cli.data.workers.PATIENCE", 0.1)
    reading = threading.Event()

    class Items(list[int]):
        def __getitem__(self, place: Any) -> Any:
            if place.start == PREFETCH_CHUNKS:  # the first part beyond those that the opened loader asks for itself
                reading.set()
            return super().__getitem__(place)

    with opened(Numbers(stuck=1), [Items(range(4))], 1):
        assert reading.wait(ERROR_LIMIT)
    assert none_left()


def test_a_thread_that_is_not_woken_up_ends_with_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "PATIENCE", 0.1)
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    with opened(Numbers(stuck=0), batches_of(4), 1):
        monkeypatch.setattr("multiprocessing.queues.Queue.put", lambda queue, item: None)  # as with a dead one's lock
    assert none_left()


@pytest.mark.parametrize("reading", [False, True])
def test_the_death_of_a_worker_is_one_error(reading: bool) -> None:
    def work() -> None:
        with opened(Numbers(stuck=4), batches_of(4), 1) as made:
            next(made)
            (worker,) = multiprocessing.active_children()
            worker.kill()
            next(made) if reading else wait_for_error()

    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        work()
    assert none_left()


def test_errors_of_the_thread_are_raised_to_the_user_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpn_cli.data.workers.DYING", 0)

    class Odd(Numbers):
        def __getitem__(self, item: int) -> Example:
            return torch.zeros(item + 1), item

    with pytest.raises(RuntimeError, match="equal size"), opened(Odd(), batches_of(4), 1) as made:
        next(made)


@pytest.mark.parametrize("loader", [*HOW, "segment", "stream"])
def test_loaders_report_the_size_of_their_images(
    loader: str, folder: ClassFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def noted(size: int, workers: int, ranks: int) -> int:
        calls.append(size)
        return 4

    monkeypatch.setattr(collate, "chunk_size", noted)
    first = several(loader, folder, 0)[0]
    masks = first["label"].nbytes // len(first["label"]) if loader == "segment" else 0
    assert calls == [first["image"].nbytes // len(first["image"]) + masks]


@pytest.mark.parametrize(
    ("side", "workers", "ranks"), [(224, 16, 1), (224, 2, 1), (384, 16, 1), (224, 15, 8), (512, 64, 1)]
)
def test_parts_fit_into_shared_memory(side: int, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = 3 * side**2
    monkeypatch.setattr(collate, "shared_memory", lambda: None)
    size = chunk_size(image, workers, ranks)
    assert ranks * chunks_in_memory(workers) * size * image <= MAX_SHARED_BYTES
    assert size == CHUNK_IMAGES or ranks * chunks_in_memory(workers) * (size + 1) * image > MAX_SHARED_BYTES
    monkeypatch.setattr(collate, "shared_memory", lambda: 2**26)  # what Docker gives a container
    assert chunk_size(image, workers, ranks) == max(1, 2**25 // (ranks * chunks_in_memory(workers) * image))
    assert chunk_size(image, 0, ranks) == CHUNK_IMAGES
