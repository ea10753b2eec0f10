"""Default locations of data and weights that a command does not name."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from dpn_cli.errors import DpnError

# The built-in scenes of classifiers: asked for the colour of the largest object, for fine-tuning, and with the question
# that takes most of them in, for pre-training and distillation.
DEMO, DEMO_OBJECTS = DEMOS = ("demo", "demo:objects")


def home() -> Path:
    """Return the folder for weights that dpn makes or is given: $DPN_HOME, or ~/.dpn."""
    return Path(os.environ.get("DPN_HOME") or Path.home() / ".dpn")


def cache_bytes() -> int:
    """Return the limit of the cache of files behind URLs: $DPN_CACHE_GB, or 100 GB. Raises `DpnError` for no number."""
    setting = os.environ.get("DPN_CACHE_GB") or "100"
    try:
        limit = float(setting)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise DpnError(f"DPN_CACHE_GB={setting}: not a number of gigabytes above 0; the usual limit is 100")
    return int(limit * 1e9)


# The folders that archives of a data set unpack to, and where torchvision's examples put them.
UNPACKED = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin", "data/cifar-10-batches-py"),
    "cifar100": ("cifar-100-python", "cifar-100-binary", "data/cifar-100-python"),
}


def find_data(name: str) -> str:
    """Return the first of $DPN_DATA_DIR/NAME and ./NAME that exists, else ``"demo"``; archives have their own NAME."""
    roots = [Path(os.environ["DPN_DATA_DIR"])] if os.environ.get("DPN_DATA_DIR") else []
    folders = (root / folder_name for root in (*roots, Path()) for folder_name in (name, *UNPACKED.get(name, ())))
    return next((str(folder) for folder in folders if folder.is_dir()), DEMO)


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
