"""`benchmarks/gpu.py` where there is no GPU: its smallest parts, and what becomes of parts that fail or are stopped."""

from __future__ import annotations

import importlib
import json
import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.programs import ROOT

BENCHMARKS = ROOT / "benchmarks"
# What docs/measurements.md expects of a machine that `make wheels` is for.
THERE = (
    "torch torchvision einops numpy scipy pillow rich pyyaml filelock safetensors huggingface_hub torchmetrics "
    "matplotlib Jinja2 packaging"
)
Call = Callable[[str], tuple[int, dict[str, Any], str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


@pytest.fixture
def call(script: Any, tmp_path: Path) -> Call:
    """Run some parts with a tiny network; returns exit code, the JSON, and the Markdown."""

    def run(only: str) -> tuple[int, dict[str, Any], str]:
        out = tmp_path / "gpu.json"
        small = ["--device", "cpu", "--arch", "mu/4", "--image-size", "8", "--only", only, "-o", str(out)]
        code = script.main(small)
        return code, json.loads(out.read_text()), out.with_suffix(".md").read_text()

    return run


@pytest.mark.slow
def test_the_smallest_parts_give_rows_of_both_kinds(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, actual, tables = call("numbers,memory,training")
    assert code == 0
    assert {name: part["status"] for name, part in actual["parts"].items()} == {
        "numbers": "done",
        "memory": "missing",  # the allocator of a CPU has no limit
        "training": "done",
    }
    checks, speeds = (actual["parts"][name]["rows"] for name in ("numbers", "training"))
    assert len(checks) == 16  # two stems, two precisions, four numbers
    assert all(row["passed"] and 0 <= row["value"] <= row["limit"] for row in checks)
    assert [row["value"] for row in checks if "fp32" in row["what"]] == [0.0] * 8  # the CPU beside itself
    moved = [row["value"] for row in checks if "bf16: movement" in row["what"]]
    assert all(value > 1e-3 for value in moved)  # of the weights themselves it would be the rounding
    assert [row["what"] for row in speeds] == [f"training mu/4 at 8, stem {stem}" for stem in ("dpn", "none")]
    for row in speeds:
        assert row["ratio"] == row["per_second"] / row["peer_per_second"]
        assert row["share"] > 0
        assert row["at_once"] in {2, 4}
    assert actual["peak_flops_per_second"] > 0
    output = capsys.readouterr().out
    assert "timm's ViT in a bare loop" in output
    assert "memory: cannot be measured here (the allocator of a CPU has no limit)" in output
    assert tables.count("| --- |\n") == 2


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_others_continue(
    call: Call, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(settings: Any) -> Iterator[Any]:
        yield script.Check("two", 2.0, 1.0)
        yield script.Check("not a number", float("nan"), 1.0)

    def broken(settings: Any) -> Iterator[Any]:
        yield script.Check("one", 1.0, 1.0)
        raise RuntimeError("no such kernel")

    def lacking(settings: Any) -> Iterator[Any]:
        yield from importlib.import_module("no_such_package").rows

    for name, part in {"numbers": wrong, "memory": broken, "demos": lacking}.items():
        monkeypatch.setitem(script.CHECKS, name, part)
    code, actual, tables = call("numbers,memory,demos,lit --compile")
    assert code == 1
    failed, error, missing, final = actual["parts"].values()
    assert failed["status"] == "failed"
    assert [(row["value"], row["passed"]) for row in failed["rows"]] == [(2.0, False), ("nan", False)]
    assert (error["status"], error["error"]) == ("error", "RuntimeError: no such kernel")
    assert "broken" in error["traceback"]
    assert [row["what"] for row in error["rows"]] == ["one"]
    assert (missing["status"], missing["error"]) == ("missing", "no_such_package is not installed")
    assert (final["status"], final["error"]) == ("missing", "LiT was not measured without --compile")
    assert "| two | 2 | 1 | **no** |  |" in tables
    assert [call(only)[0] for only in ("numbers", "memory", "demos")] == [1, 1, 0]


@pytest.mark.parametrize(("number", "why", "ends"), [("SIGALRM", "the time was over", 0), ("SIGTERM", "SIGTERM", 143)])
def test_finished_results_are_saved_on_a_stop(
    call: Call, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, why: str, ends: int
) -> None:
    written: dict[str, Any] = {}

    def long(settings: Any) -> Iterator[Any]:
        yield script.Check("one", 1.0, 1.0)
        written.update(json.loads((tmp_path / "gpu.json").read_text()))  # what a SIGKILL now would leave
        signal.raise_signal(signal.Signals[number])

    monkeypatch.setitem(script.CHECKS, "memory", long)
    initial = signal.getsignal(signal.SIGTERM)
    code, actual, tables = call("memory,kill")
    assert code == ends
    assert signal.getsignal(signal.SIGTERM) is initial
    part = actual["parts"]["memory"]
    assert (part["status"], part["error"]) == ("stopped", why)
    assert part["rows"] == written["parts"]["memory"]["rows"] == [script.Check("one", 1.0, 1.0).to_dict()]
    assert actual["parts"]["kill"]["status"] == "not run"
    assert "kill: not run" in tables


def test_a_wrong_part_or_a_missing_gpu_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [(["--only", "speed"], "choose from numbers, memory")]
    if not script.torch.cuda.is_available():
        wanted.append(([], "torch sees no GPU"))
    for words, text in wanted:
        with pytest.raises(SystemExit):
            script.main(words)
        assert text in capsys.readouterr().err


def test_an_expired_limit_is_reported_again(call: Call, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, float]] = []

    def asks(settings: Any) -> Iterator[Any]:
        timers.append(signal.getitimer(signal.ITIMER_REAL))
        yield script.Check("one", 1.0, 1.0)

    monkeypatch.setitem(script.CHECKS, "memory", asks)
    assert call("memory")[0] == 0
    ((left, second),) = timers
    assert left > second > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_training_that_ends_before_it_is_killed_is_a_failed_check(
    call: Call, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dpn_cli").mkdir()
    (tmp_path / "dpn_cli" / "__init__.py").touch()
    (tmp_path / "dpn_cli" / "__main__.py").write_text("raise SystemExit('no such option')")
    monkeypatch.setattr(script.gpu_programs, "ROOT", tmp_path)
    code, actual, _ = call("kill")
    assert code == 1
    part = actual["parts"]["kill"]
    assert part["status"] == "failed"
    (row,) = part["rows"]
    assert not row["passed"]
    assert row["note"].endswith("no such option")


def test_programs_find_packages_next_to_the_checkout(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("dpn_cli", "carried"):
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").touch()
    (tmp_path / "site" / "dpn_cli" / "__main__.py").write_text("import carried")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "site")
    monkeypatch.setattr(script.gpu_programs, "ROOT", tmp_path / "nothing")
    ((_, ended),) = script.gpu_programs.run_all({"one": []}, tmp_path / "programs")
    assert (ended.code, ended.errors) == (0, "")


def test_the_wheels_cover_all_missing_dependencies() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    carried = {
        canonicalize_name(name) for line in re.findall(r"^WHEELS [:+]= (.*)", text, re.M) for name in line.split()
    }
    carried |= {canonicalize_name(name) for name in re.findall(r"^BUILT := (.*)", text, re.M)[0].split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["mmseg"]]
    there = {canonicalize_name(name) for name in THERE.split()}
    assert {canonicalize_name(Requirement(item).name) for item in wanted} - carried - there == set()
