"""Rules of the project's layout: the layers that imports keep to, and the sizes of files."""

from __future__ import annotations

import ast
from pathlib import Path

from support.programs import ROOT

MODULES = [path for package in ("dpn_cli", "tasks") for path in sorted((ROOT / package).rglob("*.py"))]
# Rooms from the bottom to the top: a module may import from its own room and those below. Only commands know tasks.
ROOMS = (
    ("dpn_cli", "dpn_cli.errors"),
    ("dpn_cli.arch", "dpn_cli.statistics"),
    ("dpn_cli.config",),
    ("dpn_cli.run",),
    ("dpn_cli.model",),
    ("dpn_cli.weights",),
    ("dpn_cli.sweep",),
    ("dpn_cli.engine",),
    ("dpn_cli.data",),
    ("dpn_cli.metrics",),
    ("dpn_cli.report",),
    ("dpn_cli.analysis",),
    ("dpn_cli.doctor",),
    ("tasks",),
    ("dpn_cli.commands", "dpn_cli.reproduce"),
    ("dpn_cli.cli", "dpn_cli.__main__"),
)


def name_of(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a module."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def floor(module: str) -> int:
    """Return the number of the room that a module is in."""
    names = {name: number for number, room in enumerate(ROOMS) for name in room}
    while module not in names:
        module = module.rpartition(".")[0]
    return names[module]


def imports(path: Path, root: Path = ROOT) -> set[str]:
    """Return the modules of the project that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in members if (root / name.replace(".", "/")).with_suffix(".py").is_file()}
            names |= modules or {node.module}
    return {name for name in names if name.split(".")[0] in {"dpn_cli", "tasks"}}


def check_imports(path: Path, root: Path = ROOT) -> None:
    """Assert that a module imports from its own room and those below, and that tasks do not import each other."""
    module = name_of(path, root)
    for imported in imports(path, root):
        assert floor(imported) <= floor(module), f"{module} imports {imported}"
        if module.startswith("tasks."):
            same_task = imported.split(".")[:2] == module.split(".")[:2]
            assert not imported.startswith("tasks.") or same_task, f"{module} imports another task: {imported}"


def check_size(path: Path) -> None:
    """Assert that a file and its functions are short."""
    assert len(path.read_text().splitlines()) <= 350
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, node.name
