"""Processes that run the parts of a VTAB sweep: together they do what one does alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpn_cli.data import decoded_cache as decoded_module
from dpn_cli.data.decoded_cache import decode_once
from dpn_cli.data.pixels import PixelSet, load
from dpn_cli.engine import fit as engine
from dpn_cli.errors import OutOfMemoryError, SaveError
from dpn_cli.run import files
from dpn_cli.run.process import SHARE
from dpn_cli.sweep.engines import dispatch
from dpn_cli.sweep.scheduler import Work
from support.cli import run_dpn
from support.programs import program_environment, start_program
from support.vtab import DEMO_SWEEP, SHORT_SWEEP, read_ledger_rows, run_demo_sweep
from tasks.vtab import train
from tasks.vtab.trials import read_json


class InProcess:
    """An engine that runs every command line in this process, one after the other, and counts what failed."""

    trained = 0

    def __init__(self, slots: int, folder: Path) -> None:
        self.slots, self.folder, self.done = slots, folder, list[tuple[str, int]]()

    def has_room(self, work: Work) -> bool:
        return True

    def start(self, work: Work, slot: int) -> None:
        process = run_dpn(*work.line)
        InProcess.trained += process.stderr.count("failed: step")
        self.log_of(work.name).parent.mkdir(exist_ok=True)
        self.log_of(work.name).write_text(process.stderr)
        self.done.append((work.name, process.exit_code))

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        done, self.done = self.done, []
        return done

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def log_of(self, name: str) -> Path:
        return self.folder / "logs" / f"{name.replace('/', '-')}.log"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep by one process."""
    out = tmp_path_factory.mktemp("alone")
    run_demo_sweep(out)
    return out


def same(out: Path, alone: Path) -> None:
    """Check that a sweep has the numbers and, to the bit, the weights of the one by one process."""
    results = [json.loads((folder / "result.json").read_text()) for folder in (out, alone)]
    assert results[0]["tasks"] == results[1]["tasks"]
    assert read_ledger_rows(out) == read_ledger_rows(alone)
    files = sorted(path.relative_to(alone) for path in alone.rglob("weights.safetensors"))
    assert len(files) == 4
    for file in files:
        actual, expected = load_file(out / file), load_file(alone / file)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in actual), file
    log = "".join(path.read_text() for path in out.glob("trials/*/*/*/metrics.jsonl"))
    assert log.count('"step": 3, "loss"') == 4  # each training once


@pytest.mark.slow
def test_processes_do_the_sweep_of_one(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in program_environment().items():
        monkeypatch.setenv(name, value)
    result = run_demo_sweep(tmp_path, "--jobs", "2")
    same(tmp_path, alone)
    logs = [(tmp_path / f"logs/dpn-{task}.log").read_text() for task in ("demo_color", "demo_light")]
    assert [len(re.findall(r"demo_\w+ dpn lr [\d.]+ seed 0: val", log)) for log in logs] == [2, 2]
    assert result.stderr.count("val") == 0  # the process that starts the others trains nothing itself


@pytest.mark.slow
def test_more_processes_than_parts_run_single_trainings(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in program_environment().items():
        monkeypatch.setenv(name, value)
    run_demo_sweep(tmp_path, "--jobs", "3")
    same(tmp_path, alone)
    logs = {path.stem: path.read_text().count(": val") for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        f"dpn-{task}{one}": int(bool(one))
        for task in ("demo_color", "demo_light")
        for one in ("", "-lr0.01_seed0", "-lr0.001_seed0")
    }


@pytest.mark.slow
def test_two_processes_that_start_the_same_part_do_it_once(alone: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dpn_cli", *DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), "--trial", "0"]
    with start_program(line) as one, start_program(line) as two:
        outputs = [process.communicate() for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outputs
    trained = [line for _, errors in outputs for line in errors.splitlines() if ": val" in line]
    assert len(trained) == len({line.split("(")[0] for line in trained}) == 2
    assert not (tmp_path / "result.json").exists()
    run_demo_sweep(tmp_path, "--trial", "1")
    assert not (tmp_path / "result.json").exists()
    run_demo_sweep(tmp_path, "--resume")
    same(tmp_path, alone)


def test_a_trial_of_another_process_is_refused_while_it_trains_and_reused_when_finished(
    alone: Path, tmp_path: Path
) -> None:
    run_demo_sweep(tmp_path, "--trial", "0")
    claimed_trial = tmp_path / "trials/dpn/demo_light/train800_lr0.001_seed0"
    with files.claim(claimed_trial), pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PATIENCE", 0.0)
        for more in ("--trial", "1"), ("--trial", "5"), ("--resume",):
            result = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), *more)
            assert result.exit_code == 2, more
            assert f"{claimed_trial}: another process is running" in " ".join(result.stderr.split()).replace("- ", "-")
    shutil.copytree(alone / claimed_trial.relative_to(tmp_path), claimed_trial)
    result = run_demo_sweep(tmp_path, "--resume")
    assert "demo_light dpn lr 0.001 seed 0: val" not in result.stderr
    same(tmp_path, alone)


def test_a_file_that_another_process_writes_meanwhile_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, read = tmp_path / "done.json", Path.read_text

    def just_before(path: Path, *options: Any, **arguments: Any) -> str:
        try:
            return read(path, *options, **arguments)
        finally:
            path.write_text("{}")

    monkeypatch.setattr(Path, "read_text", just_before)
    assert read_json(marker) is None
    assert read_json(marker) == {}


@pytest.mark.parametrize("jobs", ["1", "2", "3"])
def test_a_training_that_failed_in_a_worker_is_not_retried_by_its_parent(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two whole parts at once, and single trainings, which are more than the parts."""
    wild = ("--lrs", "1e30,0.01", "--set", "optim.clip_norm=null")
    monkeypatch.setattr(dispatch, "backend_of", lambda *given: InProcess(int(jobs), tmp_path))
    for more in ((), ("--resume",)):
        completed = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, *wild, "-o", str(tmp_path), "--jobs", jobs, *more)
        assert completed.exit_code == 6, completed.stderr
        result = json.loads((tmp_path / "partial.json").read_text())
        assert [reason.split(":")[0] for reason in result["failed"]] == [
            f"{task} dpn lr 1e+30 seed 0" for task in ("demo_color", "demo_light")
        ]
        trained = InProcess.trained if jobs != "1" else 2
        assert trained == 2, "each failing training once in every launch"
        InProcess.trained = 0


def test_a_trial_out_of_memory_on_a_shared_gpu_is_retried_on_a_gpu_of_its_own(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No learning rate is chosen without it."""
    fit, fails = engine.fit, [True]

    def full(model: Any, job: Any) -> Any:
        if job.lr == 0.001 and fails:
            fails.pop()
            raise OutOfMemoryError("out of memory")
        return fit(model, job)

    monkeypatch.setattr(engine, "fit", full)
    monkeypatch.setenv(SHARE, "2")
    shared = ("--set", "allow_failed=true")
    first = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), *shared, "--trial", "0")
    assert first.exit_code == 4, first.stderr
    assert "demo_color dpn lr 0.001 seed 0: out of memory" in first.stderr.replace("\n", " ")
    assert not (tmp_path / "trials/dpn/demo_color/choice.json").exists()
    monkeypatch.delenv(SHARE)
    run_demo_sweep(tmp_path, *shared, "--trial", "0")
    assert (tmp_path / "trials/dpn/demo_color/choice.json").exists()
    run_demo_sweep(tmp_path, *shared, "--resume")
    same(tmp_path, alone)


def test_another_version_is_refused(tmp_path: Path) -> None:
    run_demo_sweep(tmp_path, "--trial", "0")
    facts = json.loads((tmp_path / "run.json").read_text())
    facts["versions"]["dpn-cli"] = "0.0.1"
    (tmp_path / "run.json").write_text(json.dumps(facts))
    result = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), "--trial", "1")
    assert result.exit_code == 2
    assert "dpn 0.0.1 works on the run there" in result.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("trials/*/demo_light"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--trial", "6"), "--trial 6: there are 6, 0 to 5; --list-trials lists them"),
        (("--trial", "0", "--jobs", "2"), "--jobs 2 --trial 0: each says who does the work; pass one of them"),
        (("--trial", "0", "--overwrite"), "--overwrite --trial 0: would delete the other trials"),
    ],
)
def test_sharing_that_is_impossible_is_refused(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(tmp_path), *more)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_parts_are_listed_with_their_numbers() -> None:
    result = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "--compare", "none,dpn", "--list-trials")
    assert result.stdout.splitlines() == [
        f"{number}\t{name}"
        for number, name in enumerate(
            [
                *("none/demo_color", "none/demo_light", "dpn/demo_color", "dpn/demo_light"),
                *("none/demo_color/lr0.01_seed0", "none/demo_color/lr0.001_seed0"),
                *("none/demo_light/lr0.01_seed0", "none/demo_light/lr0.001_seed0"),
                *("dpn/demo_color/lr0.01_seed0", "dpn/demo_color/lr0.001_seed0"),
                *("dpn/demo_light/lr0.01_seed0", "dpn/demo_light/lr0.001_seed0"),
            ]
        )
    ]


def test_processes_of_a_machine_decode_a_split_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second network finds what the first one has decoded, and trains on the same pixels as without sharing."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    decoded: list[tuple[Any, ...]] = []
    sets: dict[bool, list[PixelSet]] = {True: [], False: []}

    def counted(*arguments: Any, **more: Any) -> PixelSet:
        decoded.append(arguments)
        return load(*arguments, **more)

    monkeypatch.setattr(train, "load", counted)
    for shared in (True, False):

        def once(path: Any, decode: Any, into: list[PixelSet] = sets[shared]) -> PixelSet:
            into.append(decode_once(path, decode))
            return into[-1]

        monkeypatch.setattr(train, "decode_once", once)
        two = ("--compare", "none,dpn", "--tasks", "demo_light", "--lrs", "0.01")
        for more in (("--trial", "0"), ("--trial", "1"), ("--resume",)) if shared else ((),):
            run_demo_sweep(tmp_path / str(shared), *two, *more)
    assert len(decoded) == 2 + 4  # two splits; without sharing for each network
    assert len(sets[True]) == len(sets[False]) == 4
    for actual, expected in zip(sets[True], sets[False], strict=True):
        assert torch.equal(actual.images, expected.images)
        assert torch.equal(actual.labels, expected.labels)
        assert (actual.skipped, actual.rows) == (expected.skipped, expected.rows)
    assert not list((tmp_path / "tmp").iterdir())


def test_pixels_that_cannot_be_shared_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = PixelSet(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))

    def full(path: Path, write: Any) -> None:
        raise SaveError(f"{path}: no space left")

    monkeypatch.setattr(decoded_module, "replace_file", full)
    assert decode_once(tmp_path / "name", lambda: pixels) is pixels
