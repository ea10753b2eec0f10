"""Checks of storage: folders to write to, the hub, data and weights on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpn_cli.config.paths import UNPACKED, find_data, home
from dpn_cli.doctor.result import Finding
from dpn_cli.run.console import count_noun, gigabytes

# A run of ViT-B/16 has up to five states of 1.4 GB on the disk.
MIN_DISK = 10e9
DATA_SETS = ("vtab-1k", "imagenet", "sun397", "ADEChallengeData2016", *UNPACKED)


def check_storage() -> Iterator[Finding]:
    """Yield findings about the folders that dpn writes to, the hub, and local data and weights."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    yield _folder("runs", Path("runs").absolute(), "work in another folder, or name one with -o")
    yield _folder("dpn's files", home(), "name another folder in the environment variable DPN_HOME")
    yield _folder("hub's cache", cache, "name another folder in the environment variable HF_HOME")
    yield _temporary()
    yield _hub(cache)
    yield _data()
    yield _weights()


def _folder(name: str, path: Path, remedy: str) -> Finding:
    """Check that a folder, or its closest existing parent, is writable and has free space."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(name, "problem", f"{path}: cannot be written to ({existing}: {reason})", remedy)
    found = f"{path}: {gigabytes(free)} free"
    if free >= MIN_DISK:
        return Finding(name, "ok", found)
    return Finding(name, "warning", f"{found}, of which a training needs several", f"free some space, or {remedy}")


def _temporary() -> Finding:
    name, remedy = "temporary files", "name another folder in the environment variable TMPDIR"
    try:
        return _folder(name, Path(tempfile.gettempdir()), remedy)
    except OSError as error:
        return Finding(name, "problem", error.strerror or str(error), remedy)


def _hub(cache: Path) -> Finding:
    from dpn_cli.weights.hub import hub_is_offline

    cached = {kind: len(list(cache.glob(f"{kind}s--*"))) for kind in ("model", "dataset")}
    summary = f"{count_noun(cached['model'], 'model')} and {count_noun(cached['dataset'], 'data set')} in its cache"
    if not hub_is_offline():
        return Finding("hub", "ok", f"responds; {summary}")
    if os.environ.get("HF_HUB_OFFLINE"):
        return Finding("hub", "ok", f"not asked (HF_HUB_OFFLINE is set); {summary}")
    return Finding(
        "hub",
        "warning",
        f"out of reach; {summary}, and 'hf:', 'hf-hub:' and 'timm:' find no others",
        "fetch what is missing with 'hf download' where there is a network; HF_HUB_OFFLINE=1 saves the attempts",
    )


def _data() -> Finding:
    folder = os.environ.get("DPN_DATA_DIR")
    if folder and not Path(folder).is_dir():
        return Finding(
            "data", "warning", f"DPN_DATA_DIR is {folder}, which is no folder", "name the folder of the data sets"
        )
    paths = [path for name in DATA_SETS if (path := find_data(name)) != "demo"]
    return Finding("data", "ok", ", ".join(paths) or "none under a usual name: without --data, built-in ones are used")


def _weights() -> Finding:
    folder = home() / "weights"
    files = sorted(path.name for path in folder.glob("*") if path.suffix in (".npz", ".safetensors"))
    names = ", ".join(files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "")
    return Finding("weights", "ok", f"{folder}: {names or 'none'}")
