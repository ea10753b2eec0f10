"""``--engine ray`` and ``slurm``: the same sweep on a real local Ray cluster and in submitit's local jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.errors import DpnError, StoppedError, WorkerError
from dpn_cli.sweep.engines import ray as ray_engine
from dpn_cli.sweep.engines.node import inspect_node, save_and_end
from dpn_cli.sweep.engines.select import backend_of
from dpn_cli.sweep.scheduler import Work
from support.cli import run_dpn
from support.programs import child_processes, program_environment, run_program, start_program, write_program
from support.vtab import DEMO_SWEEP, SHORT_SWEEP, read_ledger_rows, run_demo_sweep

LIMIT = 400.0
# Says through which node the command line speaks to the cluster.
PROGRAM_ON_RAY = """
import sys
from pathlib import Path
from dpn_cli.sweep.engines.ray import RayCluster, ray

check, place = RayCluster._check_nodes, Path(sys.argv.pop(1))
def told(self, sources):
    place.write_text(ray.get_runtime_context().get_node_id())
    check(self, sources)
RayCluster._check_nodes = told
from dpn_cli.cli import main
main()
"""
# Starts Ray with three nodes, runs the command line, and removes a node that is not the command line's when a training
# is at work.
CLUSTER = f"""
import os, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

out = Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
words = [str(out / "node"), *sys.argv[2:], "--resources", f"address={{cluster.address}}"]
program = subprocess.Popen([sys.executable, "-c", {PROGRAM_ON_RAY!r}, *words])
removed = False
while program.poll() is None:
    time.sleep(0.05)
    if not removed and any(out.glob("run/trials/*/*/*/metrics.jsonl")):
        here = (out / "node").read_text()
        cluster.remove_node(next(node for node in nodes if node.node_id != here), allow_graceful=False)
        removed = True
cluster.shutdown()
print("removed a node", removed)
sys.exit(program.returncode)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    run_demo_sweep(out)
    return out


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_does_the_sweep_of_one_process(alone: Path, tmp_path: Path) -> None:
    line = [*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path / "run"), "--engine", "ray", "--jobs", "3"]
    result = run_program([sys.executable, "-c", CLUSTER, str(tmp_path), *line], limit=LIMIT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "removed a node True" in result.stdout
    results = [json.loads((out / "result.json").read_text())["tasks"] for out in (tmp_path / "run", alone)]
    assert results[0] == results[1]
    assert read_ledger_rows(tmp_path / "run") == read_ledger_rows(alone)


def test_a_lost_ray_node_with_the_command_on_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends any more, and Ray says nothing about it."""
    nodes = [{"NodeID": "here", "Alive": True}, {"NodeID": "there", "Alive": True}]
    waited = []

    def wait(work: list[object], **options: object) -> tuple[list[object], list[object]]:
        waited.append(work)
        return [], work

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr(ray_engine, "_nodes", lambda: nodes)
    cluster = object.__new__(ray_engine.RayCluster)
    cluster._running, cluster._driver_node = {"reference": Work("work", ())}, "here"
    assert cluster.wait_finished(0.5) == []
    nodes[1]["Alive"] = False
    assert cluster.wait_finished(0.5) == []
    nodes[0]["Alive"] = False
    with pytest.raises(WorkerError, match="this machine's node of the cluster is lost"):
        cluster.wait_finished(0.5)
    cluster.stop()  # there is nothing to wait for
    assert waited == [["reference"]] * 3


def test_jobs_that_ray_has_lost_restart_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [ray.exceptions.NodeDiedError("lost"), StoppedError(signal.SIGTERM).exit_code, 6]  # type: ignore[no-untyped-call]
    run: list[Work] = []

    def get(reference: object) -> object:
        if isinstance(end := ends.pop(0), Exception):
            raise end
        return end

    monkeypatch.setattr("ray.wait", lambda work, **mode: (work, []))
    monkeypatch.setattr("ray.get", get)
    cluster = object.__new__(ray_engine.RayCluster)
    cluster._running, cluster._restarts, cluster._per_gpu = {}, 0, 1

    def submit(work: Work) -> None:
        run.append(work)
        cluster._running[len(run)] = work

    monkeypatch.setattr(cluster, "_submit", submit)
    submit(Work("work", ()))
    assert [cluster.wait_finished(0.5) for _ in range(3)] == [[], [], [("work", 6)]]
    assert [work.name for work in run] == ["work"] * 3


@pytest.mark.parametrize(("parts", "part"), [(1, 1.0), (3, 0.3333), (6, 0.1666)])
def test_parts_of_a_gpu_of_ray_are_no_more_than_one(parts: int, part: float) -> None:
    assert ray_engine._gpu_fraction(parts) == part


def test_a_job_out_of_memory_on_a_shared_gpu_gets_one_of_its_own_from_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is given GPUs that are not there; a task of it is a word."""
    calls, messages = list[tuple[Any, ...]](), list[str]()

    class Task:
        def __init__(self, num_gpus: float = -1) -> None:
            self.num_gpus = num_gpus

        def options(self, num_gpus: float, **mode: object) -> Task:
            return Task(num_gpus)

        def remote(self, *given: Any) -> str:
            calls.append((given[0], given[3], self.num_gpus))
            return f"task {len(calls)}"

    started = list[str]()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda address, **mode: started.append(address))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr("ray.remote", lambda work: Task())
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr("ray.wait", lambda work, **mode: (work, []))
    monkeypatch.setattr("ray.get", lambda reference: 4)
    monkeypatch.setattr(ray_engine.RayCluster, "_check_nodes", lambda self, sources: None)
    launch = LaunchOptions(engine="ray", jobs_per_gpu=3)
    cluster = backend_of(launch, tmp_path, [], messages.append)
    assert started == ["local"]  # without an address no cluster is looked for
    assert cluster.slots == 6
    cluster.start(Work("work", ("pretrain",)), 0)
    assert cluster.wait_finished(0.5) == []
    assert cluster.wait_finished(0.5) == [("work", 4)]
    assert calls == [(("pretrain",), 3, 0.3333), (("pretrain",), 1, 1)]
    assert messages == ["work: out of memory on a shared GPU; restarted on a whole one"]
    assert backend_of(replace(launch, jobs=4), tmp_path, [], messages.append).slots == 4
    monkeypatch.setattr("ray.cluster_resources", dict)
    with pytest.raises(DpnError, match="--jobs-per-gpu 3: the Ray cluster has no GPU; pass --jobs"):
        backend_of(launch, tmp_path, [], messages.append)


def test_a_process_of_a_node_receives_its_fraction_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "executable", write_program(tmp_path / "python", "import os; print(os.environ.get('DPN_GPU_SHARE'))")
    )
    for parts, told in ((3, "3\n"), (1, "None\n")):
        assert ray_engine._run_command((), str(tmp_path / f"log{parts}"), str(tmp_path), parts) == 0
        assert (tmp_path / f"log{parts}").read_text() == told


@pytest.mark.slow
def test_a_process_of_ray_that_starts_work_does_not_load_torch() -> None:
    """Every node has one for each piece of work, beside that of the work."""
    code = "import sys, dpn_cli.sweep.engines.ray; print({'torch', 'pydantic'} & set(sys.modules))"
    assert run_program([sys.executable, "-c", code]).stdout == "set()\n"


class _Ended:
    """A job of SLURM that has ended with an exit code."""

    job_id = "1"

    def __init__(self, code: int) -> None:
        self.code = code

    def done(self) -> bool:
        return True

    def result(self) -> int:
        return self.code


class _Queue:
    """An executor of submitit whose jobs end at once with the exit codes."""

    def __init__(self, codes: Iterator[int]) -> None:
        self.codes, self.lines = codes, list[tuple[str, ...]]()

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, command: Any) -> _Ended:
        self.lines.append(command.line)
        return _Ended(next(self.codes))


def test_a_slurm_job_that_received_a_stop_signal_is_requeued(tmp_path: Path) -> None:
    from dpn_cli.sweep.engines.slurm import REQUEUES, Slurm

    cases: list[tuple[Iterable[int], int, int]] = [([75, 75, 0], 0, 3), ([75, 5], 5, 2), (repeat(75), 75, REQUEUES)]
    for codes, ends, submitted in cases:
        slurm = Slurm(1, tmp_path, {"cluster": "local"})
        queue: Any = _Queue(iter(codes))
        slurm._executor = queue
        slurm.start(Work("work", ("finetune", "vtab")), 0)
        rounds = [slurm.wait_finished(0.0) for _ in range(submitted)]
        assert rounds == [[]] * (submitted - 1) + [[("work", ends)]]
        assert queue.lines == [("finetune", "vtab")] * submitted


SAVES = """
import signal, sys

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("begun", flush=True)
signal.pause()
"""


def test_a_job_is_requeued_when_its_process_has_ended() -> None:
    with start_program([sys.executable, "-c", SAVES]) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        save_and_end(process, signal.SIGUSR1)
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        assert process.wait() == 75  # which is left to whoever waits for the process
        save_and_end(process, signal.SIGUSR1)  # there is nothing to wait for any more


@pytest.mark.slow
def test_jobs_of_submitit_that_are_preempted_continue(tmp_path: Path) -> None:
    """A job gets its signal in the middle of a training, is queued again, and the weights are those of one process."""
    code = "import sys; from pathlib import Path; from test_engines import preempted; preempted(Path(sys.argv[1]))"
    environ = program_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    result = run_program([sys.executable, "-c", code, str(tmp_path)], limit=LIMIT, env=environ)
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "logs/work.log").read_text()
    assert log.splitlines() == ["began", "SIGUSR1", "began", "went on"]
    assert result.stdout.splitlines() == ["[('work', 0)]"]


PROGRAM = """
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    print(signal.Signals(number).name, flush=True)
    Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
print("began", flush=True)
if Path("saved").exists():
    print("went on", flush=True)
    sys.exit(0)
Path("begun").touch()
while True:
    signal.pause()
"""


def preempted(folder: Path) -> None:
    """Run a program in the place of dpn as a job, preempt it once it is at work, and print how it ended."""
    from submitit.local.local import LocalJobEnvironment

    from dpn_cli.sweep.engines.slurm import Command, Slurm

    program = folder / "dpn_cli"
    program.mkdir()
    (program / "__init__.py").touch()
    (program / "__main__.py").write_text(PROGRAM)
    slurm = Slurm(1, folder / "logs", {"cluster": "local", "timeout_min": 2})
    slurm.start(Work("work", ()), 0)
    slurm._waiting = [("work", Command((), str(slurm.log_of("work")), str(folder)))]
    ended: list[tuple[str, int]] = []
    interrupted = False
    while not ended:
        ended = slurm.wait_finished(0.1)
        if not interrupted and (folder / "begun").exists():
            (task,) = child_processes(int(slurm._jobs["work"].job_id))
            os.kill(task, LocalJobEnvironment._usr_sig())
            interrupted = True
    print(ended)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "ray", "--resources", "address=127.0.0.1:1"), "--engine ray: no cluster at 127.0.0.1:1"),
        (("--engine", "slurm"), "--engine slurm: "),
        (("--resources", "num_gpus=1"), "--resources num_gpus: goes with --engine ray or slurm"),
        (("--engine", "ray", "--trial", "0"), "--engine ray --trial 0: each says who does the work"),
    ],
)
def test_jobs_that_cannot_start_are_reported_before_any_starts(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run_dpn(
        *DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), *words, *(("--jobs", "2") if "num_gpus=1" in words else ())
    )
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("trials/*"))


def test_nodes_are_compared_by_version_folder_and_data(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").touch()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"12")
    here = inspect_node(str(tmp_path), "run", ["one"])
    assert here["version of dpn"] == version("dpn-cli")
    assert here["run folder run"] == "there"
    assert inspect_node(str(tmp_path), "two", [])["run folder two"] == "not there"
    assert inspect_node(str(tmp_path), "run", ["two"])["data two"] == here["data one"]
    (tmp_path / "two/a.png").write_bytes(b"123")
    assert inspect_node(str(tmp_path), "run", ["two"])["data two"] != here["data one"]
    assert inspect_node(str(tmp_path), "run", ["three"])["data three"] == "not there"
