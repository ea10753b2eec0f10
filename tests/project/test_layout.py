"""The shape of the project: who may import whom, and a wheel that holds every module and config."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from programs import run_program

ROOT = Path(__file__).parents[2]
MODULES = [path for package in ("dpn_cli", "tasks") for path in sorted((ROOT / package).rglob("*.py"))]

# Rooms from the bottom to the top: a module may import from its own room and those below. Only commands know tasks.
ROOMS = (
    ("dpn_cli", "dpn_cli.errors"),
    ("dpn_cli.arch", "dpn_cli.statistics"),
    ("dpn_cli.config",),
    ("dpn_cli.run",),
    ("dpn_cli.sweep",),
    ("dpn_cli.model",),
    ("dpn_cli.weights",),
    ("dpn_cli.engine",),
    ("dpn_cli.data",),
    ("dpn_cli.metrics",),
    ("dpn_cli.report",),
    ("dpn_cli.analysis",),
    ("dpn_cli.doctor",),
    ("tasks",),
    ("dpn_cli.commands", "dpn_cli.reproduce", "dpn_cli.sweep.runner", "dpn_cli.sweep.pairs"),
    ("dpn_cli.cli", "dpn_cli.__main__"),
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor(module: str) -> int:
    """The number of the room that a module is in."""
    names = {name: number for number, room in enumerate(ROOMS) for name in room}
    while module not in names:
        module = module.rpartition(".")[0]
    return names[module]


def imports(path: Path) -> set[str]:
    return _imported(ast.walk(ast.parse(path.read_text())))


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inside if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()} or {
                node.module
            }
    return {name for name in found if name.split(".")[0] in {"dpn_cli", "tasks"}}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    here = name_of(path)
    for there in imports(path):
        assert floor(there) <= floor(here), f"{here} imports {there}"
        if here.startswith("tasks."):
            same_task = there.split(".")[:2] == here.split(".")[:2]
            assert not there.startswith("tasks.") or same_task, f"{here} imports another task: {there}"


def test_nothing_lies_flat_beside_the_rooms() -> None:
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
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, node.name


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
    done = run_program(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{script}", str(installed)],
        cwd=tmp_path,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    for path in (ROOT / "configs").iterdir():
        assert path.stem in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.stem)
def test_what_a_test_starts_has_a_time_limit(path: Path) -> None:
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    without = {"run", "call", "check_call", "check_output", "Popen", "getoutput"}
    assert not called & {f"subprocess.{name}" for name in without}, "use programs.run_program or started"
    assert not called & {"start_processes", "mp.spawn", "os.system", "os.fork"}, "use conftest.run_ranks"


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
