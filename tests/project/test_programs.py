"""What tests start ends in time, with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.programs import run_program

HANG = """
import subprocess, sys
wait = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.run(wait, pass_fds=[int(sys.argv[1])])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_program_that_hangs_is_killed_with_its_children() -> None:
    reading, writing = os.pipe()
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-c", HANG, str(writing)], limit=0.5, pass_fds=[writing])
    os.close(writing)
    assert os.read(reading, 1) == b""  # nobody else has the other end open
    os.close(reading)
