"""All that a GPU is asked, in one call of under ten minutes: are the numbers those of the CPU, and how fast is it?

    python benchmarks/gpu.py                                            # one GPU with 80 GB
    python benchmarks/gpu.py --minutes 4 -o first.json
    python benchmarks/gpu.py --only numbers,memory
    python benchmarks/gpu.py --device cpu --arch nano/4 --image-size 16 # tries the script where there is no GPU

Parts run in order of importance until the minutes are over; what did not fit is listed as not run. A part that fails or
cannot be measured here says why, and the others go on. The JSON file is written after every row, and the tables beside
it as Markdown. The exit code is 1 if a check failed or a part ended in an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import gpu_correct
import gpu_programs
import gpu_speed
import gpu_waits
import torch
from gpu_report import Check, NotHereError, Part, Report, Row, Settings

from dpn_cli.doctor.packages import installed_version
from dpn_cli.run.environment import format_now, git_commit
from dpn_cli.run.process import keep_memory

PACKAGES = ("torch", "triton", "timm", "open_clip_torch", "onedl-mmsegmentation", "mmsegmentation", "datasets")
CHECKS: dict[str, Callable[[Settings], Iterator[Check]]] = {
    "numbers": gpu_correct.numbers,
    "memory": gpu_correct.memory,
    "demos": gpu_programs.demos,
    "kill": gpu_programs.kill,
    "tasks": gpu_programs.tasks,
    "waits": gpu_waits.waits,
    "compiled": gpu_correct.compiled,
}
SPEEDS: dict[str, Callable[[Settings, gpu_speed.Best], Iterator[Row]]] = {
    "training": gpu_speed.training,
    "segmentation": gpu_speed.segmentation,
    "lit": gpu_speed.lit,
    "encoding": gpu_speed.encoding,
    "windows": gpu_speed.windows,
    "vtab": gpu_speed.vtab,
    "training --compile": gpu_speed.training_compiled,
    "segmentation --compile": gpu_speed.segmentation_compiled,
    "lit --compile": gpu_speed.lit_compiled,
}
# Seconds after which `Stopped` is raised again: where Python swallows it, as in a finaliser, the time is still over.
AGAIN = 10.0


class Stopped(BaseException):  # no error, and nothing that handles errors may take it for one
    """The time is over, or a signal has come: the text says which."""


@contextmanager
def until(seconds: float) -> Iterator[None]:
    """Raise `Stopped` inside the block after so many seconds, and on SIGTERM and SIGINT."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped("the time was over" if number == signal.SIGALRM else signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)}
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(part: Part, rows: Iterator[Row], save: Callable[[], None]) -> None:
    """Collect the rows of a part, whatever happens in it; raises `Stopped` only."""
    part.status = "running"
    save()
    try:
        for row in rows:
            part.rows.append(row)
            save()
    except (ImportError, NotHereError) as error:
        missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        part.status, part.error = "missing", missing
    except Exception as error:
        part.status, part.error = "error", f"{type(error).__name__}: {str(error).strip()[:300]}"
        part.traceback = traceback.format_exc()
    except Stopped as error:
        part.status, part.error = "stopped", str(error)
        raise
    else:
        part.status = "failed" if any(isinstance(row, Check) and not row.passed for row in part.rows) else "done"


def run(report: Report, parts: dict[str, Callable[[], Iterator[Row]]], device: torch.device, seconds: float) -> str:
    """Measure the parts until the time is over; returns the signal that stopped it, if one did."""
    try:
        with until(seconds):
            for name, start in parts.items():
                part, began = report.parts[name], report.seconds
                try:
                    measure(part, start(), report.save)
                finally:
                    part.seconds = round(report.seconds - began, 1)
                    report.save()
                print(f"{name}: {part.status}, {part.seconds:.0f} s {part.error}", file=sys.stderr, flush=True)
                gpu_speed.release(device)
    except Stopped as error:
        return str(error) if str(error).startswith("SIG") else ""
    return ""


def facts_of(device: torch.device, settings: Settings, minutes: float) -> dict[str, Any]:
    """Return what was measured where."""
    facts: dict[str, Any] = {
        "command": sys.argv,
        "time": format_now(),
        "commit": git_commit(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": str(device),
        "minutes": minutes,
        "settings": {name: str(value) for name, value in vars(settings).items()},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {"name": properties.name, "bytes": properties.total_memory}
        facts["gpu"]["capability"] = f"{properties.major}.{properties.minor}"
    return facts


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--only", help=f"parts to run: {', '.join((*CHECKS, *SPEEDS))}")
    parser.add_argument("--arch", help="one network for everything, for a trial")
    parser.add_argument("--image-size", type=int, default=16, help="and its pixels")
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu.json"))
    asked = parser.parse_args(given)
    names = [*CHECKS, *SPEEDS]
    asked.only = asked.only.split(",") if asked.only else names
    if unknown := [name for name in asked.only if name not in names]:
        parser.error(f"--only {','.join(unknown)}: unknown; choose from {', '.join(names)}")
    if asked.minutes <= 0:
        parser.error("--minutes: more than 0")
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {asked.device}: torch sees no GPU; --device cpu --arch nano/4 tries the script")
    return asked


def main(given: list[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    asked = arguments(given)
    keep_memory()  # as the program does
    device = torch.device(asked.device)
    settings = Settings.small(device, asked.arch, asked.image_size) if asked.arch else Settings(device)
    best = gpu_speed.Best()
    parts: dict[str, Callable[[], Iterator[Row]]] = {name: partial(part, settings) for name, part in CHECKS.items()}
    parts |= {name: partial(part, settings, best) for name, part in SPEEDS.items()}
    chosen = {name: part for name, part in parts.items() if name in asked.only}
    report = Report(asked.out, facts_of(device, settings, asked.minutes), chosen)
    report.save()
    stopped = run(report, chosen, device, 60 * asked.minutes)
    report.facts["peak_flops_per_second"] = gpu_speed.peak(device) if gpu_speed.peak.cache_info().currsize else None
    report.save()
    report.print()
    if stopped:
        return 128 + signal.Signals[stopped]
    return 1 if report.names("failed", "error") else 0


if __name__ == "__main__":
    raise SystemExit(main())
