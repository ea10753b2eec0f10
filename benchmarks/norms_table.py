"""Pre-train the demo tower with every norm and every placement and print the accuracies as a table.

    python benchmarks/norms_table.py --out runs/norms            # all: 69 trainings of two minutes each
    python benchmarks/norms_table.py --out runs/norms --print    # the table of what is there

Each training is ``dpn pretrain --data demo`` with one seed; those whose result is there are not trained again. Memory
is the largest resident size of the training's process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from dpn_cli.arch import NORMS, PLACEMENTS

SEEDS = (0, 1, 2)


def variants() -> list[dict[str, str]]:
    """Every norm before both halves of a block, LayerNorm at every place, and both with the plain stem."""
    norms = [{"stem": stem, "norm": norm, "placement": "pre,pre"} for stem in ("none", "dpn") for norm in NORMS]
    places = [{"stem": "none", "norm": "ln", "placement": place} for place in PLACEMENTS if place != "pre,pre"]
    return norms[: len(NORMS)] + places + [norms[len(NORMS)]]


def name_of(variant: dict[str, str], seed: int) -> str:
    """Return the folder of a training."""
    return "-".join(variant.values()).replace(",", "_") + f"-{seed}"


def train(variant: dict[str, str], seed: int, out: Path) -> None:
    """Train one network in a process of its own and note how it ended."""
    folder, note = out / name_of(variant, seed), out / f"{name_of(variant, seed)}.json"
    if note.is_file():
        return
    options = [f"--{key}={value}" for key, value in variant.items()]
    command = [sys.executable, "-m", "dpn_cli", "pretrain", "--data", "demo", *options, "--seed", str(seed)]
    with subprocess.Popen([*command, "-o", str(folder), "--overwrite", "-q"], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        errors = run.stderr.read()
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    done = {"memory_mib": usage.ru_maxrss / 1024, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    if run.returncode:
        done["error"] = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {run.returncode}"
    else:
        result = json.loads((folder / "result.json").read_text())
        done |= {key: result[key] for key in ("top1", "loss", "parameters")}
    note.write_text(json.dumps(done))


def table(out: Path) -> str:
    """Return the table of all results in Markdown."""
    lines = ["| stem | norm | placement | top-1, % | by seed | CPU seconds | memory, MiB |", f"|{'---|' * 7}"]
    for variant in variants():
        notes = [out / f"{name_of(variant, seed)}.json" for seed in SEEDS]
        done = [json.loads(note.read_text()) for note in notes if note.is_file()]
        if not done:
            continue
        scores = [one["top1"] for one in done if "top1" in one]
        failed = sorted({one["error"] for one in done if "error" in one})
        shown = f"{statistics.mean(scores):.1f}" if scores else ""
        shown += f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        cells = (
            *variant.values(),
            "; ".join([shown, *failed]).strip("; "),
            ", ".join(f"{score:.1f}" for score in scores),
            f"{statistics.median(one['cpu_seconds'] for one in done):.0f}",
            f"{statistics.median(one['memory_mib'] for one in done):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/norms"))
    parser.add_argument("--print", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.print:
        for seed in SEEDS:
            for variant in variants():
                train(variant, seed, asked.out)
    print(table(asked.out))


if __name__ == "__main__":
    main()
