"""A run's folder: its config, its log, checkpoints that survive a kill, and its result.

``config.yaml`` the resolved config · ``run.json`` command, versions, device, status · ``metrics.jsonl`` one object per
record · ``checkpoints/`` · ``result.json`` only when the number was really produced.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from dpn_cli.errors import DataError, DpnError
from dpn_cli.run import artifact_kinds
from dpn_cli.run.environment import (
    config_digest,
    differences,
    format_now,
    git_commit,
    read_config,
    this_process,
    versions,
)
from dpn_cli.run.files import (
    clear_folder,
    is_leftover,
    make_folder,
    read_object,
    remove_leftovers,
    replace_json,
    replace_text,
    save_error,
)
from dpn_cli.run.records import read_records, record_of

# The files that identify a run's folder.
IDENTITY = ("config.yaml", "run.json")
# Key of run.json that versions before this one wrote in place of ``config``.
EARLIER_KEY = "recipe"  # names: the word of that time
# Key of the line in metrics.jsonl that counts lost records.
LOST_RECORDS = "lost_records"


class RunFolder:
    """The folder of one run. Only rank 0 of a distributed run writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def result(self) -> dict[str, Any] | None:
        """The finished run's result; None when it is missing or damaged."""
        return read_object(self.path / "result.json")

    @property
    def facts(self) -> dict[str, Any]:
        """The content of run.json; empty when it is missing or damaged."""
        return read_object(self.path / "run.json") or {}

    @property
    def timing(self) -> dict[str, float]:
        """The times of `note_time`; empty when run.json has lost them."""
        return dict(self.facts.get("timing") or {})

    @property
    def precision(self) -> str | None:
        """Return the precision of the trainings ("bf16", "fp32"); None before the first one."""
        precision: str | None = self.facts.get("precision")
        return precision

    @property
    def is_untouched(self) -> bool:
        """Return whether the run there has not produced anything."""
        names = self._names()
        return "run.json" in names and names <= {*IDENTITY}

    def _names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir() if not is_leftover(entry.name)}

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        kind: artifact_kinds.Kind,
        *,
        resume: bool,
        overwrite: bool,
        warn: Callable[[str], None],
        one_trial: bool = False,
        complete: Callable[[Any], Any] = lambda saved: saved,
    ) -> RunFolder:
        """Start a run in `path`, or continue the one there, repairing its description where possible.

        With `one_trial` other processes may use the folder. `complete` returns a saved config with all keys of today.
        Raises `DpnError` when the folder holds a run and neither `resume` nor `overwrite` is set, when it is not empty
        and not a run, or when `resume` is set and the run there is of another kind or has another config (the keys are
        listed); `DataError` when the config of the run there cannot be read.
        """
        make_folder(path)
        folder = cls(path)
        names = folder._names()
        if names and not folder._is_ours(names):
            raise DpnError(f"-o {path}: the folder is not empty and is not a dpn run; pass another -o")
        if one_trial:
            if names:
                folder._same_version()
                folder._continue(config, kind, warn, complete)
            else:
                folder._start(config, kind)
            return folder
        remove_leftovers(path)
        if names and (overwrite or folder.is_untouched):
            clear_folder(path, last=IDENTITY)  # a run that ended before it produced anything can be replaced
        elif names and not resume:
            state = "a finished run" if folder.result else "a run that has not finished"
            raise DpnError(
                f"-o {path}: the folder holds {state}; --resume continues it, "
                "--overwrite deletes it first, another -o keeps both"
            )
        elif names:
            folder._continue(config, kind, warn, complete)
            return folder
        folder._start(config, kind)
        return folder

    def _same_version(self) -> None:
        """Raise `DpnError` when another version of this program works on the run."""
        run_version, own_version = (facts.get("dpn-cli") for facts in (self.facts.get("versions") or {}, versions()))
        if run_version != own_version:
            raise DpnError(
                f"-o {self.path}: dpn {run_version} works on the run there, and this is {own_version}; install "
                f"{run_version}"
            )

    def _is_ours(self, names: set[str]) -> bool:
        """Return whether a folder is a run; one of the two files that describe it may be missing or damaged."""
        with_versions = "dpn-cli" in str(self.facts.get("versions"))
        return names >= set(IDENTITY) or with_versions or read_config(self.path / "config.yaml") is not None

    def _start(self, config: Mapping[str, Any], kind: artifact_kinds.Kind) -> None:
        """Describe the run. Writes run.json first, because it alone marks the folder as ours."""
        self.update(
            kind=kind,
            config=config_digest(config),
            argv=sys.argv,
            status="running",
            started=format_now(),
            versions=versions(),
            git=git_commit(),
        )
        self._write_config(config)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        replace_text(self.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, width=100))

    def _continue(
        self,
        config: Mapping[str, Any],
        kind: artifact_kinds.Kind,
        warn: Callable[[str], None],
        complete: Callable[[Any], Any],
    ) -> None:
        """Check that the existing run has this config, and rewrite damaged parts of its description."""
        path, facts = self.path, self.facts
        if EARLIER_KEY in facts:
            raise DpnError(
                f"-o {path}: an earlier version of dpn made this run; continue it with that version, or pass another -o"
            )
        run_kind = facts.get(artifact_kinds.KEY, kind)
        if run_kind != kind:
            raise DpnError(
                f"-o {path}: the folder holds {artifact_kinds.NAMES[run_kind][0]} and not "
                f"{artifact_kinds.NAMES[kind][0]}; pass another -o"
            )
        saved_config = read_config(path / "config.yaml")
        changed = [] if saved_config is None else differences(complete(saved_config), config)
        if facts.get("config") != config_digest(config):
            if saved_config is None:
                raise DataError(
                    f"{path / 'config.yaml'}: missing or damaged, so this config cannot be compared with that of the "
                    "run there; restore the file, start again with --overwrite, or pass another -o"
                )
            if changed:
                raise DpnError(
                    f"-o {path}: the run there has a different config ({'; '.join(changed)}); "
                    "give the same options to resume it, or pass another -o"
                )
        if (path / "result.json").is_file() and self.result is None:
            warn(f"{path / 'result.json'} is damaged and is computed again")
        if saved_config is None or changed:
            self._write_config(config)
            warn(f"{path / 'config.yaml'} was missing or damaged and is written again")
        if not facts:
            self._start(config, kind)
            warn(
                f"{path / 'run.json'} was missing or damaged and is written again; its record of the data and "
                "weights at the start is lost, so the run continues with those that are there now"
            )
        elif self.result is None:
            self.update(status="running")

    def update(self, **fields: Any) -> None:
        """Set fields of run.json; a status "running" also records this process."""
        if fields.get("status") == "running":
            fields["process"] = this_process()
        replace_json(self.path / "run.json", {**self.facts, **fields, "updated": format_now()})

    def record_time(self, seconds: float, waiting: float) -> None:
        """Keep how long a training took in run.json: weight files hold no times, so that equal ones are equal files."""
        self.update(timing={"train_seconds": round(seconds, 2), "wait_seconds": round(waiting, 2)})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json and mark the run finished."""
        replace_json(self.path / "result.json", result)
        self.update(status="finished", **{key: result[key] for key in (artifact_kinds.DIGEST,) if key in result})


class MetricsLog:
    """metrics.jsonl: one JSON object per line, each with its step."""

    def __init__(self, path: Path, on_record: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.path = path
        self.on_record = on_record
        self.counted: int | None = None  # so that no checkpoint has to read the log

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. Raises `SaveError` when it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise save_error(self.path, error) from error
        if self.counted is not None:
            self.counted += record.get(LOST_RECORDS, 1)
        if self.on_record:
            self.on_record(record)

    def records(self) -> list[dict[str, Any]]:
        """Return all complete records, in order."""
        return read_records(self.path)[0]

    def count(self) -> int:
        """Return the number of written records, including those recorded as lost."""
        if self.counted is None:
            self.counted = sum(record.get(LOST_RECORDS, 1) for record in self.records())
        return self.counted

    def record_lost(self, step: int, expected_count: int) -> int:
        """Compare the log with the `expected_count` up to `step`; record and return the number of missing records.

        Raises `SaveError` as `write` does.
        """
        missing = max(0, expected_count - self.count())
        if missing:
            self.write({"step": step, LOST_RECORDS: missing})
        return missing

    def count_lost(self) -> int:
        """Return the number of records that are recorded as lost."""
        return sum(record.get(LOST_RECORDS, 0) for record in self.records())

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Drop records after `step`, which a resumed run writes again, and a half-written last line.

        Drops the evaluation of `step` too, unless the step was `evaluated` before it was saved.
        """

        def stays(record: dict[str, Any]) -> bool:
            record_step = record.get("step", 0)
            return bool(record_step < step or (record_step == step and (evaluated or "lr" in record)))

        if not self.path.is_file():
            return
        self.counted, complete_lines = 0, list[str]()
        text = self.path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if (record := record_of(line)) is not None and stays(record):
                self.counted += record.get(LOST_RECORDS, 1)
                complete_lines.append(f"{line}\n")
        if (truncated := "".join(complete_lines)) != text:
            replace_text(self.path, truncated)


def describe_device(device: torch.device) -> str:
    """Return the name of the hardware behind a torch device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
