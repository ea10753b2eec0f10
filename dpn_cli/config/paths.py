"""Default locations of data and weights that a command does not name."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from dpn_cli.config.urls import is_hub, is_shards, is_url
from dpn_cli.errors import DataError, DpnError

# The built-in scenes of classifiers: asked for the colour of the largest object, for fine-tuning, and with the question
# that takes most of them in, for pre-training and distillation.
DEMO, DEMO_OBJECTS = DEMOS = ("demo", "demo:objects")


# What a location may be, by the data that a command reads: the end of the message about one that does not exist.
CLASS_FOLDERS = (
    "no such folder; it holds train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg. 'demo' is the built-in data, "
    "hf:OWNER/NAME a hub data set, wds:PATTERN webdataset shards"
)
IMAGE_FOLDER = "no such folder; pass a folder of images, 'demo' for the built-in ones, hf:OWNER/NAME or wds:PATTERN"
TASK_FOLDERS = (
    "no such folder; it holds one folder per task, e.g. caltech101. 'demo' is the built-in data, hf:OWNER/NAME a hub "
    "data set"
)
MASK_FOLDERS = (
    "no such folder; it holds images/{training,validation} and annotations/{training,validation}. 'demo' is the "
    "built-in data, hf:OWNER/NAME a hub data set"
)
CAPTIONS = (
    "no such file or folder; pass a .csv or .tsv with file and caption, COCO's captions .json, a folder of images with "
    ".txt next to them, wds:PATTERN, hf:OWNER/NAME, or demo"
)


def check_location(option: str, location: str | None, layout: str) -> None:
    """Raise `DataError` for a path that does not exist; `layout` says what it may be. Other locations pass."""
    if not location or is_hub(location) or is_shards(location) or is_url(location) or location.startswith("demo"):
        return
    if not Path(location).expanduser().exists():
        raise DataError(f"{option} {location}: {layout}")


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
