"""A run's folder: what was asked, what happened, checkpoints that survive a kill, and the result.

``config.yaml`` the resolved recipe · ``run.json`` command, versions, device, status · ``metrics.jsonl`` one object per
record · ``checkpoints/`` · ``result.json`` only when the number was really produced.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli import kinds
from dpn_cli.errors import DataError, DpnError
from dpn_cli.files import file_digest, flush, read_object, replace_json, replace_text, save_error

# A resumed run may run elsewhere and otherwise; it may not compute something else.
MAY_CHANGE = ("runtime", "allow_failed", "keep_weights", "max_pixels")
VERSIONS = ("dpn-cli", "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "safetensors")


class RunFolder:
    """The folder of one run. Only rank 0 of a distributed run writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def result(self) -> dict[str, Any] | None:
        """The finished run's result, or None."""
        path = self.path / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says; nothing when it is missing or damaged."""
        return read_object(self.path / "run.json") or {}

    @classmethod
    def open(
        cls,
        path: Path,
        recipe: Mapping[str, Any],
        *,
        resume: bool,
        overwrite: bool,
        complete: Callable[[Any], Any] = lambda saved: saved,
    ) -> RunFolder:
        """Start a run in `path`, or go on with the one that is there.

        `complete` returns a saved recipe with all keys of today's. Raises `DpnError` when the folder holds a run and
        neither `resume` nor `overwrite` says what to do with it, when it holds something else than a run, or when
        `resume` meets another recipe (the keys are listed).
        """
        folder, config = cls(path), path / "config.yaml"
        ours = config.is_file() and (path / "run.json").is_file()
        if path.is_dir() and any(path.iterdir()) and not ours:
            raise DpnError(f"-o {path}: the folder holds something that is no run of dpn; pass another -o")
        untouched = ours and {entry.name for entry in path.iterdir()} <= {"config.yaml", "run.json"}
        if ours and (overwrite or untouched):
            shutil.rmtree(path)  # a run that ended before it produced anything leaves nothing to lose
        elif ours and not resume:
            state = "a finished run" if folder.result else "a run that has not finished"
            raise DpnError(
                f"-o {path}: the folder holds {state}; --resume goes on with it, "
                "--overwrite deletes it first, another -o keeps both"
            )
        elif ours:
            changed = _differences(complete(yaml.safe_load(config.read_text(encoding="utf-8"))), recipe)
            if changed:
                raise DpnError(
                    f"-o {path}: the run there has another recipe ({'; '.join(changed)}); "
                    "give the same options to resume it, or pass another -o"
                )
            return folder
        replace_text(config, yaml.safe_dump(dict(recipe), sort_keys=False, width=100))
        folder.update(argv=sys.argv, status="running", started=_now(), versions=_versions(), git=_git())
        return folder

    def update(self, **fields: Any) -> None:
        """Set fields of run.json."""
        replace_json(self.path / "run.json", {**self.facts, **fields, "updated": _now()})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json and mark the run finished."""
        replace_json(self.path / "result.json", result)
        self.update(status="finished", **{key: result[key] for key in (kinds.DIGEST,) if key in result})


class MetricsLog:
    """metrics.jsonl: one JSON object per line, each with its step."""

    def __init__(self, path: Path, on_record: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.path = path
        self.on_record = on_record

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. Raises `SaveError` when the disk does not take it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise save_error(self.path, error) from error
        if self.on_record:
            self.on_record(record)

    def records(self) -> list[dict[str, Any]]:
        """Return all records, in their order."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Drop records after `step`, which a resumed run will write again (a half-written last line too).

        Unless the step was `evaluated` before it was saved, that goes for its evaluation too.
        """

        def stays(record: dict[str, Any]) -> bool:
            at = record.get("step", 0)
            return bool(at < step or (at == step and (evaluated or "lr" in record)))

        if self.path.is_file():
            kept = []
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    kept += [line] if stays(json.loads(line)) else []
                except json.JSONDecodeError:
                    continue
            replace_text(self.path, "".join(f"{line}\n" for line in kept))


class Checkpoints:
    """``last`` and ``best`` of one training, each a folder that is renamed into place with its digest inside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write tensors and plain values as `name`, keeping the one before it as ``name.previous``.

        Raises `SaveError`; whatever was saved before stays readable at every moment of the save.
        """
        fresh, last, previous = (self.path / part for part in (f".{name}", name, f"{name}.previous"))
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            data = fresh / "state.safetensors"
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in tensors.items()},
                data,
                {"state": json.dumps(state)},
            )
            (fresh / "sha256").write_text(file_digest(data) + "\n", encoding="utf-8")
            for path in (data, fresh / "sha256", fresh):
                flush(path)
            if last.is_dir():
                shutil.rmtree(previous, ignore_errors=True)
                last.rename(previous)
            fresh.rename(last)
            flush(self.path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise save_error(last, error) from error

    def load(self, name: str, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return what was saved last under `name`, falling back to the one before it when it is damaged.

        Returns None when nothing was saved. Raises `DataError` when all that was saved is damaged.
        """
        found = [path for path in (self.path / name, self.path / f"{name}.previous") if path.is_dir()]
        for path in found:
            data, digest = path / "state.safetensors", path / "sha256"
            if data.is_file() and digest.is_file() and file_digest(data) == digest.read_text("utf-8").strip():
                with safe_open(data, framework="pt") as file:
                    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                    return tensors, json.loads(file.metadata()["state"])
            warn(f"{path}: the checkpoint is damaged (its digest differs); trying the one before it")
        if found:
            raise DataError(f"{self.path}: no checkpoint there is intact; delete it to start this training again")
        return None

    def clear(self) -> None:
        """Delete all checkpoints of this training."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_report(path: Path) -> None:
    """Make the folder of a report before the work that fills it.

    Raises `DpnError` when it holds a run, whose result would be lost, and `SaveError` when it cannot be made.
    """
    if (path / "run.json").is_file():
        raise DpnError(f"-o {path}: the folder holds a run, and its result.json would be replaced; pass another -o")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise save_error(path, error) from error


def describe_device(device: torch.device) -> str:
    """Return the name of the hardware behind a torch device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict) and key not in MAY_CHANGE:
            lines += _differences(before, now, f"{prefix}{key}.")
        elif before != now and key not in MAY_CHANGE:
            lines.append(f"{prefix}{key}: {before} there, {now} now")
    return lines


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}


def _git() -> str | None:
    """Return the commit of the checkout that this code runs from, with + when it has changes."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "-uno", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
