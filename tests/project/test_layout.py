"""The shape of the project: who may import whom, and a wheel that holds every module and config."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.layout import MODULES, check_imports, check_size, imports, name_of
from support.programs import ROOT, run_program

TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    check_imports(path)


def test_every_module_is_in_a_room() -> None:
    flat = {path.stem for path in (ROOT / "dpn_cli").glob("*.py")}
    assert flat == {"__init__", "__main__", "cli", "arch", "errors", "statistics", "metrics"}
    for package in ("dpn_cli", "tasks"):
        for room in (ROOT / package).iterdir():
            if (room / "__init__.py").is_file():
                assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), room


def test_no_module_imports_itself_through_others() -> None:
    """Files have no circle, inside a room or through imports inside functions either."""
    below = {name_of(path): imports(path) - {name_of(path)} for path in MODULES}
    assert list(TopologicalSorter(below).static_order())


def test_one_table_of_the_commands_knows_the_tasks() -> None:
    for path in sorted((ROOT / "dpn_cli" / "commands").glob("*.py")):
        if path.stem != "trainers":
            assert not {there for there in imports(path) if there.startswith("tasks")}, path.name
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not [text for text in texts if isinstance(text, str) and text.startswith("tasks.")], path.name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    check_size(path)


def test_the_wheel_holds_every_module_and_config_and_works_alone(tmp_path: Path) -> None:
    built = run_program([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    expected = {str(path.relative_to(ROOT)) for path in MODULES}
    expected |= {f"dpn_cli/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    expected |= {"dpn_cli/py.typed", "tasks/py.typed", "tasks/segment/ade20k.csv", "dpn_cli/report/page.html"}
    assert expected <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dpn_cli", "tasks"}
    script = (
        "import dpn_cli.cli, sys; assert dpn_cli.__file__.startswith(sys.argv[1]), dpn_cli.__file__\n"
        "sys.argv = ['dpn', 'configs']\ndpn_cli.cli.main()"
    )
    result = run_program(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{script}", str(installed)],
        cwd=tmp_path,
        env=os.environ,
    )
    assert result.returncode == 0, result.stderr
    for path in (ROOT / "configs").iterdir():
        assert path.stem in result.stdout


def test_tests_import_no_test_and_no_conftest() -> None:
    """Helpers of several tests are in tests/support, fixtures in tests/conftest.py."""
    for path in TEST_FILES:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
        assert not {name for name in names if name.split(".")[-1].startswith(("test_", "conftest"))}, path


def test_helpers_of_tests_have_docstrings() -> None:
    for path in sorted((ROOT / "tests" / "support").glob("*.py")):
        module = ast.parse(path.read_text())
        public = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in (module, *(node for node in public if not node.name.startswith("_"))):
            assert ast.get_docstring(node), f"{path.name}: {getattr(node, 'name', 'module')}"


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_processes_of_tests_have_a_time_limit(path: Path) -> None:
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    without = {"run", "call", "check_call", "check_output", "Popen", "getoutput"}
    assert not called & {f"subprocess.{name}" for name in without}, "use support.programs.run_program or start_program"
    assert not called & {"start_processes", "mp.spawn", "os.system", "os.fork"}, "use support.processes.run_processes"


def test_nothing_in_the_repository_names_a_machine_or_a_registry() -> None:
    forbidden = ("pypi" + ".org", "python" + "hosted", "/root" + "/", "file:" + "///")
    tracked = run_program(["git", "ls-files"], cwd=ROOT).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix not in {".npz", ".png"} and path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not [word for word in forbidden if word in text], name


def test_the_lowest_versions_that_are_promised_are_the_ones_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = [*project["dependencies"], *(row for extra in project["optional-dependencies"].values() for row in extra)]
    required = [Requirement(row) for row in rows]
    pinned = {}
    for name in ("constraints.txt", "constraints-oldest.txt"):
        lines = [line.split("==") for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        pinned[name] = {canonicalize_name(package): Version(version) for package, version in lines}
    untested = {"dpn-cli", "wandb", "gcsfs"}  # itself, and services that no test can reach
    untested |= {"tensorflow", "tensorflow-datasets", "opencv-python-headless", "importlib_resources"}  # 1.8 GB
    for requirement in required:
        if requirement.name in untested:
            continue
        newest, oldest = (versions[canonicalize_name(requirement.name)] for versions in pinned.values())
        assert newest in requirement.specifier, requirement
        (floor,) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
        assert oldest == floor, requirement
