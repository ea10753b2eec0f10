"""Many trainings at once: the order of work, the share of the machine that each has, and how they end."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from dpn_cli.data.loader import count_workers
from dpn_cli.errors import StoppedError
from dpn_cli.run.cores import cores
from dpn_cli.run.process import PARENT
from dpn_cli.sweep.engines.gpus import Gpu, Shares
from dpn_cli.sweep.engines.local import Processes, last_error
from dpn_cli.sweep.scheduler import Work, run_all
from support.programs import LIMIT, program_environment, run_program, start_program, write_program
from support.time_limits import start_deadline


class Simulated:
    """A machine on which work ends in a random order and fails at random."""

    def __init__(self, slots: int, seed: int, fails: float = 0.0) -> None:
        self.slots, self.random, self.fails = slots, random.Random(seed), fails
        self.running: dict[str, int] = {}
        self.order: list[str] = []
        self.stopped = self.closed = False

    def has_room(self, work: Work) -> bool:
        return True

    def start(self, work: Work, slot: int) -> None:
        assert 0 <= slot < self.slots
        assert slot not in self.running.values()
        self.running[work.name] = slot
        self.order.append(work.name)

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        count = self.random.randint(0, len(self.running))
        names = self.random.sample(sorted(self.running), count)
        for name in names:
            del self.running[name]
        return [(name, int(self.random.random() < self.fails)) for name in names]

    def log_of(self, name: str) -> Path:
        return Path(name)

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def stop(self) -> None:
        self.stopped = True


def unasked() -> None:
    """No signal has come."""


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_jobs_run_once_each_after_their_dependencies(seed: int) -> None:
    draw = random.Random(seed)
    works = [
        Work(str(number), (), tuple({str(draw.randrange(number)) for _ in range(number % 3)} if number else ()))
        for number in range(1000)
    ]
    backend, codes = Simulated(100, seed, fails=0.01), dict[str, int]()

    def on_start(work: Work) -> None:
        assert all(codes.get(name) == 0 for name in work.after)

    left = run_all(works, backend, on_start, lambda work, code: codes.update({work.name: code}), unasked)
    assert len(backend.order) == len(set(backend.order))
    assert set(backend.order) == set(codes)
    assert {work.name for work in left} == {work.name for work in works} - set(codes)
    lost = {name for name, code in codes.items() if code} | {work.name for work in left}
    assert all(lost.intersection(work.after) for work in left)
    assert any(codes.values())  # otherwise nothing was tried


def test_jobs_start_in_order_and_need_only_jobs_of_the_list() -> None:
    works = [Work("b", (), ("done before",)), Work("a", ()), Work("c", ("x",), ("b",))]
    backend = Simulated(1, 0)
    assert run_all(works, backend, lambda work: None, lambda work, code: None, unasked) == []
    assert backend.order == ["b", "a", "c"]


def test_a_signal_stops_running_jobs() -> None:
    def check() -> None:
        if backend.order:
            raise StoppedError(signal.SIGTERM)

    backend = Simulated(2, 0)
    with pytest.raises(StoppedError):
        run_all([Work("a", ()), Work("b", ())], backend, lambda work: None, lambda work, code: None, check)
    assert backend.stopped


def test_processes_share_cores_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import json, os, sys, pathlib\n"
        "names = 'OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES', 'DPN_PARENT'\n"
        "print(json.dumps([sys.argv[1:], sorted(os.sched_getaffinity(0)), [os.environ.get(name) for name in names]]))\n"
    )
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", text))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    backend = Processes(2, tmp_path / "logs", Shares((Gpu("7", 80 * 10**9), Gpu("GPU-9", 80 * 10**9)), 1))
    slots: list[str] = []
    works = [Work("a/seed0", ("pretrain", "--seed", "0")), Work("a/seed1", ("pretrain",))]
    left = run_all(works, backend, lambda work: slots.append(work.name), lambda work, code: None, start_deadline())
    assert left == []
    assert sorted(os.sched_getaffinity(0)) == cores
    words, own, (threads, gpu, parent) = json.loads(backend.log_of("a/seed0").read_text())
    assert words == ["-m", "dpn_cli", "pretrain", "--seed", "0"]
    assert parent == str(os.getpid())
    assert gpu == "7"
    if len(cores) > 1:
        assert own == cores[: len(cores) // 2]
        assert threads == str(len(own))
    # The second had the other GPU and the cores beside it.
    words, own, (_, gpu, _) = json.loads(backend.log_of("a/seed1").read_text())
    assert gpu == "GPU-9"
    if len(cores) > 1:
        assert own == cores[len(cores) // 2 : 2 * (len(cores) // 2)]


def test_exit_codes_and_the_last_error_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import sys\nprint('loss 3.1')\nprint('error: the loss is NaN', file=sys.stderr)\nprint('bye')\n"
        "sys.exit(int(sys.argv[3]))\n"
    )
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", text))
    backend, codes = Processes(3, tmp_path / "logs"), dict[str, int]()
    works = [Work(str(code), (str(code),)) for code in (0, 5, 6)]
    run_all(works, backend, lambda work: None, lambda work, code: codes.update({work.name: code}), start_deadline())
    assert codes == {"0": 0, "5": 5, "6": 6}
    assert last_error(backend.log_of("5")) == "the loss is NaN"
    assert last_error(tmp_path / "nothing") == "no output"


WAITS = (
    "import os, signal, sys, threading\n"
    "from pathlib import Path\n"
    "from dpn_cli.run import process\n"
    "process.prepare()\n"
    "end = threading.Event()\n"
    "signal.signal(signal.SIGTERM, lambda *_: end.set())\n"
    "Path(sys.argv[3] + '.new').write_text(str(os.getpid()))\n"
    "os.rename(sys.argv[3] + '.new', sys.argv[3])\n"
    f"assert end.wait({LIMIT})\n"
    "Path(sys.argv[3] + '.saved').touch()\n"
)


def test_a_stop_is_passed_on_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", WAITS))
    run, late = tmp_path / "begun", start_deadline()

    def check() -> None:
        late()
        if run.exists():
            raise StoppedError(signal.SIGTERM)

    with pytest.raises(StoppedError):
        run_all([Work("a", (str(run),))], Processes(1, tmp_path), lambda work: None, lambda work, code: None, check)
    assert (tmp_path / "begun.saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_processes_save_and_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    run, saved, late = tmp_path / "begun", tmp_path / "begun.saved", start_deadline()
    interpreter = write_program(tmp_path / "python", WAITS)
    script = (
        "import sys, threading\nfrom pathlib import Path\n"
        "from dpn_cli.sweep.engines.local import Processes\nfrom dpn_cli.sweep.scheduler import Work\n"
        f"sys.executable = {interpreter!r}\n"
        f"Processes(1, Path({str(tmp_path)!r})).start(Work('a', ({str(run)!r},)), 0)\n"
        f"threading.Event().wait({LIMIT})\n"
    )
    with start_program([sys.executable, "-c", script]) as parent:
        while not run.exists():
            late()
        parent.send_signal(signal.SIGKILL)
        parent.wait(LIMIT)
        while not saved.exists():
            late()


def test_a_process_that_outlived_its_parent_does_not_start(tmp_path: Path) -> None:
    script = "from dpn_cli.run import process; process.prepare(); print('begun')"
    result = run_program([sys.executable, "-c", script], env=program_environment(**{PARENT: "1234567"}))
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "")


def test_decoding_processes_are_counted_by_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {8, 3, 5})
    assert cores() == [3, 5, 8]
    assert count_workers("auto", torch.device("cuda")) == 2
    assert count_workers("auto", torch.device("cpu")) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert count_workers("auto", torch.device("cpu")) == 0
