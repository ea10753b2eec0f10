"""Leases: one process at a time, whatever dies, with clocks that do not agree."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpn_cli.run import leases as module
from dpn_cli.run.leases import BEAT, PATIENCE, Lease, LeaseLostError, Leases

LIMIT = 60


class Clock:
    """A clock that starts anywhere and runs at a rate of its own."""

    def __init__(self, start: float, rate: float = 1.0) -> None:
        self.start, self.rate, self.now = start, rate, 0.0

    def __call__(self) -> float:
        return self.start + self.rate * self.now


def process(folder: Path, name: str, clock: Callable[[], float]) -> Leases:
    return Leases(folder, clock, {"token": name, "host": name})


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Leases, Leases, Clock, Clock]]:
    one, two = Clock(1e6), Clock(-50.0)
    yield process(tmp_path, "one", one), process(tmp_path, "two", two), one, two


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
    assert two.take("none/caltech101") is None and two.take("none/caltech10")
    assert two.taken() == ["none/caltech101"]
    lease.release()
    assert two.taken() == []
    taken(two, "none/caltech101").confirm()
    assert one.take("none/caltech101") is None


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
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "taken\n"
        mine = Leases(tmp_path)
        assert mine.take("cell") is None
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=LIMIT)
        assert (mine.take("cell") is not None) is sys.platform.startswith("linux")
    finally:
        child.kill()


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


def test_a_thousand_cells_on_a_hundred_nodes_that_die_are_each_finished_once(tmp_path: Path) -> None:
    """Nodes have clocks of their own, take cells, beat, stall for longer than the patience, die and come back."""
    chance = random.Random(0)
    finished: dict[str, int] = {f"cell{number}": 0 for number in range(1000)}
    clocks = [Clock(chance.uniform(-1e6, 1e6), chance.uniform(0.99, 1.01)) for _ in range(100)]
    nodes = [process(tmp_path, f"node{number}.0", clock) for number, clock in enumerate(clocks)]
    work: dict[int, tuple[Lease, int]] = {}
    stalled, lost, died = dict[int, int](), 0, 0
    for turn in range(3000):
        for clock in clocks:
            clock.now += BEAT
        for number in chance.sample(range(100), 100):
            if stalled.get(number, 0) > turn:
                continue
            event = chance.random()
            if event < 0.002:  # the node dies, and another comes in its place
                died, nodes[number] = died + 1, process(tmp_path, f"node{number}.{turn}", clocks[number])
                work.pop(number, None)
            elif event < 0.01:
                stalled[number] = turn + chance.randint(1, 40)
            elif number not in work:
                todo = [name for name, times in finished.items() if not times]
                name = chance.choice(todo) if todo else None
                lease = nodes[number].take(name) if name else None
                if lease and finished[lease.name]:
                    lease.release()
                elif lease:
                    work[number] = lease, chance.randint(1, 4)
            else:
                lease, left = work[number]
                try:
                    lease.check()
                    nodes[number].beat()
                    if left:
                        work[number] = lease, left - 1
                        continue
                    lease.confirm()
                    finished[lease.name] += 1
                    lease.release()
                except LeaseLostError:
                    lost += 1
                    lease.release()
                del work[number]
        if all(finished.values()) and not work:
            break
    assert set(finished.values()) == {1}
    assert died > 5 and lost > 5
