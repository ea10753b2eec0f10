"""Processes that share the work of a run: each does what no other one does, and together what one does alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import environment, started
from safetensors.torch import load_file
from test_cli import run

from dpn_cli.data import decoded_cache as decoded_module
from dpn_cli.data.decoded_cache import decode_once
from dpn_cli.data.pixels import PixelSet, load
from dpn_cli.engine import fit as engine
from dpn_cli.errors import OutOfMemoryError, SaveError
from dpn_cli.run import run as session_module
from dpn_cli.run.leases import LEASES, PATIENCE, Lease, Leases
from dpn_cli.run.process import SHARE
from tasks.vtab import train
from tasks.vtab.trials import read_json

VTAB = ("finetune", "vtab", "--data", "demo", "--tasks", "demo_light,demo_color", "--arch", "mu/8", "--device", "cpu")
SHORT = ("--steps", "3", "-b", "16", "--lrs", "0.01,0.001", "--seeds", "1", "--set", "keep_weights=all", "--no-report")


def swept(out: Path, *more: str) -> Any:
    done = run(*VTAB, *SHORT, "-o", str(out), *more)
    assert done.exit_code == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep by one process."""
    out = tmp_path_factory.mktemp("alone")
    swept(out)
    return out


def ledger(out: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    return sorted((row["stem"], row["task"], row["lr"], row["seed"], str(row["accuracy"])) for row in rows)


def same(out: Path, alone: Path) -> None:
    """Check that a sweep has the numbers and, to the bit, the weights of the one by one process."""
    results = [json.loads((folder / "result.json").read_text()) for folder in (out, alone)]
    assert results[0]["tasks"] == results[1]["tasks"]
    assert ledger(out) == ledger(alone)
    files = sorted(path.relative_to(alone) for path in alone.rglob("weights.safetensors"))
    assert len(files) == 4
    for file in files:
        ours, theirs = load_file(out / file), load_file(alone / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
    log = "".join(path.read_text() for path in out.glob("trials/*/*/*/metrics.jsonl"))
    assert log.count('"step": 3, "loss"') == 4  # each training once


@pytest.mark.slow
def test_processes_do_the_sweep_of_one(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    done = swept(tmp_path, "--jobs", "2")
    same(tmp_path, alone)
    logs = [(tmp_path / f"logs/process {number}.log").read_text() for number in (1, 2)]
    trained = [re.findall(r"demo_\w+ dpn lr [\d.]+ seed 0: val", log) for log in logs]
    assert sorted(trained[0] + trained[1]) == sorted(set(trained[0] + trained[1]))
    assert not Leases(tmp_path / LEASES).taken()
    assert done.stderr.count("val") == 0  # the process that starts the others trains nothing itself


@pytest.mark.slow
def test_two_processes_that_start_the_same_part_do_it_once(alone: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dpn_cli", *VTAB, *SHORT, "-o", str(tmp_path), "--trial", "0"]
    with started(line) as one, started(line) as two:
        outputs = [process.communicate() for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outputs
    trained = [line for _, errors in outputs for line in errors.splitlines() if ": val" in line]
    assert len(trained) == len({line.split("(")[0] for line in trained}) == 2
    assert not (tmp_path / "result.json").exists()
    swept(tmp_path, "--trial", "1")
    assert not (tmp_path / "result.json").exists()
    swept(tmp_path, "--resume")
    same(tmp_path, alone)


def test_what_another_process_does_is_waited_for_and_done_when_it_died(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has a training, and is then silent: nobody trains it before, and it is trained then."""
    now = [0.0]
    other = Leases(tmp_path / LEASES, owner={"token": "other", "host": "elsewhere"})
    name = "trials/dpn/demo_light/train800_lr0.001_seed0"
    pauses: list[bool] = []

    def pause() -> None:
        pauses.append((tmp_path / name / "done.json").exists())
        assert len(list(tmp_path.glob("trials/*/*/*/done.json"))) == 3
        now[0] += PATIENCE / 2

    monkeypatch.setattr(session_module, "Leases", lambda folder: Leases(folder, lambda: now[0]))
    monkeypatch.setattr(session_module, "pause", pause)
    monkeypatch.setattr("tasks.vtab.sweep.pause", pause)
    swept(tmp_path, "--trial", "0")
    assert other.take(name)
    swept(tmp_path, "--join")
    assert pauses == [False, False]
    same(tmp_path, alone)


def test_what_another_process_has_done_before_its_lease_was_free_is_not_done_again(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "trials/dpn/demo_light/train800_lr0.001_seed0"
    take = Leases.take

    def after_another(self: Leases, asked: str) -> Lease | None:
        if asked == name:
            shutil.copytree(alone / name, tmp_path / name)
        return take(self, asked)

    monkeypatch.setattr(Leases, "take", after_another)
    done = swept(tmp_path, "--join")
    assert "demo_light dpn lr 0.01 seed 0: val" in done.stderr
    assert "demo_light dpn lr 0.001 seed 0: val" not in done.stderr
    same(tmp_path, alone)


def test_a_file_that_another_process_writes_meanwhile_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, read = tmp_path / "done.json", Path.read_text

    def just_before(path: Path, *how: Any, **more: Any) -> str:
        try:
            return read(path, *how, **more)
        finally:
            path.write_text("{}")

    monkeypatch.setattr(Path, "read_text", just_before)
    assert read_json(marker) is None
    assert read_json(marker) == {}


def test_a_training_that_failed_is_not_tried_by_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = ("--lrs", "1e30,0.01", "--set", "optim.clip_norm=null", "--tasks", "demo_light")
    for more in (["--join"], ["--join"]):
        done = run(*VTAB, *SHORT, *wild, "-o", str(tmp_path), *more)
        assert done.exit_code == 6, done.stderr
        assert "lr 1e+30 seed 0" in done.stdout.replace("\n", " ")
    assert "failed: step" not in done.stderr  # the second one reads it
    again = run(*VTAB, *SHORT, *wild, "-o", str(tmp_path), "--resume")
    assert "failed: step" in again.stderr
    monkeypatch.setattr("tasks.vtab.sweep.at_once", lambda *_: None)  # which would start the processes
    processes = run(*VTAB, *SHORT, *wild, "-o", str(tmp_path), "--resume", "--jobs", "2")
    assert "failed: step" in processes.stderr


def test_what_runs_out_of_memory_in_a_part_of_a_gpu_is_tried_with_a_whole_one(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One training fails for one process; another one leaves it, too, and chooses no learning rate without it."""
    fit, fails = engine.fit, [True]

    def full(model: Any, job: Any) -> Any:
        if job.lr == 0.001 and fails:
            fails.pop()
            raise OutOfMemoryError("out of memory")
        return fit(model, job)

    monkeypatch.setattr(engine, "fit", full)
    monkeypatch.setenv(SHARE, "2")
    shared = ("--set", "allow_failed=true", "--join")
    first = run(*VTAB, *SHORT, "-o", str(tmp_path), *shared)
    assert first.exit_code == 4, first.stderr
    assert "demo_color dpn lr 0.001 seed 0: out of memory in a part of a GPU" in first.stderr.replace("\n", " ")
    assert run(*VTAB, *SHORT, "-o", str(tmp_path), *shared).exit_code == 6
    assert not (tmp_path / "trials/dpn/demo_color/choice.json").exists()
    monkeypatch.delenv(SHARE)
    swept(tmp_path, *shared)
    same(tmp_path, alone)


def test_a_folder_in_which_others_work_is_refused(tmp_path: Path) -> None:
    swept(tmp_path, "--trial", "0")
    lease = Leases(tmp_path / LEASES).take("dpn/demo_color")
    assert lease
    for more in ("--resume", "--overwrite"):
        done = run(*VTAB, *SHORT, "-o", str(tmp_path), more)
        assert done.exit_code == 2
        assert "other processes work on dpn/demo_color there; --join works along" in done.stderr.replace("\n", " ")
    lease.release()
    swept(tmp_path, "--resume")


def test_another_version_is_refused(tmp_path: Path) -> None:
    swept(tmp_path, "--trial", "0")
    facts = json.loads((tmp_path / "run.json").read_text())
    facts["versions"]["dpn-cli"] = "0.0.1"
    (tmp_path / "run.json").write_text(json.dumps(facts))
    done = run(*VTAB, *SHORT, "-o", str(tmp_path), "--trial", "1")
    assert done.exit_code == 2
    assert "dpn 0.0.1 works on the run there" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("trials/*/demo_light"))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--trial", "2"), "--trial 2: there are 2, 0 to 1; --list-trials lists them"),
        (("--trial", "0", "--jobs", "2"), "--jobs 2 --trial 0: each says who does the work; pass one of them"),
        (("--join", "--overwrite"), "--overwrite: would delete what other processes work on"),
    ],
)
def test_what_cannot_be_shared_is_refused(more: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = run(*VTAB, *SHORT, "-o", str(tmp_path), *more)
    assert done.exit_code == 2
    assert told in done.stderr.replace("\n", " ")


def test_parts_are_listed_with_their_numbers() -> None:
    done = run(*VTAB, *SHORT, "--compare", "none,dpn", "--list-trials")
    assert done.stdout.splitlines() == [
        "0\tnone/demo_color", "1\tnone/demo_light", "2\tdpn/demo_color", "3\tdpn/demo_light"
    ]  # fmt: skip


def test_processes_of_a_machine_decode_a_split_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second network finds what the first one has decoded, and trains on the same pixels as without sharing."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    decoded: list[tuple[Any, ...]] = []
    sets: dict[bool, list[PixelSet]] = {True: [], False: []}

    def counted(*given: Any, **more: Any) -> PixelSet:
        decoded.append(given)
        return load(*given, **more)

    monkeypatch.setattr(train, "load", counted)
    for shared in (True, False):

        def once(path: Any, decode: Any, into: list[PixelSet] = sets[shared]) -> PixelSet:
            into.append(decode_once(path, decode))
            return into[-1]

        monkeypatch.setattr(train, "decode_once", once)
        two = ("--compare", "none,dpn", "--tasks", "demo_light", "--lrs", "0.01")
        swept(tmp_path / str(shared), *two, *(["--join"] if shared else []))
    assert len(decoded) == 2 + 4  # two splits; without sharing for each network
    assert len(sets[True]) == len(sets[False]) == 4
    for ours, theirs in zip(sets[True], sets[False], strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert (ours.skipped, ours.rows) == (theirs.skipped, theirs.rows)
    assert not list((tmp_path / "tmp").iterdir())


def test_pixels_that_cannot_be_shared_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = PixelSet(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))

    def full(path: Path, write: Any) -> None:
        raise SaveError(f"{path}: no space left")

    monkeypatch.setattr(decoded_module, "replace_file", full)
    assert decode_once(tmp_path / "name", lambda: pixels) is pixels
