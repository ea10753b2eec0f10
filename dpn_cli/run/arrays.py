"""Arrays on the disk, each whole or absent: an ``.npy``, and a ``.json`` with its digest and what goes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpn_cli.errors import DataError
from dpn_cli.run.files import file_digest, replace_file, replace_json


def save_array(path: Path, array: npt.NDArray[Any], **facts: Any) -> None:
    """Write an array and, after it, its description, each atomically. Raises `SaveError`."""

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:  # np.save would add an ending to a name
            np.save(file, array)

    digest = replace_file(path, save)
    replace_json(path.with_suffix(".json"), {"sha256": digest, **facts})


def facts_of(path: Path) -> dict[str, Any] | None:
    """Return the facts saved with an array, or None when the save was not finished.

    Raises `DataError` when the array differs from the saved one.
    """
    description_path = path.with_suffix(".json")
    if not description_path.is_file():
        return None
    try:
        facts: dict[str, Any] = json.loads(description_path.read_text(encoding="utf-8"))
        if facts["sha256"] == file_digest(path):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{path}: damaged (its digest differs)")
