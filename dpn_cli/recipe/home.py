"""Where data and weights are looked for when a command does not name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def home() -> Path:
    """Return the folder for weights that dpn makes or is given: $DPN_HOME, or ~/.dpn."""
    return Path(os.environ.get("DPN_HOME") or Path.home() / ".dpn")


def find_data(name: str) -> str:
    """Return the first of $DPN_DATA_DIR/NAME and ./NAME that exists, else ``"demo"``."""
    folders = [Path(os.environ["DPN_DATA_DIR"]) / name] if os.environ.get("DPN_DATA_DIR") else []
    return next((str(folder) for folder in (*folders, Path(name)) if folder.is_dir()), "demo")


def find_weights(arch: str | None, stems: Sequence[str]) -> str | None:
    """Return the weights folder's file for `arch` and the stem, or None without one.

    For several stems it is a pattern with ``{stem}``, and all must have a file.
    """
    folder = home() / "weights"
    name = (arch or "").replace("/", "-")
    for suffix in (".safetensors", ".npz"):
        files = [folder / f"{name}-{stem}{suffix}" for stem in stems]
        if arch and all(file.is_file() for file in files):
            return str(files[0]) if len(files) == 1 else str(folder / f"{name}-{{stem}}{suffix}")
    return None
