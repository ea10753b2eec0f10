"""The program as it is installed: from a wheel, and beside files of the names of its packages."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from support.programs import ROOT, run_program

SCRIPT = Path(sys.executable).with_name("dpn")
ENTRIES = [[sys.executable, "-m", "dpn_cli"], *([[str(SCRIPT)]] if SCRIPT.exists() else [])]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: Path(entry[-1]).name)
def test_files_of_a_stranger_are_not_imported(entry: list[str], tmp_path: Path) -> None:
    for name in ("tasks", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')\n")
    result = run_program([*entry, "finetune", "highres", "--help"], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "--checkpoint" in result.stdout


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_trains(tmp_path: Path) -> None:
    """Its dependencies are those of the tests' environment; the checkout and its installation are out of reach."""
    built = run_program([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    own = [folder for folder in sys.path if Path(folder).name == "site-packages"]
    (packages / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in own))
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv"), "install", "-q", "--no-index", "--no-deps"]
    installed = run_program([*pip, str(wheel)], cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept | {"DPN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    for command in (
        "finetune vtab --data demo --tasks demo_color --seeds 1 --steps 20",
        "finetune vtab --arch B/32 --dry-run",
        "lit train --dry-run",
        "segment ade20k --fraction 0.25 --dry-run",
    ):
        words = [str(tmp_path / "venv" / "bin" / "dpn"), *command.split()]
        result = run_program(words, cwd=tmp_path, env=environment)
        assert result.returncode == 0, (command, result.stderr)
    where = run_program(
        [
            str(tmp_path / "venv" / "bin" / "python"),
            "-c",
            "import dpn_cli, tasks; print(dpn_cli.__file__, tasks.__file__)",
        ],
        cwd=tmp_path,
        env=environment,
    )
    assert all(Path(path).is_relative_to(packages) for path in where.stdout.split())
