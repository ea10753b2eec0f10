"""Break the program in one place at a time and report which breakages the tests notice.

    python benchmarks/mutations/run.py                     # all mutations, two at a time
    python benchmarks/mutations/run.py vtab lit --jobs 1   # those of some lists
    python benchmarks/mutations/run.py --match ledger      # those whose description holds a word
    python benchmarks/mutations/run.py --new               # those that no test has noticed yet

A mutation replaces one piece of text in a copy of the checkout and runs the test files that should notice. It is
noticed when a test fails, or a file runs into the time limit, that passes without the mutation; one that does not is
``red`` and notices nothing. The report names the test; the exit code is 1 when fewer than 95 % of the mutations are
noticed. ``--check`` only verifies that every mutation still applies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
LISTS = (
    "core",
    "norms",
    "data",
    "remote",
    "checkpoints",
    "readers",
    "classify",
    "distill",
    "vtab",
    "lit",
    "segment",
    "compare",
    "jobs",
    "reproduce",
    "report",
    "pages",
    "inspect",
    "checks",
    "faults",
    "prepare",
)
BAR = 0.95
SEEN = {"noticed", "timeout"}
# Which test has noticed which mutation before: it is tried first.
NOTICED, WRITING = Path(__file__).with_name("noticed.json"), Lock()
Row = tuple[str, str, str, str, str]
# What imports for seconds is imported once, by the process from which all those that run tests are forked.
LIBRARIES = ["pytest", "timm", "torchvision", "torchmetrics", "open_clip"]
FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Mutation:
    """Text `old` of `file` becomes `new`, which breaks what `breaks` says; `tests` are the files that should notice.

    `old` occurs once in the file, so that the place is certain.
    """

    group: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    @property
    def name(self) -> str:
        """The breakage, and of what."""
        return f"{self.group}: {self.breaks}"

    def applied(self, root: Path) -> str:
        """Return the mutated text. Raises `ValueError` unless `old` occurs exactly once."""
        text = (root / self.file).read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.group}: {self.file}: {text.count(self.old)} places for {self.old!r}")
        return text.replace(self.old, self.new)


def mutations(groups: Sequence[str]) -> list[Mutation]:
    """Return the mutations of some lists, in order."""
    sys.path.insert(0, str(Path(__file__).parent))
    found = []
    for group in groups:
        rows: list[Row] = importlib.import_module(f"{group}_mutations").MUTATIONS
        found += [Mutation(group, *row) for row in rows]
    return found


def copy_of_the_checkout(folder: Path) -> Path:
    """Copy what git tracks into `folder`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True)
class Verdict:
    """``noticed`` or ``timeout`` by a test that passes without the mutation, ``red`` by another, or ``survived``."""

    said: str
    by: str = ""


class Trial:
    """Applies mutations in a copy of the checkout, and remembers which tests pass there without any."""

    def __init__(self, copy: Path, limit: int, hints: dict[str, str]) -> None:
        self.copy, self.limit, self.hints, self.green = copy, limit, hints, set[str]()

    def outcome(self, mutation: Mutation) -> Verdict:
        """Apply a mutation, run its tests, take it back. Raises `RuntimeError` when pytest cannot run the tests."""
        path = self.copy / mutation.file
        before = path.read_text("utf-8")
        path.write_text(mutation.applied(self.copy), "utf-8")
        try:
            first = (self.hints.get(mutation.name, ""), mutation.breaks)
            code, test = run_tests(mutation.tests.split(), self.copy, self.limit, first)
        finally:
            path.write_text(before, "utf-8")
        if code == 0:
            return Verdict("survived")
        if not test:
            raise RuntimeError(f"{mutation.breaks}: pytest could not run {mutation.tests} (exit code {code})")
        if test not in self.green and run_tests([test], self.copy, self.limit)[0] != 0:
            return Verdict("red", test)
        self.green.add(test)
        return Verdict("timeout" if code is None else "noticed", test)


def run_tests(tests: list[str], copy: Path, limit: int, first: tuple[str, str] = ("", "")) -> tuple[int | None, str]:
    """Run test files, or tests, of `copy` until one fails.

    `first` is the test to begin with, and words: tests that have them in their names come before the others.
    Returns pytest's exit code, or None past the limit, and the test that failed or was running.
    """
    receiving, sending = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_pytest, args=(tests, copy, first, sending))
    process.start()
    sending.close()
    assert process.pid
    code, test, until = 1, "", time.monotonic() + limit  # 1: the process ended before pytest did
    hangs = True
    with receiving, suppress(EOFError):
        while receiving.poll(max(0.0, until - time.monotonic())):
            said = receiving.recv()
            if isinstance(said, int):
                code, hangs = said, False
                break
            test = said
    hangs = hangs and process.is_alive() and time.monotonic() >= until
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with whatever processes the test has started
    process.join()
    return None if hangs else code, test


def _pytest(tests: list[str], copy: Path, first: tuple[str, str], sending: Connection) -> None:
    """Run tests in a process that has imported the libraries already."""
    import pytest

    multiprocessing.set_start_method(None, force=True)  # the system's own, for what the tests start
    os.setsid()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    class Plugin:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            hint, words = first[0], _stems(first[1])
            items.sort(key=lambda item: (item.nodeid != hint, -len(words & _stems(item.nodeid.partition("::")[2]))))

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            sending.send(nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                sending.send(report.nodeid)

    sending.send(int(pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests], plugins=[Plugin()])))
    os._exit(0)  # a test may have left threads behind


def _stems(text: str) -> set[str]:
    return {word[:5] for word in re.findall("[a-z0-9]{3,}", text.lower())} - {
        "the",
        "and",
        "are",
        "that",
        "what",
        "test",
    }


def _problem(mutation: Mutation) -> str | None:
    try:
        mutation.applied(ROOT)
    except ValueError as error:
        return str(error)
    missing = [test for test in mutation.tests.split() if not (ROOT / test).is_file()]
    return f"{mutation.group}: {mutation.breaks}: no such test: {', '.join(missing)}" if missing else None


def keep(noticed: dict[str, str], names: Sequence[str]) -> None:
    """Write down which test has noticed each of the mutations of these names."""
    with WRITING:
        kept = {name: noticed[name] for name in names if noticed.get(name)}
        NOTICED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Run the mutations and print a table of what was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"which lists: {', '.join(LISTS)} (default: all)")
    parser.add_argument("--match", default="", help="only mutations whose description holds this text")
    parser.add_argument("--new", action="store_true", help="only mutations that no test has noticed yet")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout that are tested side by side")
    parser.add_argument("--limit", type=int, default=300, help="seconds until a hanging test counts as noticed")
    parser.add_argument("--check", action="store_true", help="only see that every mutation applies to its file")
    asked = parser.parse_args()
    hints: dict[str, str] = json.loads(NOTICED.read_text("utf-8")) if NOTICED.is_file() else {}
    names = [mutation.name for mutation in mutations(LISTS)]
    chosen = [m for m in mutations(asked.groups or LISTS) if asked.match in m.breaks]
    if asked.new:
        chosen = [mutation for mutation in chosen if mutation.name not in hints]
    if stale := [problem for mutation in chosen if (problem := _problem(mutation))]:
        raise SystemExit("\n".join([f"{len(stale)} mutations do not apply any more:", *stale]))
    print(f"{len(chosen)} mutations apply", flush=True)
    if asked.check:
        return
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    FORKS.set_forkserver_preload(LIBRARIES)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        trials: Queue[Trial] = Queue()
        for number in range(asked.jobs):
            trials.put(Trial(copy_of_the_checkout(Path(scratch) / str(number)), asked.limit, hints))

        def tried(mutation: Mutation) -> str:
            began, trial = time.monotonic(), trials.get()
            try:
                verdict = trial.outcome(mutation)
            finally:
                trials.put(trial)
            seconds = f"{time.monotonic() - began:4.0f} s"
            place = f"{mutation.group:12} {mutation.file}: {mutation.breaks}"
            print(f"{verdict.said:9}{seconds} {place}  [{verdict.by}]", flush=True)
            hints[mutation.name] = verdict.by if verdict.said in SEEN else ""
            keep(hints, names)  # at once: the run may be stopped
            return verdict.said

        said = list(pool.map(tried, chosen))
    lost = [m for m, what in zip(chosen, said, strict=True) if what not in SEEN]
    print(f"\n{len(chosen) - len(lost)} of {len(chosen)} noticed")
    for group in dict.fromkeys(mutation.group for mutation in chosen):
        here = [mutation for mutation in chosen if mutation.group == group]
        print(f"  {group}: {sum(mutation not in lost for mutation in here)} of {len(here)} noticed")
    raise SystemExit(len(lost) > (1 - BAR) * len(chosen))


if __name__ == "__main__":
    main()
