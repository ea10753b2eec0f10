"""Captioned images that lie in files of their own: tables, COCO's JSON, folders with a text next to each image."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli.data.file_index import find_files
from dpn_cli.data.image_errors import report_error
from dpn_cli.errors import DataError
from tasks.lit.captions import CAPTION_COLUMNS, CaptionedFiles

FILE_COLUMNS = ("file", "filepath", "file_name", "filename", "image", "path", "image_path")
# A folder's captions may stand in one of these instead of a .txt next to each image.
TABLES = ("captions.csv", "captions.tsv", "captions.json", "metadata.csv")


def read_table(path: Path, root: Path, image: str | None, caption: str | None, skip_bad: bool) -> CaptionedFiles:
    """Read a .csv or .tsv with a header; rows of the same file are sentences of one image.

    Raises `DataError` naming file and line.
    """
    files, gathered = CaptionedFiles(root, skip_bad), dict[str, list[object]]()  # each name's line, and its texts
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel writes a byte-order mark
            tabs = "\t" in file.readline()  # open_clip's tables are tab-separated and called .csv
            file.seek(0)
            rows = csv.DictReader(file, delimiter="\t" if tabs else ",")
            columns = list(rows.fieldnames or ())
            by_file = _column(path, columns, image, "image", FILE_COLUMNS)
            by_text = _column(path, columns, caption, "caption", CAPTION_COLUMNS)
            for row in rows:
                name = (row[by_file] or "").strip()
                if not name:
                    report_error(DataError(f"{path}, line {rows.line_num}: no file in the column {by_file!r}"))
                    continue
                gathered.setdefault(name, [rows.line_num]).append(row[by_text])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable table ({' '.join(str(error).split())[:120]})") from error
    for name, (line, *texts) in gathered.items():
        files.add(name, texts, f"{path}, line {line}")
    return files


def _column(
    path: Path, columns: Sequence[str], column_name: str | None, kind: str, default_names: Sequence[str]
) -> str:
    column = next((name for name in ([column_name] if column_name else default_names) if name in columns), None)
    if column is None:
        raise DataError(
            f"{path}: which column holds the {kind}? The columns are {', '.join(map(repr, columns)) or 'none'}; "
            f"name one with --{kind}-column NAME"
        )
    return column


def read_coco(path: Path, root: Path, splits: Sequence[str] | None, skip_bad: bool) -> CaptionedFiles:
    """Read COCO's captions JSON: Karpathy's (``sentences``, `splits` of it) or the official one (``annotations``).

    Raises `DataError` for a file of neither form, and when Karpathy's has none of the splits.
    """
    listed = _read_json(path)
    try:
        images = listed["images"]
        karpathy = "annotations" not in listed
        files = CaptionedFiles(root if karpathy else _coco_folder(path, root), skip_bad)
        texts: dict[object, list[object]] = {}
        for annotation in listed.get("annotations", ()):
            texts.setdefault(annotation["image_id"], []).append(annotation["caption"])
        for image in images:
            if not karpathy:
                files.add(image["file_name"], texts.get(image["id"], ()), str(path))
            elif splits is None or image["split"] in splits:
                raw = [sentence["raw"] for sentence in image["sentences"]]
                files.add(str(Path(image.get("filepath", "")) / image["filename"]), raw, str(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: neither Karpathy's captions JSON (images with filename, split, sentences) nor COCO's own "
            f"(images, annotations): {type(error).__name__} {' '.join(str(error).split())[:80]}"
        ) from error
    if not files.captions:
        available_splits = find_splits_in_file(path)
        if splits is None or not available_splits.isdisjoint(splits):
            raise DataError(f"{path}: no captions")
        raise DataError(
            f"{path}: no image of the split {' or '.join(splits)}, only of {', '.join(sorted(available_splits))}; "
            "train "
            "with a file that has train or restval, validate with one that has val (--val-data), or score another "
            "split ('lit eval --split')"
        )
    return files


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise DataError(f"{path}: not readable as JSON (nested too deeply to hold captions)") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON ({' '.join(str(error).split())[:120]})") from error


def _coco_folder(path: Path, root: Path) -> Path:
    """Return ``val2017`` in or next to `root` for COCO's own ``captions_val2017.json``, if it exists."""
    _, prefix, split = path.stem.partition("captions_")
    return next((parent / split for parent in (root, root.parent) if prefix and (parent / split).is_dir()), root)


def find_splits_in_file(path: Path) -> set[str]:
    """Return the splits that Karpathy's captions JSON has images of; none for a JSON of another form."""
    try:
        return {str(image["split"]) for image in _read_json(path)["images"] if "split" in image}
    except (DataError, KeyError, TypeError):  # `read_coco` says what is wrong with it
        return set()


def read_folder(root: Path, image: str | None, caption: str | None, skip_bad: bool) -> CaptionedFiles:
    """Read a folder of images with a .txt of the same name next to each, one sentence a line, or with a table.

    Raises `DataError` when there is neither.
    """
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is not None:
        read = read_coco(table, root, None, skip_bad) if table.suffix == ".json" else None
        return read or read_table(table, root, image, caption, skip_bad)
    files = CaptionedFiles(root, skip_bad)
    for path, _ in find_files(root):
        text = path.with_suffix(".txt")
        try:
            raw = text.read_text(encoding="utf-8-sig").splitlines() if text.is_file() else ()
        except UnicodeDecodeError as error:
            report_error(DataError(f"{text}: not a text in UTF-8 ({error.reason} at byte {error.start})"))
            continue
        except OSError as error:
            report_error(DataError(f"{text}: not readable ({error.strerror})"))
            continue
        files.add(path.relative_to(root).as_posix(), raw, str(text))
    if not files.captions:
        raise DataError(
            f"{root}: no images with a .txt of the same name next to them, and none of {', '.join(TABLES)} in it"
        )
    return files
