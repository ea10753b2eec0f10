"""Leases: one process at a time, whatever dies, with clocks that do not agree."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import started

from dpn_cli.run import leases as module
from dpn_cli.run.leases import BEAT, PATIENCE, Lease, LeaseLostError, Leases


class Clock:
    """A clock that starts anywhere and runs at a rate of its own."""

    def __init__(self, start: float, rate: float = 1.0) -> None:
        self.start, self.rate, self.now = start, rate, 0.0

    def __call__(self) -> float:
        return self.start + self.rate * self.now


def process(folder: Path, name: str, clock: Callable[[], float]) -> Leases:
    return Leases(folder, clock, {"token": name, "host": name})


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Leases, Leases, Clock, Clock]:
    one, two = Clock(1e6), Clock(-50.0)
    return process(tmp_path, "one", one), process(tmp_path, "two", two), one, two


def taken(leases: Leases, name: str) -> Lease:
    lease = leases.take(name)
    assert lease is not None
    return lease


def test_only_one_process_has_a_lease_and_the_next_gets_it_when_it_is_released(
    pair: tuple[Leases, Leases, Clock, Clock],
) -> None:
    one, two, *_ = pair
    lease = taken(one, "none/caltech101")
    assert one.take("none/caltech101") is None
    assert two.take("none/caltech101") is None
    assert two.take("none/caltech10")
    assert two.taken() == ["none/caltech101"]
    lease.release()
    assert two.taken() == []
    taken(two, "none/caltech101").confirm()
    assert one.take("none/caltech101") is None


def test_one_of_two_processes_that_take_over_at_the_same_time_has_the_lease(
    pair: tuple[Leases, Leases, Clock, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, *_ = pair
    monkeypatch.setattr(two, "newest", lambda name: None)  # what it has seen before the other one takes it
    lease = taken(one, "cell")
    assert two.take("cell") is None
    lease.confirm()


def test_an_owner_that_beats_keeps_its_lease_whatever_the_other_clock_says(
    pair: tuple[Leases, Leases, Clock, Clock],
) -> None:
    one, two, mine, theirs = pair
    lease = taken(one, "cell")
    for _ in range(100):
        mine.now += BEAT
        theirs.now += BEAT * 3  # a clock that runs three times too fast
        one.beat()
        lease.check()
        assert two.take("cell") is None


def test_an_owner_that_is_silent_loses_its_lease_and_notices_it(pair: tuple[Leases, Leases, Clock, Clock]) -> None:
    one, two, mine, theirs = pair
    lease = taken(one, "cell")
    assert two.take("cell") is None
    theirs.now += PATIENCE - 1
    assert two.take("cell") is None
    theirs.now += 1
    taken(two, "cell").confirm()
    lease.check()  # by its own clock no time has passed, and nothing has been looked at
    mine.now += PATIENCE
    with pytest.raises(LeaseLostError, match="cell: another process has taken it over"):
        lease.check()
    lease.release()
    two.beat()
    assert one.take("cell") is None


def test_an_owner_looks_before_it_writes_a_result(pair: tuple[Leases, Leases, Clock, Clock]) -> None:
    one, two, _, theirs = pair
    lease = taken(one, "cell")
    assert two.take("cell") is None
    theirs.now += PATIENCE
    taken(two, "cell")
    with pytest.raises(LeaseLostError):
        lease.confirm()


def test_of_many_that_see_a_dead_owner_one_takes_over(tmp_path: Path) -> None:
    taken(process(tmp_path, "dead", Clock(0)), "cell")
    clock = Clock(5)
    others = [process(tmp_path, f"other{number}", clock) for number in range(20)]
    assert not any(other.take("cell") for other in others)
    clock.now += PATIENCE
    assert sum(other.take("cell") is not None for other in others) == 1


def test_a_process_of_this_machine_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dpn_cli.run.leases import Leases;"
        f"assert Leases(Path({str(tmp_path)!r})).take('cell'); print('taken', flush=True); sys.stdin.read()"
    )
    with started([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == "taken\n"
        mine = Leases(tmp_path)
        assert mine.take("cell") is None
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert (mine.take("cell") is not None) is sys.platform.startswith("linux")


def test_the_thread_beats_and_the_end_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 1e-3)
    leases = Leases(tmp_path)
    with leases.beating():
        taken(leases, "cell")
        (path,) = tmp_path.glob("cell/0")
        first = path.read_text()
        for _ in range(100_000):
            if path.read_text() != first:
                break
        assert path.read_text() != first
    assert Leases(tmp_path).taken() == []


class Nodes:
    """Nodes that take cells, beat, stall for longer than the patience, die and come back, each with its own clock."""

    def __init__(self, folder: Path, cells: int, nodes: int) -> None:
        self.folder, self.chance = folder, random.Random(0)
        self.finished = {f"cell{number}": 0 for number in range(cells)}
        self.clocks = [Clock(self.chance.uniform(-1e6, 1e6), self.chance.uniform(0.99, 1.01)) for _ in range(nodes)]
        self.nodes = [process(folder, f"node{number}.0", clock) for number, clock in enumerate(self.clocks)]
        self.work: dict[int, tuple[Lease, int]] = {}
        self.stalled: dict[int, int] = {}
        self.lost = self.died = 0

    def turn(self, turn: int) -> bool:
        """Let the time of a beat pass; return whether there is something left to do."""
        for clock in self.clocks:
            clock.now += BEAT
        for number in self.chance.sample(range(len(self.nodes)), len(self.nodes)):
            if self.stalled.get(number, 0) > turn:
                continue
            event = self.chance.random()
            if event < 0.002:
                self.died += 1
                self.nodes[number] = process(self.folder, f"node{number}.{turn}", self.clocks[number])
                self.work.pop(number, None)
            elif event < 0.01:
                self.stalled[number] = turn + self.chance.randint(1, 40)
            elif number in self.work:
                self.go_on(number)
            else:
                self.begin(number)
        return bool(self.work) or not all(self.finished.values())

    def begin(self, number: int) -> None:
        todo = [name for name, times in self.finished.items() if not times]
        lease = self.nodes[number].take(self.chance.choice(todo)) if todo else None
        if lease:
            self.work[number] = lease, self.chance.randint(1, 4)

    def go_on(self, number: int) -> None:
        lease, left = self.work.pop(number)
        try:
            lease.check()
            self.nodes[number].beat()
            if left:
                self.work[number] = lease, left - 1
                return
            lease.confirm()
            self.finished[lease.name] += 1
        except LeaseLostError:
            self.lost += 1
        lease.release()


def test_a_thousand_cells_on_a_hundred_nodes_that_die_are_each_finished_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, cells=1000, nodes=100)
    for turn in range(3000):
        if not nodes.turn(turn):
            break
    assert set(nodes.finished.values()) == {1}
    assert min(nodes.died, nodes.lost) > 5
