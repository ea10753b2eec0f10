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
    whole = isinstance(config, dict) and (config.keys() >= CONFIG_KEYS or config.keys() >= PROBE_KEYS)
    return config if whole else None


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
        before, now = old.get(key), new.get(key)
        said = ["left out" if value is None else value for value in (before, now)]
        if isinstance(before, dict) and isinstance(now, dict) and key not in MAY_CHANGE:
            lines += differences(before, now, f"{prefix}{key}.")
        elif before != now and key not in MAY_CHANGE:
            lines.append(f"{prefix}{key}: {said[0]} there, {said[1]} now")
    return lines


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    ours = {"python": platform.python_version(), "dpn-cli": __version__}  # which may run without being installed
    return ours | {name: metadata.version(name) for name in VERSIONS}


@cache
def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, followed by + when it has changes."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "-uno", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other one, of this machine and of others."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, Any]:
    """Return what tells a process of this machine from every other one, of this machine and of others."""
    return {"host": platform.node(), "pid": pid, "pids": _pids(), "began": _began(pid)}


def is_at_work(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process, as `this_process` described it, is there; None of another machine or container."""
    if (process.get("host"), process.get("pids")) != (platform.node(), _pids()):
        return None
    number = int(process["pid"])
    return is_alive(number) and _began(number) in (None, process.get("began"))


def _pids() -> str | None:
    """Return the name of the container whose processes are numbered as ours are; None where Linux does not tell."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _began(process: int) -> str | None:
    """Return when a process began, in the kernel's ticks, or "" when it has ended; None where Linux does not tell."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state == "Z" else fields[18]  # starttime is field 22 in proc(5), the state field 3


def now() -> str:
    """Return the current time with its zone, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
