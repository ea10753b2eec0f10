"""Checkpoints and logs on disks that fill up, break, and lose power."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dpn_cli.errors import DataError, SaveError
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.files import file_digest, replace_file
from dpn_cli.run.run_dir import MetricsLog
from support.processes import run_in_child


def test_a_damaged_last_falls_back_to_the_one_before_and_is_reported(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    warnings: list[str] = []
    for step in (1, 2):
        checkpoints.save("last", {"w": torch.full((4,), float(step))}, {"step": step})
    data = tmp_path / "last" / "state.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    loaded = checkpoints.load("last", warnings.append)
    assert loaded is not None
    assert loaded[1] == {"step": 1}
    assert loaded[0]["w"].tolist() == [1.0] * 4
    assert "last: the checkpoint is damaged" in warnings[0]
    (tmp_path / "last.previous" / "sha256").unlink()
    with pytest.raises(DataError, match="no checkpoint there is intact"):
        checkpoints.load("last", warnings.append)


def test_digests_that_are_no_text_are_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save("last", {"w": torch.ones(4)}, {"step": step})
    digests = tmp_path / "last" / "sha256"
    digests.write_bytes(digests.read_bytes()[:9] + b"\xb9" + digests.read_bytes()[10:])
    loaded = checkpoints.load("last", lambda text: None)
    assert loaded is not None
    assert loaded[1] == {"step": 1}


def test_two_processes_may_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "features.npy"

    def write(temporary: Path) -> None:
        temporary.write_text("one")
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            replace_file(path, lambda expected: expected.write_text("two"))

    digest = replace_file(path, write)
    assert path.read_text() == "one"
    assert file_digest(path) == digest
    assert list(tmp_path.iterdir()) == [path]


def test_weights_have_the_permissions_of_the_other_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    replace_file(tmp_path / "weights", lambda to: save_file({"w": torch.ones(1)}, to))
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "plain").stat().st_mode


def fill_and_save(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save("last", {"w": torch.ones(1000)}, {"step": 1})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(SaveError, match="not written .* earlier files are intact"):
        checkpoints.save("last", {"w": torch.ones(100_000)}, {"step": 2})


def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    assert run_in_child(fill_and_save, tmp_path) == 0
    loaded = Checkpoints(tmp_path).load("last", pytest.fail)
    assert loaded is not None
    assert loaded[1] == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_full_disk_is_reported_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save("last", {"w": torch.ones(2)}, {"step": 1})
    monkeypatch.setattr("dpn_cli.run.checkpoints.flush", full)
    with pytest.raises(SaveError, match=r"last: not written \(No space left on device\)"):
        checkpoints.save("last", {"w": torch.ones(2)}, {"step": 2})
    loaded = checkpoints.load("last", pytest.fail)
    assert loaded is not None
    assert loaded[1] == {"step": 1}


def test_records_after_the_resumed_step_are_rewritten(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    log.truncate(2)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2]


def test_an_evaluation_that_will_be_repeated_is_removed_from_the_log(tmp_path: Path) -> None:
    records = [
        {"step": 2, "lr": 0.1},
        {"step": 2, "accuracy": 1.0},
        {"step": 4, "lr": 0.1},
        {"step": 4, "accuracy": 2.0},
    ]
    for evaluated, kept in ((True, 4), (False, 3)):
        log = MetricsLog(tmp_path / f"{evaluated}.jsonl")
        for record in (*records, {"step": 5, "lr": 0.1}):
            log.write(record)
        log.truncate(4, evaluated=evaluated)
        assert log.records() == records[:kept]


def test_a_log_is_read_once_however_often_its_records_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lost_records": 4}\n{"step": 9}\n{"ste')
    reads, read = list[Path](), Path.read_text

    def count(path: Path, *arguments: Any, **options: Any) -> str:
        reads.append(path)
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", count)
    log.truncate(3)
    for step in (4, 5):
        log.write({"step": step})
        assert log.count() == step + 3
    assert log.record_lost(5, 10) == 2
    assert log.count() == 10
    assert len(reads) == 1
    assert MetricsLog(log.path).count() == 10


def test_a_log_that_stays_as_it_is_keeps_its_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    for content, kept in (('{"step": 1}\n{"step": 2}\n', True), ('{"step": 1}\n{"step": 2}', False)):
        log.path.write_text(content)
        initial = log.path.stat().st_ino
        log.truncate(2)
        assert (log.path.stat().st_ino == initial) is kept
        assert log.path.read_text() == '{"step": 1}\n{"step": 2}\n'
