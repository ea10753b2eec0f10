"""Run folders that were left by killed processes or damaged later: what is mended, and what is refused."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dpn_cli import __version__
from dpn_cli.config.load import read_config, shipped_configs
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.schema import Runtime, Section
from dpn_cli.errors import DataError, DpnError
from dpn_cli.report import reading as report_reading
from dpn_cli.run import environment, files
from dpn_cli.run import run_dir as runstate
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.environment import config_digest, differences, is_running, this_process
from dpn_cli.run.files import is_leftover, remove_leftovers, replace_text
from dpn_cli.run.run import Run, with_weights_of
from dpn_cli.run.run_dir import RunFolder
from dpn_cli.sweep.engines import node
from support.cli import run_dpn

CONFIG: dict[str, Any] = {
    "backbone": {"arch": "mu/8"},
    "data": {"source": "photos"},
    "optim": {"name": "adam"},
    "runtime": {"workers": 0},
    "schedule": {"steps": 5},
}
HOW: list[dict[str, Any]] = [{}, {"resume": True}, {"overwrite": True}]
LIMIT = 60  # seconds that a process which kills itself may take


def open_run(path: Path, config: dict[str, Any] = CONFIG, **options: Any) -> tuple[RunFolder, list[str]]:
    warnings: list[str] = []
    asked = {"resume": False, "overwrite": False, "kind": "classifier", **options}
    return RunFolder.open(path, config, asked.pop("kind"), warn=warnings.append, **asked), warnings


def killed_at(call: int, owner: object, name: str, work: Callable[[], object]) -> bool:
    """Do some work in a process that dies when it calls a function for the n-th time; False when it did not."""

    def child() -> None:
        original, calls = getattr(owner, name), iter(range(call + 1))

        def deadly(*arguments: Any, **named: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(owner, name, deadly)
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(LIMIT)
    assert process.exitcode is not None, "the process neither died nor ended"
    return process.exitcode == -signal.SIGKILL


def test_a_kill_at_any_write_of_a_new_run_leaves_a_folder_that_opens(tmp_path: Path) -> None:
    states = set()
    for call in range(100):
        killed = tmp_path / f"killed{call}"
        if not killed_at(call, files, "flush", lambda path=killed: open_run(path)):  # type: ignore[misc]
            break
        states.add(tuple(sorted("tmp" if is_leftover(entry.name) else entry.name for entry in killed.iterdir())))
        for mode in HOW:
            path = shutil.copytree(killed, tmp_path / f"{call}{''.join(mode)}")
            folder, warnings = open_run(path, **mode)
            assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", "run.json"]
            assert yaml.safe_load((path / "config.yaml").read_text()) == CONFIG
            assert (folder.facts["status"], warnings) == ("running", [])
    assert states == {("tmp",), ("run.json",), ("run.json", "tmp"), ("config.yaml", "run.json")}


def status_of(path: Path, **process: Any) -> str:
    """What is said of a run whose process is this one, but for some of its description."""
    folder, _ = open_run(path)
    folder.update(process={**folder.facts["process"], **process})
    return report_reading.read_run(path).status


def test_a_run_at_work_is_running_and_one_whose_process_is_gone_interrupted(tmp_path: Path) -> None:
    assert status_of(tmp_path / "own") == "running"
    assert status_of(tmp_path / "ended", pid=2**22) == "interrupted"  # Linux numbers processes below it
    assert status_of(tmp_path / "number given to another", began="1") == "interrupted"
    assert status_of(tmp_path / "elsewhere", host="node7", pid=2**22) == "running on node7"
    assert status_of(tmp_path / "container", pids="pid:[1]", pid=2**22).startswith("running on ")
    older, _ = open_run(tmp_path / "older")
    replace_text(older.path / "run.json", json.dumps({**older.facts, "process": None}))
    assert report_reading.read_run(older.path).status == "running"
    folder, _ = open_run(tmp_path / "ended", resume=True)
    assert report_reading.read_run(folder.path).status == "running"


def test_a_killed_process_that_nobody_has_waited_for_is_gone() -> None:
    actual, expected = multiprocessing.Pipe()

    def child() -> None:
        expected.send(this_process())
        expected.recv()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    described = actual.recv()
    assert is_running(described)
    process.kill()
    os.waitid(os.P_PID, described["pid"], os.WEXITED | os.WNOWAIT)
    assert is_running(described) is False
    process.join(LIMIT)


def begun(path: Path) -> RunFolder:
    """A run that has trained for a while."""
    folder, _ = open_run(path)
    folder.update(data={"train": "abc"})
    (path / "checkpoints" / "last").mkdir(parents=True)
    (path / "checkpoints" / "last" / "state.safetensors").write_text("precious")
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_a_run_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    facts = json.loads((folder.path / "run.json").read_text())
    facts["recipe"] = facts.pop("config")
    (folder.path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(DpnError, match=r"run: an earlier version of dpn made this run; .* or pass another -o$"):
        open_run(folder.path, resume=True)
    assert (folder.path / "checkpoints" / "last" / "state.safetensors").read_text() == "precious"


def test_a_kill_while_a_run_is_deleted_leaves_a_run(tmp_path: Path) -> None:
    for call in range(100):
        path = tmp_path / str(call)
        begun(path)
        (path / "result.json").write_text("{}")
        if not killed_at(call, Path, "unlink", lambda path=path: open_run(path, overwrite=True)):  # type: ignore[misc]
            break
        assert (path / "run.json").is_file()
        open_run(shutil.copytree(path, tmp_path / f"{call} resumed"), resume=True)
        open_run(path, overwrite=True)
        assert sorted(entry.name for entry in path.iterdir()) == ["config.yaml", "run.json"]
    assert call > 2


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("run.json", lambda path: path.unlink()),
    "empty": ("run.json", lambda path: path.write_text("")),
    "cut off": ("run.json", lambda path: path.write_text(path.read_text()[:40])),
    "of another kind": ("run.json", lambda path: path.write_text("[1, 2]")),
    "nested too deep": ("run.json", lambda path: path.write_text("[" * 100_000)),
    "not text": ("run.json", lambda path: path.write_bytes(b"\xff\xfe{}")),
    "missing config": ("config.yaml", lambda path: path.unlink()),
    "config cut off": ("config.yaml", lambda path: path.write_text(path.read_text()[:30])),
    "config cut in the last line": ("config.yaml", lambda path: path.write_text(path.read_text()[:-3])),
    "config empty": ("config.yaml", lambda path: path.write_text("")),
    "config nested too deep": ("config.yaml", lambda path: path.write_text("[" * 100_000)),
    "config not text": ("config.yaml", lambda path: path.write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_description_is_rewritten_on_resume(damage: str, tmp_path: Path) -> None:
    name, spoil = DAMAGE[damage]
    begun(tmp_path)
    original = json.loads((tmp_path / "run.json").read_text())
    spoil(tmp_path / name)
    with pytest.raises(DpnError, match="holds a run that has not finished; --resume continues it"):
        open_run(tmp_path)
    folder, (warning,) = open_run(tmp_path, resume=True)
    assert f"{tmp_path / name} was missing or damaged and is written again" in warning
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG
    facts = folder.facts
    assert {key: facts[key] for key in ("kind", "config", "status")} == {
        key: original[key] for key in ("kind", "config", "status")
    }
    assert ("data" in facts) is (name == "config.yaml")
    assert ("continues with those that are there now" in warning) is (name == "run.json")
    assert (tmp_path / "checkpoints" / "last" / "state.safetensors").read_text() == "precious"
    assert open_run(tmp_path, resume=True)[1] == []
    spoil(tmp_path / name)
    open_run(tmp_path, overwrite=True)
    assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_description_does_not_let_another_config_in(tmp_path: Path) -> None:
    other = {**CONFIG, "schedule": {"steps": 6}}
    begun(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DpnError, match="a different config .schedule.steps: 5 there, 6 now"):
        open_run(tmp_path, other, resume=True)
    open_run(tmp_path, {**CONFIG, "runtime": {"workers": 4}}, resume=True)
    (tmp_path / "config.yaml").write_text("backbone: {")
    with pytest.raises(DataError, match=r"config.yaml: missing or damaged, so this config cannot be compared"):
        open_run(tmp_path, other, resume=True)
    assert (tmp_path / "checkpoints").exists()


def test_a_run_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(DpnError, match="holds a classification run and not a LiT run; pass another -o"):
        open_run(tmp_path, kind="towers", resume=True)


def test_a_damaged_result_is_rebuilt(tmp_path: Path) -> None:
    begun(tmp_path).finish({"top1": 50.0})
    assert open_run(tmp_path, resume=True)[0].result == {"top1": 50.0}
    (tmp_path / "result.json").write_text('{"top1": 5')
    folder, (warning,) = open_run(tmp_path, resume=True)
    assert folder.result is None
    assert "result.json is damaged and is computed again" in warning


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "cat.jpg"])
def test_files_of_others_are_never_touched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("backbone: mine\n")
    for mode in HOW:
        with pytest.raises(DpnError, match="the folder is not empty and is not a dpn run"):
            open_run(tmp_path, **mode)
    assert (tmp_path / name).read_text() == "backbone: mine\n"


def test_leftovers_of_dead_processes_are_removed_and_of_living_ones_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        dead = pool.apply(os.getpid)
    pool.join()
    living, own = os.getppid(), os.getpid()
    names = {pid: f".weights.safetensors.{pid}.tmp" for pid in (dead, living, own)}
    for name in (*names.values(), ".notes.tmp", "x.1.tmp"):
        (folder / name).write_text("")
        (folder / "checkpoints" / name).write_text("")
    open_run(folder, resume=True)
    for place in (folder, folder / "checkpoints"):
        actual = {path.name for path in place.iterdir() if path.suffix == ".tmp"}
        assert actual == {names[living], ".notes.tmp", "x.1.tmp"}
    remove_leftovers(tmp_path / "nowhere")


def test_partial_files_of_a_killed_process_are_removed_on_the_next_write(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        dead = pool.apply(os.getpid)
    pool.join()
    names = [f".model[1].onnx.{dead}.tmp", f".model[1].onnx.{os.getppid()}.tmp", f".other.onnx.{dead}.tmp"]
    for name in names:
        (tmp_path / name).write_text("")
    replace_text(tmp_path / "model[1].onnx", "of today")
    assert {path.name for path in tmp_path.iterdir()} == {
        *names,
        "model[1].onnx",
    }  # one of them may be in use elsewhere
    for name in names:
        os.utime(tmp_path / name, (1e9, 1e9))
    replace_text(tmp_path / "model[1].onnx", "of today")
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "model[1].onnx"}


COMMAND = ["finetune", "highres", "--data", "demo", "--arch", "mu/8", "--checkpoint", "none", "--steps", "1", "-q"]


def test_places_that_are_no_folders_are_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    printed = {
        "/": "-o /: the folder is not empty and is not a dpn run",
        "file": "-o file: a file, not a folder",
        "file/below": "-o file/below: the folder cannot be made (Not a directory)",
        "/proc/x": "-o /proc/x: the folder cannot be made (No such file or directory)",
        "a" * 300: "the folder cannot be made (File name too long)",
        "b" * 5000: "the folder cannot be made (File name too long)",
    }
    for place, message in printed.items():
        for command in (COMMAND, ["eval", "weights.npz", "--data", "demo"]):
            if place == "/" and command[0] == "eval":
                continue
            result = run_dpn(*command, "-o", place)
            assert result.exit_code == 2, result.output
            assert message in result.stderr
            assert len(result.stderr.strip().splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        "finetune vtab --arch mu/8",
        "finetune highres --arch mu/8 --checkpoint none",
        "pretrain imagenet --arch mu/8 --augment none",
        "pretrain sun397 --arch mu/8 --augment none",
        "lit train --checkpoint none --arch mu/8",
        "segment ade20k --checkpoint none --arch mu/8",
    ],
)
def test_resume_and_overwrite_together_are_refused(command: str, tmp_path: Path) -> None:
    begun(tmp_path)
    data = str(tmp_path) if "sun397" in command else "demo"
    result = run_dpn(*command.split(), "--data", data, "-q", "-o", str(tmp_path), "--resume", "--overwrite")
    assert result.exit_code == 2, result.output
    assert "--resume --overwrite: one continues the existing run, the other deletes it" in result.stderr
    assert (tmp_path / "checkpoints" / "last" / "state.safetensors").read_text() == "precious"


def test_the_newest_state_of_a_description_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an older version has neither kind nor digest of its config in run.json."""
    begun(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({key: facts[key] for key in ("argv", "versions", "data")}))
    assert open_run(tmp_path, resume=True)[1] == []
    with pytest.raises(DpnError, match="a different config"):
        open_run(tmp_path, {**CONFIG, "optim": {"name": "momentum"}}, resume=True)
    monkeypatch.setattr(runstate, "versions", lambda: pytest.fail("a whole run.json was written again"))
    open_run(tmp_path, resume=True)


def test_a_run_may_be_resumed_with_another_log() -> None:
    begun = {"seed": 0, "backbone": {"stem": "dpn"}}  # by a version without that key
    current = {**begun, "log": {"layer_norms": True}}
    assert config_digest(current) == config_digest(begun)
    assert differences(begun, current) == []
    assert differences(begun, {**current, "seed": 1}) == ["seed: 0 there, 1 now"]


def leaves(plain: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_each_key_of_each_config_may_change_on_resume_or_is_named(name: str, tmp_path: Path) -> None:
    config = CONFIG | read_config(name)
    open_run(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    free = ("runtime", "log")  # micro-batch, workers, device, precision, trackers; what is logged
    for path in leaves(config):
        other = copy.deepcopy(config)
        section = other
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = "another"
        if path[0] in free or path[-1] in ("allow_failed", "keep_weights", "max_pixels"):
            open_run(tmp_path, other, resume=True)
            open_run(tmp_path, config, resume=True)
        else:
            with pytest.raises(DpnError) as refused:
                open_run(tmp_path, other, resume=True)
            assert f"({'.'.join(path)}: " in str(refused.value)
            assert " there, another now); give the same options to resume it" in str(refused.value)


class OneNetwork(Section):
    """A config of which only the network matters."""

    backbone: BackboneConfig


@pytest.mark.parametrize(
    ("current", "arguments", "kept"),
    [
        ({}, [], True),
        ({"stem": "none"}, [], True),
        ({}, ["data.source", "backbone.stem"], True),
        ({}, ["backbone.checkpoint"], False),
        ({"stem": "none"}, ["backbone.stem"], False),
        ({}, None, False),
        ({"checkpoint": "old.safetensors", "stem": "none"}, [], False),
    ],
)
def test_the_weights_of_a_run_are_reused_unless_the_command_names_others(
    current: dict[str, str], arguments: list[str] | None, kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"arch": "mu/8", "stem": "dpn", "checkpoint": "old.safetensors"}
    config = OneNetwork.model_validate({"backbone": saved | {"checkpoint": "new.safetensors"} | current})
    resumed = with_weights_of(config, saved, arguments, Console())
    expected = OneNetwork.model_validate({"backbone": saved}) if kept else config
    assert resumed == expected
    told = "continues with --checkpoint old.safetensors, as it started, and not with new.safetensors\n"
    assert capsys.readouterr().err == told * kept


def test_another_precision_on_resume_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = open_run(tmp_path)
    run = Run(OneNetwork(backbone=BackboneConfig(arch="mu/8")), folder, World(0, 1, torch.device("cpu")), Console())
    for precision, warns in (("fp32", False), ("fp32", False), ("bf16", True), ("bf16", False)):
        run.record_precision(Runtime.model_validate({"precision": precision}), torch.nn.Linear(2, 2))
        output = " ".join(capsys.readouterr().err.split())
        assert ("started in fp32 and continues in bf16" in output) is warns
        assert folder.precision == precision


def test_a_checkout_that_is_not_installed_reports_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "dpn-cli":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    assert environment.versions.__wrapped__()["dpn-cli"] == __version__
    assert node.inspect_node(str(tmp_path), "run", [])["version of dpn"] == __version__
