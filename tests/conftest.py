"""Fixtures of several folders. No test reaches the network or writes outside its own folder."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpn_cli.engine import fit as engine
    from dpn_cli.engine.trainer_args import TrainJob

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

from dpn_cli.run import precision
from support.goldens import Arrays, read_golden
from support.images import write_class_folders
from support.programs import LIMIT

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
        patch.setattr(precision, "has_bf16_products", lambda: False)  # the same numbers on every machine
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Arrays]:
    """Read a recorded fixture: outputs of the reference implementations (tests/goldens/README.md)."""
    return read_golden


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 30 images."""
    return write_class_folders(tmp_path_factory.mktemp("photos"), classes=3, each=30)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's handwritten digits as the svhn folder of a VTAB-1k: 800 / 200 / 797 images of 8 x 8."""
    from sklearn.datasets import load_digits

    from support.vtab import write_vtab_task

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order] * 255 / 16).astype(np.uint8)
    cuts = {"train800": slice(0, 800), "val200": slice(800, 1000), "test": slice(1000, None)}
    root = tmp_path_factory.mktemp("digits") / "vtab-1k"
    write_vtab_task(
        root / "svhn",
        {name: images[cut] for name, cut in cuts.items()},
        {name: data.target[order][cut] for name, cut in cuts.items()},
    )
    return root


@pytest.fixture
def toy(digits: Path) -> Callable[..., dict[str, Any]]:
    """Run the VTAB command's toy config on the handwritten digits."""
    from support.vtab import run_vtab

    def run(output: Path, *settings: str, **arguments: Any) -> dict[str, Any]:
        return run_vtab(digits, output, "data.tasks=svhn", *settings, **arguments)

    return run


@pytest.fixture(scope="module")
def command_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `support.commands.run_command` runs every command."""
    from support.commands import write_command_inputs

    return write_command_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out of report pages whose text alone is tested."""
    monkeypatch.setattr("dpn_cli.report.page.draw", lambda chart, prefix: ("<svg></svg>", b""))


@pytest.fixture
def started_jobs(monkeypatch: pytest.MonkeyPatch) -> list[TrainJob]:
    """Return a list that receives every training job when it starts."""
    from dpn_cli.engine import fit as engine

    jobs: list[TrainJob] = []
    fit = engine.fit

    def record(trainable: Any, job: TrainJob) -> engine.FitResult:
        jobs.append(job)
        return fit(trainable, job)

    monkeypatch.setattr(engine, "fit", record)
    return jobs
