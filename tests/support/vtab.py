"""VTAB trainings of seconds, their data and their ledgers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, from_settings, merge, read_config
from dpn_cli.run.console import Console
from support.cli import run_dpn
from support.goldens import Arrays
from tasks.vtab import command
from tasks.vtab.config import VtabConfig, finalize, resolve


def write_vtab_task(folder: Path, images: Arrays, labels: Arrays) -> Path:
    """Write a task in the VTAB layout: images (n, h, w[, 3]) and labels by split, as PNG."""
    for split, arrays in images.items():
        (folder / "images" / split).mkdir(parents=True)
        lines = []
        for i, (image, label) in enumerate(zip(arrays, labels[split], strict=True)):
            name = f"images/{split}/{i:06d}.png"
            Image.fromarray(image).save(folder / name)
            lines.append(f"{name} {label}")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


VTAB_CONFIG: dict[str, Any] = read_config("vtab")


def vtab_config(*layers: dict[str, Any]) -> VtabConfig:
    """Build the shipped VTAB config with layers on top."""
    return build(VtabConfig, merge(VTAB_CONFIG, *layers), "config")


Json = dict[str, Any]


TOY = [
    "schedule.steps=6",
    "schedule.warmup=1",
    "batch_size=32",
    "lrs=[0.001, 0.01, 0.03]",
    "seeds=2",
    "backbone.arch=mu/8",
    "backbone.image_size=16",
    "backbone.checkpoint=none",
    "optim.name=adam",
]


def run_vtab(
    source: Path | str,
    output: Path,
    *settings: str,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    toy: bool = True,
) -> Json:
    """Run the VTAB command on a folder; returns its result."""
    layers = from_settings([*(TOY if toy else []), *settings])
    plain = resolve(None, {"data": {"source": str(source)}}, layers)
    built = finalize(build(VtabConfig, plain, "config"))
    result = command.run(
        built, LaunchOptions(output, resume=resume, overwrite=overwrite), console or Console(quiet=True)
    )
    assert result is not None
    return result


def read_ledger(output: Path) -> list[Json]:
    """Read the scored trials of a ledger, each of which was announced first."""
    rows = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    run = [(row["lr"], row["seed"]) for row in rows if row["accuracy"] is None]
    scored = [row for row in rows if row["accuracy"] is not None]
    assert run == [(row["lr"], row["seed"]) for row in scored]  # every score was announced before it was made
    assert all(len(row["weights_sha256"]) == 64 for row in rows)
    return scored


DEMO_SWEEP = (
    "finetune",
    "vtab",
    "--data",
    "demo",
    "--tasks",
    "demo_light,demo_color",
    "--arch",
    "mu/8",
    "--device",
    "cpu",
)


SHORT_SWEEP = (
    "--steps",
    "3",
    "-b",
    "16",
    "--lrs",
    "0.01,0.001",
    "--seeds",
    "1",
    "--set",
    "keep_weights=all",
    "--no-report",
)


def run_demo_sweep(out: Path, *arguments: str) -> Any:
    """Run a short sweep on the built-in tasks."""
    result = run_dpn(*DEMO_SWEEP, *SHORT_SWEEP, "-o", str(out), *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def read_ledger_rows(out: Path) -> list[tuple[Any, ...]]:
    """Read the trials of a ledger, sorted, without their times."""
    rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    return sorted((row["stem"], row["task"], row["lr"], row["seed"], str(row["accuracy"])) for row in rows)
