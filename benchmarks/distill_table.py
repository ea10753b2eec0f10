"""Distil the demo's plain tower in several ways, from several seeds, and print what each of them reaches as a table.

    python benchmarks/distill_table.py --out runs/distill_table            # 18 trainings of two to four minutes each
    python benchmarks/distill_table.py --out runs/distill_table --print    # the table of what is there

The teacher is the tower of ``dpn pretrain --data demo --stem none``, which is made first. Distillation sees the
images of the same data set without their labels; ``from scratch with labels`` is ``dpn pretrain --data demo --stem
dpn``, which takes as many steps. Trainings whose result is there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
DISTIL = ["distill", "--data", "demo"]
ROWS: dict[str, list[str]] = {
    "distilled": DISTIL,
    "distilled, a tenth of the steps for the stem alone": [*DISTIL, "--stem-share", "0.1"],
    "distilled, norms that come in (anneal)": [*DISTIL, "--stem-share", "0.3", "--start", "anneal"],
    "distilled, norms of scale 1 and bias 0 (copy)": [*DISTIL, "--start", "copy"],
    "distilled from scratch": [*DISTIL, "--start", "scratch", "--set", "losses={tokens: 1, representation: 1}"],
    "from scratch with labels": ["pretrain", "--data", "demo", "--stem", "dpn"],
}


def train(name: str, words: list[str], seed: int, out: Path) -> dict[str, Any] | None:
    """Train in a process of its own, unless that was done, and return the result."""
    folder = out / f"{list(ROWS).index(name)}-{seed}"
    if not (folder / "result.json").is_file():
        command = [sys.executable, "-m", "dpn_cli", *words, "--seed", str(seed), "-o", str(folder), "--overwrite", "-q"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return read(name, seed, out)


def read(name: str, seed: int, out: Path) -> dict[str, Any] | None:
    """Return the result of a training, or None."""
    path = out / f"{list(ROWS).index(name)}-{seed}" / "result.json"
    result: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return result


def row(name: str, results: list[dict[str, Any]]) -> str:
    """Return a row of the table: means and standard deviations over seeds."""
    cells = [name]
    for key, digits in (("top1", 1), ("agreement", 1), ("token_variance", 3), ("kl", 3)):
        values = [each[key] for each in results if each.get(key) is not None]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.{digits}f}{spread}" if values else "")
    return f"| {' | '.join(cells)} |"


def table(out: Path) -> str:
    """Return the table of all results in Markdown."""
    lines = ["| network | top-1, % | agreement, % | token variance | KL, nats |", "|---|---|---|---|---|"]
    results = {name: [one for seed in SEEDS if (one := read(name, seed, out))] for name in ROWS}
    if done := results["distilled"]:
        lines.append(f"| the teacher, plain | {done[0]['teacher_top1']:.1f} | 100 | 1 | 0 |")
        lines.append(row("its stem fitted, no step (checkpoint retrofit)", [one["stages"]["start"] for one in done]))
    lines += [row(name, some) for name, some in results.items() if some]
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distill_table"))
    parser.add_argument("--print", action="store_true")
    asked = parser.parse_args()
    if not asked.print:
        for seed in SEEDS:
            for name, words in ROWS.items():
                train(name, words, seed, asked.out)
    print(table(asked.out))


if __name__ == "__main__":
    main()
