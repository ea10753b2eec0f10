"""The real program in real processes: it ends, whatever happens to it or to the processes that read its data."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpn_cli.cli import app
from dpn_cli.run import signals
from dpn_cli.run.checkpoints import Checkpoints
from support.images import write_class_folders
from support.programs import LIMIT, child_processes, run_program, start_program

# As the program's own start, but that garbage keeps what it holds: nothing ends because it happens to be collected.
DPN = (sys.executable, "-c", "import gc; gc.disable(); from dpn_cli.cli import main; main()")
OPTIONS = ("--arch", "mu/8", "--checkpoint", "none", "--image-size", "16", "-b", "8", "--device", "cpu", "-q")
ENDLESS = ("--steps", "1000000", "--set", "runtime.checkpoint_every=5")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_class_folders(root / "train", classes=3, each=8, size=(20, 20))
    write_class_folders(root / "val", classes=3, each=4, size=(20, 20))
    return root


def highres(folder: Path, out: Path, *arguments: str) -> list[str]:
    options = ("--lr", "0.01", "--set", "data.minival=0", "-j", "2", *arguments)
    return ["finetune", "highres", "--data", str(folder), "-o", str(out), *OPTIONS, *options]


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    for _ in range(int(LIMIT / 0.05)):
        if condition():
            return
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.05)
            raise AssertionError(f"ended with {code}: {process.stderr.read() if process.stderr else ''}")
    raise AssertionError("it did not happen")


def in_training(out: Path, process: subprocess.Popen[str]) -> list[int]:
    """Wait until a training has saved its state; returns the processes that read its data."""
    wait_until((out / "checkpoints" / "last").is_dir, process)
    actual = child_processes(process.pid)
    assert len(actual) == 2
    return actual


def saved_step(out: Path) -> int:
    saved = Checkpoints(out / "checkpoints").load("last", print)
    assert saved is not None
    return int(saved[1]["step"])


def resume(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume a run, and stop it after three steps more."""
    initial, asked = saved_step(out), iter([None, None, None, signal.SIGTERM])
    assert initial >= 5
    monkeypatch.setattr(signals, "requested_signal", lambda: next(asked))
    resumed = CliRunner().invoke(app, [*highres(folder, out, *ENDLESS), "--resume"])
    assert resumed.exit_code == 75, resumed.output
    assert saved_step(out) == initial + 3


@pytest.mark.slow
def test_a_run_on_two_ranks_ends_after_its_result(folder: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    result = run_program([*torchrun, *DPN, *highres(folder, tmp_path / "run", "--steps", "2", "-j", "1")])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("validation: top-1") == 1


BREAK = """
from dpn_cli.cli import main
from dpn_cli.data.workers import open_loader
from dpn_cli.engine.gradients import Gradients

loader = open_loader(range(100), 2)
next(loader.__enter__())  # and nobody ends these workers

def compute(*arguments, **more):
    raise ValueError("broken in training")

Gradients.compute = compute
main()
"""


@pytest.mark.slow
def test_a_run_that_breaks_ends_and_so_do_workers_that_are_left(folder: Path, tmp_path: Path) -> None:
    result = run_program([sys.executable, "-c", BREAK, *highres(folder, tmp_path / "run", "--steps", "2")])
    assert result.returncode == 1
    assert "ValueError: broken in training" in result.stderr


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with start_program([*DPN, *highres(folder, out, *ENDLESS)]) as process:
        killed = in_training(out, process)[1]
        os.kill(killed, signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert f"error: data-loading process {killed} was killed by SIGKILL" in errors
    assert "--resume" in errors
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    resume(folder, out, monkeypatch)


@pytest.mark.slow
def test_a_signal_to_all_processes_stops_the_run_with_its_state_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with start_program([*DPN, *highres(folder, out, *ENDLESS)], start_new_session=True) as process:
        in_training(out, process)
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, errors
    assert "error: stopped by SIGTERM; the state is saved" in errors
    resume(folder, out, monkeypatch)


@pytest.mark.slow
def test_a_run_whose_terminal_closes_stops_with_its_state_saved(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stacks = tmp_path / "stacks.txt"
    arguments = [argument for argument in highres(folder, out, *ENDLESS) if argument != "-q"]  # with a progress bar
    code = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "  # the terminal of its session
        f"import faulthandler; stacks = open({str(stacks)!r}, 'w'); "  # where it is when it does not end
        f"faulthandler.dump_traceback_later({LIMIT * 0.7}, file=stacks); "
        "from dpn_cli.cli import main; main()"
    )
    actual, expected = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), expected)
    with start_program([sys.executable, "-c", code, *arguments], start_new_session=True, **streams) as process:
        os.close(expected)
        in_training(out, process)
        original = json.loads((out / "run.json").read_text())
        os.close(actual)
        assert process.wait(LIMIT) == 75, stacks.read_text()
    assert original["status"] == "running"
    assert json.loads((out / "run.json").read_text())["status"] == "stopped"


PACK_AND_WAIT = """
import sys
from dpn_cli.cli import main
from dpn_cli.data.sources import pack_writer

fifo = sys.argv.pop()
pack_writer._encode = lambda *given: open(fifo).read()
main()
"""
# A worker dies before the program watches it.
PACK_AND_DIE = """
import contextlib, multiprocessing, os, signal
from dpn_cli.data.sources import pack_writer

def killed(pool, *given):
    future = submit(pool, *given)
    worker = min(multiprocessing.active_children(), key=lambda process: process.pid)
    worker.kill()
    with contextlib.suppress(ChildProcessError):  # the pool's own thread has already received its exit code
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    return future

submit, pack_writer.ProcessPoolExecutor.submit = pack_writer.ProcessPoolExecutor.submit, killed
"""


def test_packing_ends_when_a_worker_is_killed_at_its_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    folder = write_class_folders(tmp_path / "photos", classes=2, each=2)
    command = ("data", "pack", "--data", str(folder), "--out", str(tmp_path / "pack"), "-j", "2", "-q")
    result = run_program([sys.executable, "-c", PACK_AND_DIE + PACK_AND_WAIT, *command, str(tmp_path / "fifo")])
    assert result.returncode == 1
    assert re.match(r"error: data-loading process \d+ was killed by SIGKILL", result.stderr)


@pytest.mark.parametrize("victim", ["worker", "program"])
def test_packing_ends_with_all_its_processes_when_one_is_killed(victim: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it, so who reads it waits for ever
    folder = write_class_folders(tmp_path / "photos", classes=2, each=2)
    command = ("data", "pack", "--data", str(folder), "--out", str(tmp_path / "pack"), "-j", "2", "-q")
    with start_program([sys.executable, "-c", PACK_AND_WAIT, *command, str(tmp_path / "fifo")]) as process:
        wait_until(lambda: len(child_processes(process.pid)) == 2, process)
        killed = child_processes(process.pid)[0] if victim == "worker" else process.pid
        os.kill(killed, signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT)  # until no process has the pipes open
    if victim == "worker":
        assert process.returncode == 1
        assert errors.startswith(f"error: data-loading process {killed} was killed by SIGKILL")
        assert "finished parts are kept" in errors
