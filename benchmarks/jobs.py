"""Time sweeps as one process, with ``--jobs 2`` and with ``--engine ray``, on two cores.

    python benchmarks/jobs.py                          # everything; 11 minutes on 2 cores
    python benchmarks/jobs.py --only vtab,lit --small  # tries the script

One process runs on one core, ``--jobs 2`` and a local Ray on two, each process with one thread. Every way has to come
to the same numbers. Prints the rows of a table in Markdown; what misses its bar is bold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# At least how many times as fast two processes on two cores are, and the most seconds that Ray adds to a cell.
SPEED, RAY = 1.6, 2.0
DPN = (sys.executable, "-m", "dpn_cli")


@dataclass(frozen=True)
class Sweep:
    """A command line with so many trainings, and the ways in which it is timed."""

    name: str
    words: tuple[str, ...]
    cells: int
    ways: tuple[str, ...]


WAYS = {"one": (), "jobs": ("--jobs", "2"), "ray": ("--engine", "ray", "--jobs", "2")}


def sweeps(folder: Path, small: bool, seeds: int) -> dict[str, list[Sweep]]:
    """Return the sweeps by the name of their part; LiT starts from a network in the folder."""
    vtab = ("finetune", "vtab", "--data", "demo", "--compare", "none,dpn")
    lit = ("lit", "train", "--data", "demo", "--checkpoint", str(folder / "tower"), "--cache-dir", "CACHE")
    short = ("--steps", "6") if small else ()
    pretrain = ("pretrain", "--data", "demo", "--steps", "4", "--seeds", "4")
    return {
        "vtab": [Sweep("VTAB demo", (*vtab, *short), 72, ("one", "jobs"))],
        "lit": [Sweep("LiT demo", (*lit, "--seeds", str(seeds), *short), seeds, ("one", "jobs"))],
        "ray": [
            Sweep("VTAB demo, 20 steps each", (*vtab, "--steps", "20"), 72, ("jobs", "ray")),
            Sweep("pre-trainings of 4 steps", pretrain, 4, ("jobs", "ray")),
        ],
    }


def timed(words: Sequence[str], out: Path, cores: set[int]) -> float:
    """Run a command line on some cores, with one thread in each process; return its seconds."""
    line = [word if word != "CACHE" else str(out / "cache") for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*DPN, *line, "-o", str(out), "--device", "cpu", "--no-report", "-q"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(line)}: {done.stderr}")
    return time.perf_counter() - began


def numbers_of(result: dict[str, Any]) -> object:
    """Return the scores of a result, without its times."""
    networks = result["compare"]["networks"] if "scores" in result else {}
    return [one[score]["values"] for one in networks.values() for score in result["scores"]] or result["tasks"]


def bar(text: str, kept: bool, what: str) -> str:
    """Return a figure, bold with its bar where it misses it."""
    return text if kept else f"**{text}, {what}**"


def measure(sweep: Sweep, folder: Path, cores: Sequence[int]) -> list[str]:
    """Time a sweep in all its ways and return the rows of the table."""
    seconds, numbers = dict[str, float](), list[object]()
    for way in sweep.ways:
        out = folder / f"{sweep.name} {way}"
        seconds[way] = timed([*sweep.words, *WAYS[way]], out, set(cores[:1] if way == "one" else cores))
        numbers.append(numbers_of(json.loads((out / "result.json").read_text())))
        print(f"{sweep.name}, {way}: {seconds[way]:.1f} s", file=sys.stderr)
    if any(each != numbers[0] for each in numbers):
        sys.exit(f"{sweep.name}: the ways differ in their numbers")
    rows, jobs = list[str](), seconds["jobs"]
    if "one" in seconds:
        ratio = seconds["one"] / jobs
        told = bar(f"{ratio:.2f} ×", ratio >= SPEED, f"below {SPEED:g}")
        rows.append(
            f"| {sweep.name}, {sweep.cells} trainings: one process on one core against `--jobs 2` on two "
            f"| {seconds['one']:.1f} s : {jobs:.1f} s = {told} |"
        )
    if "ray" in seconds:
        more = (seconds["ray"] - jobs) / sweep.cells
        told = bar(f"{more:.2f} s", more <= RAY, f"above {RAY:g}")
        rows.append(
            f"| {sweep.name}, {sweep.cells} trainings: what a local Ray adds to each, its own start included "
            f"| {seconds['ray']:.1f} s - {jobs:.1f} s: {told} |"
        )
    return rows


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="vtab,lit,ray", help="parts, separated by commas")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of LiT (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a few steps of everything")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("needs two cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "lit" in given.only.split(","):
            timed(("pretrain", "--data", "demo", "--steps", "4"), folder / "tower", set(cores))
        for part in given.only.split(","):
            for sweep in sweeps(folder, given.small, given.seeds)[part]:
                line = f"python benchmarks/jobs.py --only {part}" + f" --seeds {given.seeds}" * (part == "lit")
                for row in measure(sweep, folder, cores):
                    print(f"{row} `{line}` |", flush=True)


if __name__ == "__main__":
    main()
