"""Folders that two processes want at once, or that hold something else; and what stopped work says."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpn_cli.cli import app
from dpn_cli.config.network import BackboneConfig
from dpn_cli.errors import DpnError, StoppedError
from dpn_cli.run import files
from dpn_cli.run.files import claim
from dpn_cli.run.run import run_name
from support.programs import claim_in_other_process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_folder_belongs_to_one_process_until_it_ends_or_dies(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with claim_in_other_process(folder) as other:
        with pytest.raises(DpnError, match="run: another process is running"), claim(folder):
            pytest.fail("two processes are in one folder")
        with claim(folder.with_name("other run")):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with claim(folder):
            assert [path.name for path in folder.parent.iterdir()] == [".run.lock"]
    assert not list(folder.parent.iterdir())


@pytest.mark.usefixtures("impatient")
def test_who_waits_gets_the_folder_when_it_is_free(tmp_path: Path) -> None:
    with claim_in_other_process(tmp_path / "cache") as other:
        waits = []

        def wait() -> None:
            waits.append(1)
            other.kill()
            other.wait()

        with claim(tmp_path / "cache", wait):
            assert waits


@pytest.mark.usefixtures("impatient")
def test_commands_leave_a_folder_in_use_alone(tmp_path: Path) -> None:
    commands = {
        "finetune highres --data demo --arch mu/8 --checkpoint none --steps 1 --overwrite -o": tmp_path / "run",
        "data pack --data demo --out": tmp_path / "packed",
    }
    for command, folder in commands.items():
        with claim_in_other_process(folder):
            result = CliRunner().invoke(app, [*command.split(), str(folder)])
            assert result.exit_code == 2
            assert "another process is running in this folder" in result.stderr
            assert not folder.exists()


def test_runs_are_named_by_network_and_stem_once() -> None:
    assert run_name(BackboneConfig(arch="B/32", checkpoint="x/y.npz"), "dpn") == "B-32-dpn"
    assert run_name(BackboneConfig(checkpoint="x/B-32-dpn.npz"), "dpn") == "B-32-dpn"
    assert run_name(BackboneConfig(checkpoint="x/B-32-dpn.npz"), "none-vs-dpn") == "B-32-dpn-none-vs-dpn"
    assert run_name(BackboneConfig(), "rms") == "rms"


@pytest.mark.parametrize("command", ["eval", "lit eval", "segment eval"])
def test_a_report_never_takes_the_place_of_a_run(command: str, tmp_path: Path) -> None:
    for name in ("run.json", "result.json"):
        (tmp_path / name).write_text("mine")
    result = CliRunner().invoke(app, [*command.split(), "weights", "--data", "demo", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "the folder holds a run, and its result.json would be replaced" in result.stderr
    assert (tmp_path / "result.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "then"),
    [
        ("eval fewshot weights --data demo", "no result was written"),
        ("data pack --data demo --out packed", "finished parts are kept: run the same command again to continue"),
        (
            "lit cache --checkpoint none --arch mu/8 --data demo",
            "finished parts are kept: run the same command again to continue",
        ),
    ],
)
def test_a_stopped_run_prints_how_to_resume(
    command: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **named: object) -> None:
        raise StoppedError(signal.SIGTERM)

    for place in (
        "tasks.classify.fewshot.resolve",
        "dpn_cli.data.sources.pack_writer.pack",
        "tasks.lit.command.open_pairs",
    ):
        monkeypatch.setattr(place, stop)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command.split(), "-q"])
    assert result.exit_code == 75
    assert result.stderr.strip() == f"error: stopped by SIGTERM; {then}"
