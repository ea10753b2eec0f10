"""Runs of all four tasks that meet faults: killed, out of disk, with damaged files, without a rank.

    python benchmarks/faults/run.py [--kills 50] [--rounds 10] [--tasks vtab lit] [--faults SIGKILL] [--json FILE]

Each run is resumed, and must end with the result, the curves and the weights of a run that met no fault, bit for bit,
or refuse in one line where something that it needs is lost. WRONG is everything else: another number, an error that is
not one line, a finished training that was done again, an exit code of 0 without a result, a process that does not end.
The exit code is 1 when anything was wrong.

The networks are small, and each program is forked from a process that has imported the libraries. What is not as in
life: a disk is full when a limit on file sizes is set, and read-only when an audit hook refuses to open files.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

from faults import FAULTS, Fault, count_writes
from outcome import Outcome, finished_cells
from program import PHASES, Ended, Inside, Program, preload
from toys import TASKS, WRITERS

LIMIT = 300.0  # seconds that a run may take on a busy machine
PATIENCE = 30.0  # seconds that a rank has to end by itself when another one has failed
TRIES = 2  # at a fault that has had no chance


class WrongError(Exception):
    """A run did what it must not do."""


@dataclass(frozen=True)
class Whole:
    """A run that met no fault: its outcome, its phases, and the number of its writes."""

    outcome: Outcome
    phases: Any
    writes: int


@dataclass
class Verdicts:
    """What became of the runs of a task that met a fault."""

    met: int = 0  # faults: a run may meet several
    equal: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)


class Matrix:
    """Runs of one task in a folder, and what becomes of them."""

    def __init__(self, name: str, data: Path, folder: Path, seed: int) -> None:
        self.name, self.task, self.data, self.folder = name, TASKS[name], data, folder
        self.g = random.Random(f"{name} {seed}")
        self.number = 0
        self.whole = cache(self._whole)

    def meet(self, fault: Fault) -> tuple[Verdicts, bool]:
        """Start a run that meets a fault, and resume it; returns the verdict, and whether the fault had a chance."""
        self.number += 1
        place, verdicts = self._place(f"{self.name}{self.number}", own=fault.exchanged), Verdicts()
        try:
            met = self._disturb(fault, place, verdicts)
            if met:
                self._finish(fault, place, verdicts)
        except (WrongError, TimeoutError) as error:
            met = True
            verdicts.wrong.append(f"{place.name}: {error}")
        if not verdicts.wrong:
            shutil.rmtree(place)
        return verdicts, met

    def _place(self, name: str, *, own: bool = False) -> Path:
        """Make a folder to run in, with the data in it, or a copy of its own of them."""
        place, data = self.folder / name, self.data / self.task.data
        place.mkdir()
        if own:
            shutil.copytree(data, place / "data")
        else:
            (place / "data").symlink_to(data)
        return place

    def _whole(self, ranks: int, options: tuple[str, ...]) -> Whole:
        place = self._place(f"{self.name}-whole{len(list(self.folder.iterdir()))}")
        writes = RawArray("i", 1)
        ended = self._start(place, options, [count_writes(place, writes), *[None] * (ranks - 1)])  # type: ignore[arg-type]
        for one in ended:
            if one.wait(LIMIT).code:
                raise SystemExit(f"{self.name} without a fault: {one.wait(LIMIT).errors}")
        return Whole(Outcome.read(place / "run", self.task.weights), ended[0].phases, writes[0])

    def _start(
        self, place: Path, options: tuple[str, ...], inside: list[Inside | None], resume: bool = False
    ) -> list[Program]:
        words = self.task.command(*options, *(["--resume"] if resume else []))
        shared = {"DPN_HOME": str(self.folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if len(inside) == 1:
            return [Program(words, place, inside[0], shared)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = {"WORLD_SIZE": str(len(inside)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        each = [shared | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(inside))]
        return [Program(words, place, one, environment) for one, environment in zip(inside, each, strict=True)]

    def _disturb(self, fault: Fault, place: Path, verdicts: Verdicts) -> bool:
        """Let a run meet a fault, once or several times; returns whether it did."""
        whole = self.whole(fault.ranks, fault.options)
        others: list[Inside | None] = [None] * (fault.ranks - 1)
        for time_ in range(self.g.choice([1, 1, 2, 3]) if fault.repeated else 1):
            inside = fault.within(place, whole.writes, self.g) if fault.within else None
            programs = self._start(place, fault.options, [inside, *others], resume=time_ > 0)
            met, phase = True, ""
            if fault.during:
                victim = self.g.choice(programs)
                self._wait_for_a_moment(victim, whole, listed=fault.exchanged)
                phase = victim.phases.now
                met = victim.poll() is None and fault.during(victim, place / "data", self.g)
            ended = _wait_for_all(programs)
            self._judge(fault, ended, place)
            if not met or (fault.kills and all(one.code >= 0 for one in ended)):
                return time_ > 0
            verdicts.met += 1
            verdicts.phases[phase or ended[0].phase] += 1
            verdicts.said.update(one.said for one in ended if one.code > 0)
        return fault.after is None or fault.after(place / "run", self.g)

    def _wait_for_a_moment(self, program: Program, whole: Whole, *, listed: bool) -> None:
        """Wait for a random moment of a phase that is drawn among those that the whole run was in.

        With `listed` it is one in which the data have been listed: later changes are changes under the run.
        """
        phase = self.g.choice([name for name in PHASES[listed:] if whole.phases.visits(name)])
        visit = self.g.randrange(1, whole.phases.visits(phase) + 1)
        while program.phases.visits(phase) < visit and program.poll() is None:
            time.sleep(0.0005)
        time.sleep(self.g.random() * whole.phases.seconds(phase))

    def _judge(self, fault: Fault, ended: list[Ended], place: Path) -> None:
        """Look at how processes ended that may have met a fault. Raises `WrongError`."""
        for one in ended:
            if one.code > 0 and not one.clear:
                raise WrongError(f"not one line of error, code {one.code}: {one.errors[-1500:]}")
            if one.code not in (0, *fault.codes):
                raise WrongError(f"ended with {one.code}: {one.errors[-1500:]}")
        if all(one.code == 0 for one in ended):
            self._compare(fault, place)

    def _finish(self, fault: Fault, place: Path, verdicts: Verdicts) -> None:
        """Resume a run to its end, and compare it with a whole one. Raises `WrongError`."""
        if fault.exchanged:
            shutil.rmtree(place / "data")
            shutil.copytree(self.data / self.task.data, place / "data")
        before = finished_cells(place)
        programs = self._start(place, fault.options, [None] * fault.ranks, resume=True)
        ended = _wait_for_all(programs)
        if any(one.code for one in ended):
            if fault.refused and all(one.clear for one in ended):
                verdicts.refused += 1
                verdicts.said.update(one.said for one in ended)
                return
            raise WrongError(f"not resumed, code {ended[0].code}: {ended[0].errors[-1500:]}")
        after = finished_cells(place)
        if lost := [name for name, stamp in before.items() if after.get(name) != stamp]:
            raise WrongError(f"finished trainings were done again: {lost}")
        self._compare(fault, place)
        verdicts.equal += 1

    def _compare(self, fault: Fault, place: Path) -> None:
        if not (place / "run" / "result.json").is_file():
            raise WrongError("code 0 without a result")
        whole = self.whole(fault.ranks, fault.options)
        try:
            outcome = Outcome.read(place / "run", self.task.weights, curves=fault.curves)
        except ValueError as error:
            raise WrongError(f"a file of a finished run is damaged: {error!r}") from error
        if found := whole.outcome.differences(outcome, curves=fault.curves, files=fault.curves and not fault.exchanged):
            raise WrongError("; ".join(found))


def _wait_for_all(programs: list[Program]) -> list[Ended]:
    """Wait for the ranks of a run; when one has failed, the others are ended after a while; torchrun does at once."""
    began = late = time.monotonic()
    while any(program.poll() is None for program in programs) and time.monotonic() - began < LIMIT:
        time.sleep(0.01)
        ended = [one for program in programs if (one := program.poll())]
        if not any(one.code for one in ended):
            late = time.monotonic()
        elif time.monotonic() - late > 2 * PATIENCE:
            for program in programs:
                program.kill()
        elif time.monotonic() - late > PATIENCE:
            for program in programs:
                program.signal(signal.SIGTERM)
    return [program.wait(0) for program in programs]


def report(found: dict[str, dict[str, Verdicts]], folder: Path) -> str:
    """Return the table of all verdicts, and what was wrong."""
    lines = [f"{'fault':24} {'task':8} {'faults':>6} {'equal':>6} {'refused':>7} {'WRONG':>6}  met in"]
    for fault, tasks in found.items():
        for task, one in tasks.items():
            where = ", ".join(f"{phase} {count}" for phase, count in one.phases.most_common())
            lines.append(f"{fault:24} {task:8} {one.met:6} {one.equal:6} {one.refused:7} {len(one.wrong):6}  {where}")
    for fault, tasks in found.items():
        lines += [f"WRONG {fault}, {folder}/{what}" for one in tasks.values() for what in one.wrong]
    return "\n".join(lines)


def run(matrix: Matrix, fault: Fault, count: int) -> Verdicts:
    """Have runs meet a fault until it was met so many times."""
    total, missed = Verdicts(), 0
    while total.met < count and missed < TRIES * count:
        one, met = matrix.meet(fault)
        missed += not met
        if met:
            total = Verdicts(
                total.met + max(one.met, len(one.wrong)),
                total.equal + one.equal,
                total.refused + one.refused,
                total.wrong + one.wrong,
                total.said + one.said,
                total.phases + one.phases,
            )
    return total


def main() -> None:
    """Meet all faults, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills per task, half of them at a write")
    parser.add_argument("--rounds", type=int, default=10, help="runs per task and other fault")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--faults", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the counts and messages")
    asked = parser.parse_args()
    preload()
    chosen = {name: fault for name, fault in FAULTS.items() if name.startswith(tuple(asked.faults))}
    found: dict[str, dict[str, Verdicts]] = {name: {} for name in chosen}
    folder = Path(tempfile.mkdtemp(prefix="dpn-faults-"))
    data = folder / "data"
    for name, write in WRITERS.items():
        write(data / name)
    for task in asked.tasks:
        matrix = Matrix(task, data, folder, asked.seed)
        for name, fault in chosen.items():
            count = (asked.kills + 1) // 2 if fault.repeated else asked.rounds
            began = time.monotonic()
            one = found[name][task] = run(matrix, fault, count)
            print(f"{task}: {name}: {one.met} in {time.monotonic() - began:.0f} s", *one.wrong, sep="\n  ", flush=True)
    print(report(found, folder))
    if asked.json:
        asked.json.write_text(
            json.dumps({n: {t: vars(v) for t, v in tasks.items()} for n, tasks in found.items()}, indent=2)
        )
    if any(one.wrong for tasks in found.values() for one in tasks.values()):
        raise SystemExit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
