"""The provenance of a run: its config, which a resumed run must share, and the versions of the code."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from dpn_cli import __version__
from dpn_cli.config.load import Plain
from dpn_cli.run.files import is_alive

# A resumed run may use other hardware and other files; it may not compute something else.
MAY_CHANGE = ("runtime", "log", "allow_failed", "keep_weights", "max_pixels")
# The keys that every config of a training has, and those of a few-shot probe.
CONFIG_KEYS = {"backbone", "data", "optim", "schedule", "runtime"}
PROBE_KEYS = {"checkpoint", "source", "shots", "seeds", "runtime"}
VERSIONS = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "safetensors")


def read_config(path: Path) -> Plain | None:
    """Return the config of a config.yaml, or None when the file is missing or cut off."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    is_complete = isinstance(config, dict) and (config.keys() >= CONFIG_KEYS or config.keys() >= PROBE_KEYS)
    return config if is_complete else None


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of the keys that a resumed run may not change."""

    def fixed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: fixed(inner) for key, inner in value.items() if key not in MAY_CHANGE}

    return hashlib.sha256(json.dumps(fixed(dict(config)), sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line for each changed key that a resumed run may not change."""
    lines = []
    for key in {**old, **new}:
        old_value, new_value = old.get(key), new.get(key)
        texts = ["left out" if value is None else value for value in (old_value, new_value)]
        if isinstance(old_value, dict) and isinstance(new_value, dict) and key not in MAY_CHANGE:
            lines += differences(old_value, new_value, f"{prefix}{key}.")
        elif old_value != new_value and key not in MAY_CHANGE:
            lines.append(f"{prefix}{key}: {texts[0]} there, {texts[1]} now")
    return lines


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    package_versions = {
        "python": platform.python_version(),
        "dpn-cli": __version__,
    }  # which may run without being installed
    return package_versions | {name: metadata.version(name) for name in VERSIONS}


@cache
def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, followed by + when it has changes."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "-C", folder, "status", "--porcelain", "-uno", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def this_process() -> dict[str, Any]:
    """Return facts that identify this process among those of all machines."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, Any]:
    """Return facts that identify a process of this machine among those of all machines."""
    return {"host": platform.node(), "pid": pid, "pids": _pids(), "began": _start_ticks(pid)}


def is_running(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process of `describe_process` is running; None on another machine or in another container."""
    if (process.get("host"), process.get("pids")) != (platform.node(), _pids()):
        return None
    number = int(process["pid"])
    return is_alive(number) and _start_ticks(number) in (None, process.get("began"))


def _pids() -> str | None:
    """Return the name of this process's PID namespace; None where it is unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _start_ticks(process: int) -> str | None:
    """Return the start time of a process in kernel ticks, "" when it has ended; None where it is unknown."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state == "Z" else fields[18]  # starttime is field 22 in proc(5), the state field 3


def format_now() -> str:
    """Return the current time with its zone, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
