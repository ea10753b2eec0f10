"""Which shipped recipe a data set gets: the paper's for ImageNet, another one for own pictures. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from dpn_cli.recipe.reading import Say, read_recipe, shipped_recipes
from dpn_cli.recipe.stores import is_shards

# What ImageNet's class folders are called, and what the data set itself is.
WORDNET_ID = re.compile(r"n\d{8}")
IMAGENET = re.compile(r"imagenet|ilsvrc|in1k|in-1k|in21k|in-21k", re.IGNORECASE)


def is_imagenet(place: str) -> bool:
    """Tell whether ``--data`` names ImageNet, or part of it, by the data set's name or the names of its classes.

    The classes are looked at where that costs no more than reading a folder. Others, and places that do not exist,
    are judged by their name.
    """
    if place.startswith("hf:"):
        return bool(IMAGENET.search(place))
    try:
        path = Path(place.removeprefix("wds:")).expanduser().absolute()
    except (RuntimeError, OSError):  # no such user's home, or no current folder
        path = Path(place)
    if is_shards(place):
        return bool(IMAGENET.search(f"{path.parent.name}/{path.name}")) or _all_wordnet(_lines(path.parent))
    return bool(IMAGENET.search(path.name)) or _all_wordnet(_packed(path) or _folders(path / "train") or _folders(path))


def _all_wordnet(classes: list[str]) -> bool:
    return bool(classes) and all(map(WORDNET_ID.fullmatch, classes))


def _lines(folder: Path) -> list[str]:
    try:
        return (folder / "classnames.txt").read_text("utf-8", "surrogateescape").splitlines()
    except (OSError, ValueError):
        return []


def _packed(root: Path) -> list[str]:
    try:
        return list(json.loads((root / "manifest.json").read_text("utf-8"))["classes"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _folders(root: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except (OSError, ValueError):
        return []


def shipped_for(source: str, config: str | None, paper: str, own: str, say: Say) -> str:
    """Return the name of the recipe that the layers of a command start from: `paper` or `own`.

    A shipped recipe that `config` names, and a file that is a whole recipe, leave nothing to choose. Says it when own
    pictures get their recipe. Raises `DpnError` as `read_recipe` does.
    """
    if config in set(shipped_recipes()):
        return own if config == own else paper
    whole = config is not None and "about" in read_recipe(config)
    if whole or is_imagenet(source):
        return paper
    say(
        f"--data {source} is not ImageNet, so the recipe is {own}: pictures whole and unmirrored, no augmentation; "
        f"--config {paper} is the paper's"
    )
    return own
