"""What the tests share. Nothing here reaches the network, and no test writes outside its own folder."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# A cache of datasets outlives the files that it was made from, and a later session's files have the same names.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="dpn-tests-")
os.environ["DPN_NO_REPORT"] = "1"  # a page takes a second or two

import numpy as np
import pytest
import torch
import typer.main
import typer.testing
from PIL import Image
from programs import LIMIT, kill_tree
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

GOLDENS = Path(__file__).parent / "goldens"
Arrays = dict[str, np.ndarray[Any, Any]]
FSYNC = os.fsync
# What starts the tests in the background may ignore these, and so would the programs that they interrupt.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# What the processes below import, some of it only when they train or count.
multiprocessing.set_forkserver_preload(
    [
        *("pytest", "sklearn.datasets", "torch._dynamo", "torchmetrics.classification", "typer.testing"),
        *("tasks.classify.train", "tasks.vtab.command", "tasks.lit.command", "tasks.segment.command"),
    ]
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """End the tests' process when one of them hangs."""
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def _without_waiting() -> Iterator[None]:
    """Make each app's command once, and wait for no disk: only a power cut needs that (test_flush.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _same_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("home")
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:  # a test that undoes its own patches keeps these
        for name in ("DPN_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
            patch.setenv(name, str(home / name.lower()))
        patch.delenv("DPN_DATA_DIR", raising=False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Arrays]:
    """Read a recorded fixture: outputs of the reference implementations (tests/goldens/README.md)."""

    def read(name: str) -> Arrays:
        with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    return read


def run_ranks(main: Callable[..., None], *arguments: object, ranks: int = 2, limit: float = LIMIT) -> None:
    """Call ``main(rank, *arguments)`` in processes that come from one that has imported the libraries already.

    Raises `TimeoutError` after the limit in seconds: ranks that wait for each other wait for ever.
    """
    how: dict[str, Any] = {"nprocs": ranks, "join": False, "start_method": "forkserver"}
    started = start_processes(main, args=arguments, **how)  # type: ignore[no-untyped-call]
    until = time.monotonic() + limit
    try:
        while not started.join(max(0.0, until - time.monotonic())):
            if time.monotonic() >= until:
                raise TimeoutError(f"the ranks did not end within {limit:g} s")
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def run_apart(main: Callable[..., None], *arguments: object, limit: float = LIMIT) -> int:
    """Call ``main(*arguments)`` in a process that comes from where those of `run_ranks` do; returns its exit code.

    Raises `TimeoutError` after the limit in seconds.
    """
    process = multiprocessing.get_context("forkserver").Process(target=main, args=arguments)
    process.start()
    process.join(limit)
    code, pid = process.exitcode, process.pid
    if code is None:
        assert pid is not None
        kill_tree(pid)
        raise TimeoutError(f"the process did not end within {limit:g} s")
    return code


def nchw(image: np.ndarray[Any, Any]) -> Tensor:
    """NHWC array to NCHW tensor."""
    return torch.from_numpy(image).permute(0, 3, 1, 2).contiguous()


def write_task(folder: Path, images: Arrays, labels: Arrays) -> Path:
    """Write a task in the VTAB layout: images (n, h, w[, 3]) and labels by split, as PNG."""
    for split, arrays in images.items():
        (folder / "images" / split).mkdir(parents=True)
        lines = []
        for i, (image, label) in enumerate(zip(arrays, labels[split], strict=True)):
            name = f"images/{split}/{i:06d}.png"
            Image.fromarray(image).save(folder / name)
            lines.append(f"{name} {label}")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def images(root: Path, classes: int = 3, each: int = 5, size: tuple[int, int] = (50, 40)) -> Path:
    """Smooth images whose colour tells the class, as JPEG."""
    g = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(each):
            patches = g.integers(0, 90, (4, 4, 3), dtype=np.uint8)
            patches[..., label % 3] += 150
            image = Image.fromarray(patches).resize(size, Image.Resampling.BICUBIC)
            image.save(root / f"class{label}" / f"{number:03d}.jpg", quality=95)
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 30 images."""
    return images(tmp_path_factory.mktemp("photos"), classes=3, each=30)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's handwritten digits as the svhn folder of a VTAB-1k: 800 / 200 / 797 images of 8 x 8."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order] * 255 / 16).astype(np.uint8)
    cuts = {"train800": slice(0, 800), "val200": slice(800, 1000), "test": slice(1000, None)}
    root = tmp_path_factory.mktemp("digits") / "vtab-1k"
    write_task(
        root / "svhn",
        {name: images[cut] for name, cut in cuts.items()},
        {name: data.target[order][cut] for name, cut in cuts.items()},
    )
    return root


@pytest.fixture
def toy(digits: Path) -> Callable[..., dict[str, Any]]:
    """Run the VTAB command's toy config on the handwritten digits."""
    from test_vtab import run

    def go(output: Path, *settings: str, **arguments: Any) -> dict[str, Any]:
        return run(digits, output, "data.tasks=svhn", *settings, **arguments)

    return go
