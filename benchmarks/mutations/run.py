"""Break the program in one place at a time and report which breakages the tests notice.

    python benchmarks/mutations/run.py                     # all mutations, two at a time
    python benchmarks/mutations/run.py vtab lit --jobs 1   # those of some lists
    python benchmarks/mutations/run.py --match ledger      # those whose description holds a word

A mutation replaces one piece of text in a copy of the checkout and runs the test files that should notice. It is
noticed when a test fails or runs into the time limit. The report lists the survivors; the exit code is 1 when fewer
than 95 % are noticed. ``--check`` only verifies that every mutation still applies.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
LISTS = ("core", "data", "checkpoints", "classify", "vtab", "lit", "segment")
BAR = 0.95
Row = tuple[str, str, str, str, str]


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


def outcome(mutation: Mutation, copy: Path, limit: int) -> str:
    """Apply a mutation in `copy`, run its tests, take it back; returns ``noticed``, ``timeout`` or ``survived``.

    Raises `RuntimeError` when pytest cannot run the tests at all.
    """
    path = copy / mutation.file
    before = path.read_text("utf-8")
    path.write_text(mutation.applied(copy), "utf-8")
    # Files one by one: the first failure is enough, and most mutations fail in the first file.
    try:
        for test in mutation.tests.split():
            code = _tested(test, copy, limit)
            if code is None:
                return "timeout"
            if code > 1:
                raise RuntimeError(f"{mutation.breaks}: pytest could not run {test} (exit code {code})")
            if code:
                return "noticed"
    finally:
        path.write_text(before, "utf-8")
    return "survived"


def _tested(test: str, copy: Path, limit: int) -> int | None:
    """Return pytest's exit code for one file or test of `copy`, or None when it ran into the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever processes the test has started
            return None


def _problem(mutation: Mutation) -> str | None:
    try:
        mutation.applied(ROOT)
    except ValueError as error:
        return str(error)
    missing = [test for test in mutation.tests.split() if not (ROOT / test).is_file()]
    return f"{mutation.group}: {mutation.breaks}: no such test: {', '.join(missing)}" if missing else None


def main() -> None:
    """Run the mutations and print a table of what was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"which lists: {', '.join(LISTS)} (default: all)")
    parser.add_argument("--match", default="", help="only mutations whose description holds this text")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout that are tested side by side")
    parser.add_argument("--limit", type=int, default=300, help="seconds until a hanging test counts as noticed")
    parser.add_argument("--check", action="store_true", help="only see that every mutation applies to its file")
    asked = parser.parse_args()
    chosen = [m for m in mutations(asked.groups or LISTS) if asked.match in m.breaks]
    if stale := [problem for mutation in chosen if (problem := _problem(mutation))]:
        raise SystemExit("\n".join([f"{len(stale)} mutations do not apply any more:", *stale]))
    print(f"{len(chosen)} mutations apply", flush=True)
    if asked.check:
        return
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        copies: Queue[Path] = Queue()
        for number in range(asked.jobs):
            copies.put(copy_of_the_checkout(Path(scratch) / str(number)))

        def tried(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                said = outcome(mutation, copy, asked.limit)
            finally:
                copies.put(copy)
            print(f"{said:9} {mutation.group:12} {mutation.file}: {mutation.breaks}", flush=True)
            return said

        said = list(pool.map(tried, chosen))
    survivors = [mutation for mutation, what in zip(chosen, said, strict=True) if what == "survived"]
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    for group in dict.fromkeys(mutation.group for mutation in chosen):
        lost = sum(mutation.group == group for mutation in survivors)
        print(f"  {group}: {sum(mutation.group == group for mutation in chosen) - lost} noticed, {lost} survived")
    raise SystemExit(len(survivors) > (1 - BAR) * len(chosen))


if __name__ == "__main__":
    main()
