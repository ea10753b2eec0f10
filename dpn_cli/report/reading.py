"""Contents of a run's folder for a report, with notes on missing and damaged files. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpn_cli.config.load import Plain
from dpn_cli.errors import DataError
from dpn_cli.report.content import Series
from dpn_cli.run.artifact_kinds import is_run
from dpn_cli.run.environment import is_running, read_config
from dpn_cli.run.files import read_object, real_path
from dpn_cli.run.records import read_records

Json = dict[str, Any]
# Levels below a folder at which runs are looked for: ./runs/TASK/NAME.
DEPTH = 3
# Keys of a step's record that are no metrics of evaluations.
STEP_KEYS = (
    *("step", "loss", "lr", "grad_norm", "layer_norms_steps", "images_per_second", "wait_share"),
    *("lost_records", "images"),
)


@dataclass(frozen=True)
class RunRecord:
    """Contents of the folder of a run or an evaluation.

    Args:
        path: the folder.
        name: how the report calls it.
        kind: the kind of run, "eval" for the output of an evaluation.
        facts: run.json; empty where it is missing.
        config: config.yaml; None where it is missing or damaged.
        result: result.json, or partial.json of a run with failures; empty while there is none.
        records: metrics.jsonl.
        notes: sentences about missing, damaged or unfinished parts.
    """

    path: Path
    name: str
    kind: str
    facts: Json
    config: Plain | None
    result: Json
    records: Sequence[Json]
    notes: Sequence[str]

    @property
    def seed(self) -> int:
        """The seed of a single training."""
        return int((self.config or {}).get("seed", 0))

    @property
    def status(self) -> str:
        """The run's status: finished, running, stopped, failed …; scored for an evaluation.

        A run is interrupted when its process ended without a status; on another machine this is not known.
        """
        if self.kind == "eval":
            return "scored"
        status, process = str(self.facts.get("status", "unknown")), self.facts.get("process")
        if status != "running" or not isinstance(process, dict):
            return status
        is_alive = is_running(process)
        if is_alive is None:
            return f"running on {process.get('host')}"
        return status if is_alive else "interrupted"

    def series(self, key: str) -> Series:
        """Return the finite values of a key in the log over steps."""
        points = [(record["step"], record[key]) for record in self.records if is_number(record.get(key))]
        return Series(self.name, [x for x, _ in points], [y for _, y in points])

    def watched(self) -> list[str]:
        """Return the metrics of evaluations during the training, by their keys."""
        keys = dict.fromkeys(key for record in self.records for key in record if key not in STEP_KEYS)
        return [key for key in keys if self.series(key).x]


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read a folder. Raises `DataError` when it holds neither a run nor the output of an evaluation."""
    folder = folder_of(path)
    facts, result = read_object(folder / "run.json") or {}, read_object(folder / "result.json")
    evaluated = not is_run(folder) and str((result or {}).get("task", "")).endswith("eval")
    if not is_run(folder) and not evaluated:
        raise DataError(
            f"{path}: not a run's folder (no run.json in it), nor the -o folder of 'dpn eval'; 'dpn runs {path}' lists "
            "the runs below it"
        )
    config = read_config(folder / "config.yaml")
    records, damaged = read_records(folder / "metrics.jsonl")
    step_records = [record for record in records if is_number(record.get("step"))]
    partial = None if result else read_object(folder / "partial.json")
    run = RunRecord(
        path=folder,
        name=name or real_path(folder).name,
        kind="eval" if evaluated else str(facts.get("kind") or _kind_of(config)),
        facts=facts,
        config=config,
        result=result or partial or {},
        records=step_records,
        notes=(),
    )
    notes = _notes(run, damaged + len(records) - len(step_records)) if not evaluated else []
    return replace(run, notes=notes)


def folder_of(path: Path) -> Path:
    """Return the folder that the user names. Raises `DataError` when there is none."""
    try:
        folder = path.expanduser()
        if folder.is_dir():
            return folder
        missing = not folder.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, or the home folder is unknown
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    raise DataError(f"{path}: no such folder" if missing else f"{path}: a file, not a folder of runs")


def _notes(run: RunRecord, damaged: int) -> list[str]:
    """Return sentences about missing, damaged or unfinished parts."""
    notes = []
    if not run.facts:
        notes.append("run.json is missing or damaged: versions, device and data are not known.")
    if run.config is None:
        notes.append("config.yaml is missing or damaged: the config is not known.")
    if not run.result:
        steps = (run.config or {}).get("schedule", {}).get("steps")
        last_step = max((record["step"] for record in run.records), default=0)
        progress = f", logged up to step {last_step}" + (f" of {steps}" if steps else "") if last_step else ""
        # `dpn reproduce` resumes by itself, without an option.
        resume_note = "" if "reproduce" in run.facts.get("argv", ())[1:2] else " with --resume"
        damage = "result.json is damaged" if (run.path / "result.json").is_file() else "no result.json"
        notes.append(
            f"UNFINISHED: status {run.status!r}{progress}; {damage}, so the page shows what there is. "
            f"The command that started the run continues it{resume_note}."
        )
    elif run.facts.get("status") not in (None, "finished"):
        notes.append(f"The run's status is {run.status!r}.")
    if error := run.facts.get("error"):
        notes.append(f"It ended with: {error}" if not run.result else f"It once ended with: {error}")
    if damaged:
        lines = "1 line is" if damaged == 1 else f"{damaged} lines are"
        notes.append(f"metrics.jsonl: {lines} damaged and left out of the curves.")
    stages = run.result.get("stages", {})
    # The stages of a search have folders, and logs, of their own; those of a distillation are in one.
    steps = None if isinstance(stages, list) else stages.get("all", run.result).get("steps")
    last_step = max((record["step"] for record in run.records), default=0)
    if run.kind not in {"comparison", "sweep"} and steps and last_step < steps:
        end = f"step {last_step} of {steps}"
        notes.append(f"metrics.jsonl is missing or damaged: it ends at {end}, and so do the curves.")
    if lost_records := sum(record.get("lost_records", 0) for record in run.records):
        notes.append(f"metrics.jsonl: {lost_records} records were lost before, and the curves lack them.")
    return notes


def _kind_of(config: Plain | None) -> str:
    """Return the kind of a run without one in run.json."""
    description = (config or {}).get("about")
    command = str(description.get("command", "")) if isinstance(description, dict) else ""
    words = {"dpn finetune vtab": "sweep", "dpn lit": "towers", "dpn segment": "segmenter"}
    return next((kind for start, kind in words.items() if command.startswith(start)), "classifier")


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name of each of several folders: the end of its path that no other one has."""
    parts_of_paths = [real_path(path).parts for path in paths]
    for length in range(1, max(map(len, parts_of_paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in parts_of_paths]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in parts_of_paths]


def find_runs(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the runs' folders in a folder and at most `depth` levels below it, in order of name.

    Folders inside a run, hidden folders, links and unreadable folders are left out.
    """
    try:
        if (root / "run.json").is_file():
            yield root
            return
        with os.scandir(root) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    if depth:
        for name in sorted(name for name in folders if not name.startswith(".")):
            yield from find_runs(root / name, depth - 1)


def hours(run: RunRecord) -> float | None:
    """Return the hours that a run has trained, by its result or those of the trainings in it; None when not known."""
    seconds = run.result.get("timing", {}).get("train_seconds")
    if seconds is None and run.kind == "comparison":
        timings = [result["timing"] for _, result in trainings(run.result) if "timing" in result]
        seconds = sum(timing.get("train_seconds", 0) for timing in timings) if timings else None
    return None if seconds is None else seconds / 3600


def trainings(result: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """Yield the folder and the result of each training of a comparison's result."""
    for network in result.get("compare", {}).get("networks", {}).values():
        yield from network.get("runs", {}).items()


def moment(run: RunRecord, key: str) -> datetime | None:
    """Return a time of run.json."""
    try:
        return datetime.strptime(str(run.facts.get(key)), "%Y-%m-%dT%H:%M:%S%z").astimezone(UTC)
    except ValueError:
        return None


def is_number(value: object) -> bool:
    """Return whether a value in a log is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
