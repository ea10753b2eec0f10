"""Choice of the shipped config for a data set: the paper's for ImageNet, another for your own images.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from dpn_cli.config.load import Logger, read_config, shipped_configs
from dpn_cli.config.urls import is_shards

# Names of ImageNet's class folders, and of the data set itself.
WORDNET_ID = re.compile(r"n\d{8}")
IMAGENET = re.compile(r"imagenet|ilsvrc|in1k|in-1k|in21k|in-21k", re.IGNORECASE)


def is_imagenet(location: str) -> bool:
    """Return whether ``--data`` names ImageNet, or part of it, by the data set's name or the names of its classes.

    The classes are checked where that costs no more than reading a folder. Others, and locations that do not exist,
    are judged by their name.
    """
    if location.startswith("hf:"):
        return bool(IMAGENET.search(location))
    try:
        path = Path(location.removeprefix("wds:")).expanduser().absolute()
    except (RuntimeError, OSError):  # no such user's home, or no current folder
        path = Path(location)
    if is_shards(location):
        return bool(IMAGENET.search(f"{path.parent.name}/{path.name}")) or _all_wordnet(_lines(path.parent))
    return bool(IMAGENET.search(path.name)) or _all_wordnet(
        _packed_splits(path) or _folders(path / "train") or _folders(path)
    )


def _all_wordnet(classes: list[str]) -> bool:
    return bool(classes) and all(map(WORDNET_ID.fullmatch, classes))


def _lines(folder: Path) -> list[str]:
    try:
        return (folder / "classnames.txt").read_text("utf-8", "surrogateescape").splitlines()
    except (OSError, ValueError):
        return []


def _packed_splits(root: Path) -> list[str]:
    try:
        return list(json.loads((root / "manifest.json").read_text("utf-8"))["classes"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _folders(root: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except (OSError, ValueError):
        return []


def choose_config(source: str, config_file: str | None, paper: str, own_config: str, log: Logger) -> str:
    """Return the name of a command's base config: `paper` or `own_config`.

    A shipped config in `config_file`, and a file that is a full config, leave no choice. The choice of `own_config` is
    logged. Raises `DpnError` as `read_config` does.
    """
    if config_file in set(shipped_configs()):
        return own_config if config_file == own_config else paper
    names_config = config_file is not None and "about" in read_config(config_file)
    if names_config or is_imagenet(source):
        return paper
    log(f"--data {source} is not ImageNet: using config {own_config}; the paper's is --config {paper}")
    return own_config
