"""Several trainings on one GPU: who gets which part of it, what is measured, and what happens when memory runs out."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError
from dpn_cli.run import distributed
from dpn_cli.run.files import read_object
from dpn_cli.run.gpu_share import CONTEXT, is_shared, keep_to_part, max_processes_per_gpu, measure, part_of
from dpn_cli.run.process import SHARE
from dpn_cli.sweep.engines import gpus, select
from dpn_cli.sweep.engines.gpus import Gpu, Shares, visible_gpus
from dpn_cli.sweep.engines.local import Processes
from dpn_cli.sweep.scheduler import Work, run_all
from support.cli import run_dpn
from support.engine import small_vit, train_steps
from support.programs import write_program
from support.time_limits import start_deadline

GB = 10**9
CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One GPU of 80 GB whose allocator has reserved `reserved` bytes, and the `fraction` that it may reserve."""
    gpu = SimpleNamespace(reserved=9.2 * GB, fraction=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: gpu.reserved)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: vars(gpu).update(fraction=fraction)
    )
    monkeypatch.setenv(SHARE, "")
    return gpu


@pytest.mark.parametrize(
    ("memory", "reserved", "most", "parts"),
    [
        (80 * GB, 9.2 * GB, 64, 7),  # 72 GB for 10 GB each
        (80 * GB, 9.2 * GB, 4, 4),
        (80 * GB, 8.2 * GB, 64, 8),  # to the byte
        (80 * GB, 60 * GB, 64, 1),
        (8 * GB, 9 * GB, 64, 1),
    ],
)
def test_processes_share_a_gpu_while_a_tenth_of_it_stays_free(
    memory: int, reserved: float, most: int, parts: int
) -> None:
    assert max_processes_per_gpu(memory, int(reserved), most) == parts
    if parts > 1:
        assert part_of(memory, parts) >= int(reserved)
        assert parts * (part_of(memory, parts) + CONTEXT) <= 0.9 * memory


def test_a_process_keeps_to_its_part(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_device", lambda name, local: CUDA)
    monkeypatch.setenv(SHARE, "4")
    with distributed.join("auto"):
        assert cuda.fraction == pytest.approx((0.9 * 80 / 4 - 0.8) / 80)
    assert is_shared()


def test_a_process_alone_keeps_to_nothing(cuda: SimpleNamespace) -> None:
    keep_to_part(CUDA)
    measure(CUDA)
    assert cuda.fraction is None
    assert not is_shared()


def test_a_training_reports_its_memory_and_then_stays_within_its_limit(
    cuda: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE, f"64:{tmp_path}/said")
    keep_to_part(CUDA)
    assert cuda.fraction is None
    assert not is_shared()
    measure(CUDA)
    assert json.loads((tmp_path / "said").read_text()) == {"reserved_bytes": 9.2 * GB, "parts": 7}
    assert is_shared()
    assert cuda.fraction == pytest.approx((0.9 * 80 / 7 - 0.8) / 80)
    (tmp_path / "said").unlink()
    measure(CUDA)
    assert not (tmp_path / "said").exists()  # once


def test_a_training_that_fills_its_gpu_has_it_alone(
    cuda: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE, f"64:{tmp_path}/said")
    cuda.reserved = 70 * GB
    measure(CUDA)
    assert json.loads((tmp_path / "said").read_text())["parts"] == 1
    assert cuda.fraction is None
    assert not is_shared()


@pytest.mark.parametrize(("steps", "measured"), [(2, [2]), (5, [3, 5])])
def test_trainings_are_measured_when_the_optimizer_has_its_state(
    steps: int, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, messages = list[int](), list[int]()
    update = engine._Training.update

    def counted(training: engine._Training, pending: torch.Tensor, step: int, lr: float, *, now: bool) -> list[float]:
        updates.append(step)
        return update(training, pending, step, lr, now=now)

    monkeypatch.setattr(engine._Training, "update", counted)
    monkeypatch.setattr(engine, "measure", lambda device: messages.append(len(updates)))
    train_steps(small_vit(), steps)
    assert messages == measured


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_is_never_given_more_than_it_has(seed: int) -> None:
    """A hundred trainings of ten networks on unequal GPUs; some run out of memory beside others."""
    draw = random.Random(seed)
    cards = [Gpu(str(number), memory * GB) for number, memory in enumerate((80, 80, 24, 141))]
    takes = {str(network): draw.randint(1, 40) * GB // 2 for network in range(10)}
    shares = Shares(cards, "auto")
    shares.most = 8
    waiting = [Work(str(number), (), network=str(draw.randrange(10))) for number in range(100)]
    running, full, done = dict[str, Work](), set[str](), list[str]()
    while waiting or running:
        for work in list(waiting):
            if shares.find(work):
                shares.take(work)
                waiting.remove(work)
                running[work.name] = work
        on = [[name for name, share in shares.allocated.items() if share.gpu == gpu] for gpu in range(len(cards))]
        for gpu, names in enumerate(on):
            single = [name for name in names if shares.allocated[name].measures or name in full]
            assert len(names) <= 8
            if not full.intersection(names):  # which wait for the others to end
                assert not single or len(names) == 1
                assert len(names) < 2 or sum(takes[running[name].network] + CONTEXT for name in names) <= 0.9 * (
                    cards[gpu].memory
                )
        name = draw.choice(sorted(running))
        work, share = running[name], shares.allocated[name]
        if share.measures:
            memory = cards[share.gpu].memory
            shares.set_parts(
                work, max_processes_per_gpu(memory, min(takes[work.network], int(0.9 * memory)), shares.most)
            )
        elif name not in full and draw.random() < 0.1 and shares.take_whole(work):
            full.add(name)
        elif name not in full or all(other in full for other in on[share.gpu]):
            shares.release(work)
            del running[name]
            done.append(name)
    assert sorted(done) == sorted(map(str, range(100)))
    assert full
    assert not shares.allocated


def test_a_number_is_the_count_of_processes_per_gpu() -> None:
    shares = Shares([Gpu("0", 80 * GB), Gpu("1", 80 * GB)], 2)
    works = [Work(str(number), ()) for number in range(4)]
    assert [shares.take(work).gpu for work in works] == [0, 1, 0, 1]
    assert [shares.allocated[work.name].lane for work in works] == [0, 0, 1, 1]
    assert shares.find(Work("5", ())) is None
    shares.release(works[1])
    actual = shares.find(Work("5", ()))
    assert actual
    assert (actual.gpu, actual.parts, actual.lane, actual.measures) == (1, 2, 0, False)


# Stands for the interpreter. The first training of a network says that four fit; "wide" needs a GPU alone.
TRAINING = """
import json, os, pathlib, sys, time
name, share, folder = sys.argv[3], os.environ.get("DPN_GPU_SHARE"), pathlib.Path(sys.argv[4])
with open(folder / "log", "a") as log:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    log.write(json.dumps([name, os.environ["CUDA_VISIBLE_DEVICES"], share and share.partition(":")[0], cores]) + "\\n")
most, _, file = (share or "").partition(":")
if file:
    path = pathlib.Path(file)
    path.with_suffix(".new").write_text(json.dumps({"reserved_bytes": 5_000_000_000, "parts": 4}))
    path.with_suffix(".new").rename(path)
    end = time.monotonic() + 20
    while name == "a" and not (folder / "wide.again").exists() and time.monotonic() < end:  # who began beside it
        time.sleep(0.01)
if name == "wide" and share:
    sys.exit(4)
if name == "fails":
    sys.exit(4)
"""


def test_processes_start_after_the_first_and_one_out_of_memory_gets_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", TRAINING))
    monkeypatch.setattr(gpus, "cores", lambda: list(range(16)))
    messages, codes, began = list[str](), dict[str, int](), list[tuple[str, list[str]]]()
    launch = Processes._launch

    def launched(self: Processes, work: Work, slot: int) -> None:
        began.append((work.name, list(self._running)))
        launch(self, work, slot)
        assert "of an earlier run" not in (read_object(tmp_path / "logs/a.gpu.json") or {})

    def say(line: str) -> None:
        messages.append(line)
        if line.startswith("wide: out of memory"):
            (tmp_path / "wide.again").touch()

    monkeypatch.setattr(Processes, "_launch", launched)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.gpu.json").write_text('{"parts": 8, "of an earlier run": true}')
    shares = Shares([Gpu("GPU-7", 24 * GB)], "auto")
    backend = Processes(8, tmp_path / "logs", shares, say)
    works = [Work(name, (name, str(tmp_path)), network="net") for name in ("a", "b", "wide", "fails")]
    works.append(Work("other", ("other", str(tmp_path)), network="other"))
    run_all(works, backend, lambda work: None, lambda work, code: codes.update({work.name: code}), start_deadline())
    assert codes == {"a": 0, "b": 0, "wide": 0, "fails": 4, "other": 0}
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {row[1] for row in rows} == {"GPU-7"}
    had = {name: [row[2] for row in rows if row[0] == name] for name in codes}
    assert had == {"a": ["8"], "b": ["4"], "wide": ["4", None], "fails": ["4", None], "other": ["8"]}
    assert [name for name, others in began if not others] in (
        ["a", "wide", "fails", "other"], ["a", "fails", "wide", "other"]
    )  # fmt: skip
    assert messages[0] == "a takes 5.0 of the 24 GB of GPU GPU-7: 4 at once there"
    second = sorted(line for line in messages if "restarted" in line)
    assert second == [
        f"{name}: out of memory on a shared GPU; restarted on a whole one ({backend.log_of(name)})"
        for name in ("fails", "wide")
    ]


@pytest.mark.parametrize(
    ("arguments", "names"), [(None, ["0", "1"]), ("3,GPU-5", ["3", "GPU-5"]), ("3,5,7", ["3", "5"])]
)
def test_gpus_are_the_visible_ones_of_this_process(
    arguments: str | None, names: list[str], cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if arguments:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", arguments)
    assert visible_gpus() == tuple(Gpu(name, 80 * GB) for name in names)


@pytest.mark.parametrize(
    ("launch", "slots", "dealt", "parts"),
    [
        (LaunchOptions(jobs=8), 8, 2, 4),  # --jobs 8 on two GPUs: four on each
        (LaunchOptions(jobs=3), 3, 2, 2),
        (LaunchOptions(jobs=1), 1, 1, 1),
        (LaunchOptions(jobs_per_gpu=3), 6, 2, 3),
        (LaunchOptions(jobs=4, jobs_per_gpu=3), 4, 2, 3),
        (LaunchOptions(jobs=9, jobs_per_gpu=3), 6, 2, 3),
        (LaunchOptions(jobs_per_gpu="auto"), 8, 2, None),  # sixteen cores, two for each
        (LaunchOptions(jobs=5, jobs_per_gpu="auto"), 5, 2, None),
    ],
)
def test_the_number_of_parallel_processes_follows_the_memory(
    launch: LaunchOptions, slots: int, dealt: int, parts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "cores", lambda: list(range(16)))
    monkeypatch.setattr(select, "visible_gpus", lambda: (Gpu("0", 80 * GB), Gpu("1", 80 * GB)))
    backend = select.backend_of(launch, tmp_path, [], print)
    assert isinstance(backend, Processes)
    assert backend.shares
    assert (backend.slots, len(backend.shares.gpus), backend.shares.fixed) == (slots, dealt, parts)


def test_without_a_gpu_only_the_cores_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "visible_gpus", tuple)
    backend = select.backend_of(LaunchOptions(jobs=2), tmp_path, [], print)
    assert isinstance(backend, Processes)
    assert (backend.slots, backend.shares) == (2, None)


def test_parts_that_hold_nothing_are_refused() -> None:
    with pytest.raises(DpnError, match="30 processes do not fit into 24 GB of GPU memory"):
        Shares([Gpu("0", 80 * GB), Gpu("1", 24 * GB)], 30)
    Shares([Gpu("0", GB // 2)], 1)  # which has all of it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--jobs-per-gpu", "2"), "--jobs-per-gpu 2: this machine has no GPU that PyTorch can use; pass --jobs"),
        (("--jobs-per-gpu", "auto", "--jobs", "4"), "--jobs-per-gpu auto: this machine has no GPU"),
        (("--jobs-per-gpu", "0"), "--jobs-per-gpu 0: a number from 1 to 99, or auto"),
        (("--jobs-per-gpu", "two"), "--jobs-per-gpu two: a number from 1 to 99, or auto"),
        (
            ("--jobs-per-gpu", "2", "--engine", "slurm"),
            "a job of SLURM has its GPU alone; goes with --engine local or ray",
        ),
        (
            ("--jobs-per-gpu", "auto", "--engine", "ray"),
            "--jobs-per-gpu auto: goes with --engine local; with ray it is a number",
        ),
        (
            ("--jobs-per-gpu", "2", "--engine", "ray", "--resources", "num_gpus=1"),
            "--jobs-per-gpu 2 --resources num_gpus: pass one of them",
        ),
    ],
)
@pytest.mark.parametrize("command", [("pretrain", "--data", "demo", "--seeds", "2"), ("reproduce", "fig3", "--small")])
def test_gpus_that_cannot_be_shared_are_reported_before_any_trial_starts(
    command: tuple[str, ...], words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "visible_gpus", tuple)
    result = run_dpn(*command, *words, "-o", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_sharing_a_gpu_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "visible_gpus", lambda: (Gpu("0", 80 * GB),))
    result = run_dpn("pretrain", "--data", "demo", "--jobs-per-gpu", "2")
    assert result.exit_code == 2
    assert "--jobs-per-gpu 2: this is one training; --compare and --seeds make several" in result.stderr.replace(
        "\n", " "
    )
    result = run_dpn("pretrain", "--data", "demo", "--seeds", "2", "--jobs-per-gpu", "2", "--trial", "0")
    assert "--jobs-per-gpu 2 --trial 0: each says who does the work; pass one of them" in result.stderr.replace(
        "\n", " "
    )
