"""The faults: what each does to a run, from inside it, from outside, and to the files that it leaves."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from program import Inside, Phases, Program, children
from toys import draw

Outside = Callable[[Program, Path, random.Random], bool]
"""``during(program, data, g)`` disturbs a program at work; it returns False where there was nothing to disturb."""
Damage = Callable[[Path, random.Random], bool]
"""``after(folder, g)`` damages what a run left; it returns False where there was nothing to damage."""
Within = Callable[[Path, int, random.Random], Inside]
"""``within(place, writes, g)`` returns what to do inside the process first; a whole run writes so many times."""


@dataclass(frozen=True)
class Fault:
    """A fault. After it, the run is resumed as often as it takes.

    Attributes:
        within: what is done inside the process before it runs.
        during: what is done to it at a random moment.
        after: what is done to its folder when it has ended.
        codes: exit codes that the disturbed process may have, besides 0 with a result that is right.
        refused: whether the run may refuse to go on, in one line, because something that it needs is lost.
        curves: whether the curves must be whole.
        repeated: whether what resumes may meet the fault again.
        exchanged: whether it changes the data, which are put back before the run is resumed.
        options: of the command.
        ranks: processes that run it.
    """

    within: Within | None = None
    during: Outside | None = None
    after: Damage | None = None
    codes: tuple[int, ...] = (1,)
    refused: bool = False
    curves: bool = True
    repeated: bool = False
    exchanged: bool = False
    options: tuple[str, ...] = ("-j", "0")
    ranks: int = 1

    @property
    def kills(self) -> bool:
        """Whether a process that it met was killed."""
        return -signal.SIGKILL in self.codes


def send(number: int) -> Outside:
    """Send a signal."""

    def during(program: Program, data: Path, g: random.Random) -> bool:
        program.signal(number)
        return True

    return during


def kill_worker(program: Program, data: Path, g: random.Random) -> bool:
    """Kill one of the processes that read data, as soon as there is one."""
    while program.poll() is None:
        if found := children(program.pid):
            os.kill(g.choice(found), signal.SIGKILL)
            return True
        time.sleep(0.001)
    return False


def replace_image(program: Program, data: Path, g: random.Random) -> bool:
    """Put another image in the place of one, as programs do that write to a new file first."""
    path = g.choice(sorted(file for file in data.rglob("*") if file.suffix in (".jpg", ".png")))
    new = path.with_name(f"new{path.suffix}")
    draw(new, g.randrange(1000, 2000), side=g.randrange(24, 40))
    new.replace(path)
    return True


def _under(place: Path, name: object) -> bool:
    try:
        path = os.fsdecode(name)  # type: ignore[arg-type]
    except TypeError:  # a descriptor
        return False
    return Path.cwd().joinpath(path).is_relative_to(place)


def count_writes(place: Path, writes: list[int]) -> Inside:
    """Count in `writes`, which is shared memory, how often a process writes below a folder."""

    def count(name: str) -> None:
        writes[0] += 1

    return on_write(place, 1, count)


def on_write(place: Path, number: int, act: Callable[[str], None]) -> Inside:
    """Call ``act(name)`` at a process's n-th write below a folder, before it is done, and at all that follow."""
    seen = [0]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            mode, flags = arguments[1], arguments[2]
            writes = any(letter in str(mode or "") for letter in "wax+") or bool(
                isinstance(flags, int) and mode is None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
        else:
            writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        if writes and _under(place, arguments[0]):
            seen[0] += 1
            if seen[0] >= number:
                act(os.fsdecode(arguments[0]))  # type: ignore[arg-type]

    return lambda phases: sys.addaudithook(hook)


def fill_disk(place: Path, writes: int, g: random.Random) -> Inside:
    """Let no file grow from the n-th write on, or none above a size from the start."""
    number = g.randrange(1, writes + 1)
    size = g.choice([0, 0, 1, 100, 3000, 20_000])

    def full(name: str) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return on_write(place, number, full)


def forbid_writing(place: Path, writes: int, g: random.Random) -> Inside:
    """Have the folder read-only from the n-th write on, in half of the runs from the first."""

    def refuse(name: str) -> None:
        raise OSError(30, "Read-only file system", name)

    return on_write(place, 1 if g.random() < 0.5 else g.randrange(1, writes + 1), refuse)


def die_at_write(place: Path, writes: int, g: random.Random) -> Inside:
    """Die at the n-th write."""
    return on_write(place, g.randrange(1, writes + 1), lambda name: os.kill(os.getpid(), signal.SIGKILL))


def set_clock_back(place: Path, writes: int, g: random.Random) -> Inside:
    """Set the clock back by a day at the n-th write."""
    true, back = time.time, [0.0]

    def inside(phases: Phases) -> None:
        time.time = lambda: true() - back[0]  # type: ignore[assignment]
        on_write(place, g.randrange(1, writes + 1), lambda name: back.__setitem__(0, 86_400.0))(phases)

    return inside


def lose_tracker(place: Path, writes: int, g: random.Random) -> Inside:
    """Have a tracker whose n-th call fails, the first one included."""
    left = [g.randrange(0, 5)]

    def call(*arguments: object, **named: object) -> SimpleNamespace:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError("the tracker is out of reach")
        return SimpleNamespace(log=call, define_metric=call)

    return lambda phases: sys.modules.__setitem__("wandb", SimpleNamespace(init=call))  # type: ignore[arg-type]


def damage_checkpoint(folder: Path, g: random.Random) -> bool:
    """Cut a file of the newest checkpoint off, or flip one of its bits."""
    files = sorted(path for path in folder.rglob("checkpoints/last/*") if path.stat().st_size)
    if not files:
        return False
    path = g.choice(files)
    content = bytearray(path.read_bytes())
    if g.random() < 0.5:
        content = content[: g.randrange(len(content))]
    else:
        content[g.randrange(len(content))] ^= 1 << g.randrange(8)
    path.write_bytes(content)
    return True


def cut_metrics(folder: Path, g: random.Random) -> bool:
    """Cut a log off in the middle of a line."""
    files = sorted(path for path in folder.rglob("metrics.jsonl") if path.stat().st_size > 2)
    if not files:
        return False
    path = g.choice(files)
    content = path.read_bytes()
    path.write_bytes(content[: g.randrange(1, len(content) - 1)])
    return True


KILL = Fault(during=send(signal.SIGKILL), codes=(-signal.SIGKILL,))
FAULTS = {
    "SIGKILL at a moment": replace(KILL, repeated=True),
    "SIGKILL at a write": Fault(within=die_at_write, codes=(-signal.SIGKILL,), repeated=True),
    "SIGTERM": Fault(during=send(signal.SIGTERM), codes=(75, -signal.SIGTERM)),
    "SIGINT": Fault(during=send(signal.SIGINT), codes=(130,)),
    "SIGUSR1": Fault(during=send(signal.SIGUSR1), codes=(75, -signal.SIGUSR1)),
    "disk full": Fault(within=fill_disk),
    "folder read-only": Fault(within=forbid_writing, codes=(1, 2)),
    "checkpoint damaged": replace(KILL, after=damage_checkpoint, refused=True),
    "metrics cut off": replace(KILL, after=cut_metrics, curves=False),
    "data worker killed": Fault(during=kill_worker, options=("-j", "2")),
    "image replaced": Fault(during=replace_image, codes=(3,), exchanged=True),
    "clock set back": replace(KILL, within=set_clock_back),
    "tracker unreachable": Fault(
        within=lose_tracker, codes=(), options=("-j", "0", "--set", "runtime.report_to=wandb")
    ),
    "one of two ranks killed": Fault(
        during=send(signal.SIGKILL), codes=(1, 75, -signal.SIGTERM, -signal.SIGKILL), ranks=2
    ),
}
