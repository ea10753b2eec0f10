"""How the program's process ends, and what it does without the terminal that it was started from."""

from __future__ import annotations

import os
import pty
import sys
from importlib import metadata
from pathlib import Path

import pytest

from dpn_cli.commands import one_line_errors
from support.programs import LIMIT, program_environment, run_program, start_program

LEAVE = """
import atexit
import sys
import threading

from dpn_cli.run import process


class Kept:
    def __del__(self):
        print("the interpreter was taken down")


kept = Kept()
process.prepare()
atexit.register(print, "registered")
with process.fast_exit():
    threading.Timer(0.1, print, ["a thread's work"]).start()
    print("result", flush=True)
    {end}
"""


def test_the_program_ends_without_taking_down_the_interpreter() -> None:
    result = run_program([sys.executable, "-c", LEAVE.format(end="sys.exit(3)")])
    assert result.returncode == 3, result.stderr
    assert sorted(result.stdout.splitlines()) == ["a thread's work", "registered", "result"]


def test_unexpected_errors_end_the_program_with_a_traceback() -> None:
    result = run_program([sys.executable, "-c", LEAVE.format(end="raise ValueError('broken')")])
    assert result.returncode == 1
    assert "ValueError: broken" in result.stderr
    assert "the interpreter was taken down" in result.stdout


@pytest.mark.parametrize("where", ["cli.app", "cli.print"])  # before the command line is read, and within it
def test_an_interrupt_before_the_work_starts_is_one_line(where: str) -> None:
    interrupt = f"{where} = lambda *_: signal.raise_signal(signal.SIGINT)"
    code = f"import signal; from dpn_cli import cli; {interrupt}; cli.main()"
    result = run_program([sys.executable, "-c", code, "--version"])
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")


INTERRUPTED = """
import runpy
import sys


class Importing:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt


sys.meta_path.insert(0, Importing())
runpy.run_module("dpn_cli", run_name="__main__")
"""


def test_an_interrupt_while_the_program_is_imported_is_one_line() -> None:
    result = run_program([sys.executable, "-c", INTERRUPTED])
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")
    (command,) = metadata.entry_points(group="console_scripts", name="dpn")
    assert command.value == "dpn_cli.__main__:main"


@pytest.mark.parametrize(
    ("arguments", "message"), [({"resume": False}, "the state since the last checkpoint"), ({}, "")]
)
def test_a_second_interrupt_reports_the_lost_steps(
    arguments: dict[str, bool], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors(arguments):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    lost = f": {message} is lost" if message else ""
    assert capsys.readouterr().err == f"error: interrupted at once{lost}\n"


def test_the_program_exits_immediately() -> None:
    code = "from dpn_cli import cli; kept = type('Kept', (), {'__del__': lambda it: print('late')})()"
    result = run_program([sys.executable, "-c", f"{code}; cli.main()", "configs", "show"])
    assert result.returncode == 2
    assert "late" not in result.stdout
    assert "error: " in result.stderr


OUTLIVE = """
import sys
import warnings
from pathlib import Path

from dpn_cli.run import process
from dpn_cli.run.console import Console, show

process.prepare()
print("ready", flush=True)
sys.stdin.read()
with process.fast_exit():
    show("result")
    Console().warn("warning")
    warnings.warn("another")
    Path(sys.argv[1]).write_text("kept")
    sys.exit(0)
"""


def test_a_terminal_that_has_closed_takes_nothing_with_it(tmp_path: Path) -> None:
    actual, expected = pty.openpty()
    reader, writer = os.pipe()
    streams = {"stdin": reader, "stdout": expected, "stderr": expected}
    command = [sys.executable, "-c", OUTLIVE, str(tmp_path / "file")]
    with start_program(command, start_new_session=True, **streams) as process:
        os.close(expected)
        os.close(reader)
        assert os.read(actual, 100).startswith(b"ready")
        os.close(actual)
        os.close(writer)
        assert process.wait(LIMIT) == 0
    assert (tmp_path / "file").read_text() == "kept"


FRESH = """
import ctypes
import resource

from dpn_cli.run import process

system = ctypes.CDLL(None)
system.malloc.restype, system.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
system.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def step():
    tensors = [system.malloc(6 * 2**20) for _ in range(4)]
    for tensor in tensors:
        system.memset(tensor, 1, 6 * 2**20)
    for tensor in tensors:
        system.free(tensor)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


process.prepare()
first, *_, last = (step() for _ in range(20))
print(last - first)
"""


def test_steps_reuse_the_memory_of_earlier_steps() -> None:
    system = {name: value for name, value in program_environment().items() if not name.startswith("MALLOC_")}
    fresh = [
        int(run_program([sys.executable, "-c", FRESH], env={**system, **chosen}).stdout)
        for chosen in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"})
    ]
    assert 100 * fresh[0] < fresh[1]
