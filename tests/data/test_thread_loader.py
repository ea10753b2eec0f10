"""Items made in threads between two passes: the same images in the same order, each by a thread of its own."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from dpn_cli.config.schema import Runtime
from dpn_cli.data.decode import decode, open_image
from dpn_cli.data.pixels import WORTH_WORKERS, count_readers, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import read_image_bytes
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.data.thread_loader import ThreadedDataset
from dpn_cli.data.validate import inspect_image, inspect_split
from dpn_cli.errors import DataError
from dpn_cli.report.predictions import read_files
from support.images import write_class_folders

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
SIZE = (8, 8)


class Meeting(ThreadedDataset[Tensor]):
    """Numbers, of which as many are made at once as there are threads; `threads` are those torch has in each."""

    def __init__(self, threads: int) -> None:
        self.barrier, self.threads = threading.Barrier(threads), set[int]()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, item: int) -> Tensor:
        self.threads.add(torch.get_num_threads())
        self.barrier.wait(timeout=10)
        return torch.tensor(item)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_is_built_by_all_threads_in_parallel(threads: int) -> None:
    torch.set_num_threads(threads)
    numbers, later = Meeting(threads), list[int]()
    assert [batch.tolist() for batch in DataLoader(numbers, batch_size=6)] == [[*range(6)], [*range(6, 12)]]
    assert numbers.threads == {1}  # a thread that computes with others would take their cores
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [*later, torch.get_num_threads()] == [threads, threads]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("photos"))


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_change_no_pixel_and_no_order(workers: int, photos: Path) -> None:
    torch.set_num_threads(3)
    folder, read = ClassFolders(photos), partial(resize, size=SIZE)
    rows = list(range(len(folder.labels)))[::-1]
    with stream(folder, read, 4, rows=rows, workers=workers) as parts:
        read_parts = list(parts)
    assert torch.equal(torch.cat([p.images for p in read_parts]), torch.stack([read(folder.pixels(r)) for r in rows]))
    assert [row for part in read_parts for row in part.rows] == rows


def test_the_first_unreadable_image_is_the_one_that_is_named(tmp_path: Path) -> None:
    torch.set_num_threads(3)
    folder = ClassFolders(write_class_folders(tmp_path))
    bad = [folder.path(row) for row in (3, 5)]
    for path in bad:
        path.write_bytes(b"no image".ljust(path.stat().st_size))
    with pytest.raises(DataError, match=bad[0].name), stream(folder, partial(resize, size=SIZE), 8, workers=0) as parts:
        list(parts)


def test_images_that_are_predicted_or_examined_are_read_in_threads(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, paths = ClassFolders(photos), sorted(photos.rglob("*.jpg"))
    barrier = threading.Barrier(3)

    def meet(pixels: Any) -> Any:
        barrier.wait(timeout=10)
        return pixels.shape

    torch.set_num_threads(3)
    read = [item for batch in read_files(paths, folder.reading, meet, batch_size=6, workers=0) for item in batch]
    assert [item.path for item in read] == paths  # type: ignore[union-attr]
    examined = inspect_split("all", folder.locate, partial(inspect_image, folder), len(paths), workers=0)
    single = [inspect_image(folder, row).digest for row in range(len(paths))]
    assert examined.digests.tolist() == single


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "bmp", "gif", "tif", "ppm"])
def test_a_image_is_decoded_from_the_bytes_that_were_read(ending: str, tmp_path: Path) -> None:
    path, noise = tmp_path / f"a.{ending}", np.random.default_rng(0).integers(256, size=(150, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    image = open_image(path, "it")
    assert read_image_bytes(image, "it", bytes) == path.read_bytes()
    assert np.array_equal(decode(image, "it"), decode(open_image(path, "it"), "it"))


def test_processes_decode_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, processes in ((False, 0), (True, 8)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr("dpn_cli.data.pixels.cores", lambda: list(range(64)))
        assert count_readers(Runtime().workers, WORTH_WORKERS) == processes
        assert count_readers("auto", WORTH_WORKERS - 1) == 0
        assert count_readers(2, 1) == 2
