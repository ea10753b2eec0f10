"""Images with sentences: tables, COCO's JSON, folders, webdataset shards, hub data sets, the built-in scenes."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from dpn_cli.data import scenes
from dpn_cli.data.images import SUFFIXES
from dpn_cli.data.labelled import HubPictures, Images, SceneSplit, open_image
from dpn_cli.data.shards import Member, ShardPictures
from dpn_cli.errors import DataError

# Column names that are understood without being asked for: open_clip's, img2dataset's, Hugging Face's image folders'.
FILE_COLUMNS = ("file", "filepath", "file_name", "filename", "image", "path", "image_path")
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "sentence", "sentences")
# A folder's captions may stand in one of these instead of a .txt beside each picture.
TABLES = ("captions.csv", "captions.tsv", "captions.json", "metadata.csv")
BESIDE = ("txt", "json")


class Captioned(Images):
    """Images, each with one or more sentences; `dropped` counts the ones left out for having none.

    `written` is when each image's file was last written, in nanoseconds; empty where that is not known.
    """

    captions: Sequence[tuple[str, ...]]
    sizes: Sequence[int]
    written: Sequence[int] = ()
    dropped: int = 0

    @property
    def labels(self) -> Sequence[int]:
        """The images' own numbers, by which a reader sees which ones it was given."""
        return range(len(self.captions))

    @abstractmethod
    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""


def captions_fingerprint(data: Captioned) -> str:
    """Return a hash over all sentences, in order."""
    found = hashlib.sha256()
    for several in data.captions:
        found.update("\n".join((*several, "")).encode())
    return found.hexdigest()


class Subset(Captioned):
    """Some images of a set, in the order of their numbers in it."""

    def __init__(self, whole: Captioned, rows: Sequence[int]) -> None:
        self.whole, self.rows = whole, list(rows)
        self.captions = [whole.captions[row] for row in self.rows]
        self.sizes = [whole.sizes[row] for row in self.rows]
        self.written = [whole.written[row] for row in self.rows] if whole.written else ()

    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""
        return self.whole.key(self.rows[index])

    def where(self, index: int) -> str:
        """Name an image's place."""
        return self.whole.where(self.rows[index])

    def content(self, index: int) -> bytes:
        """Return what an image is stored as."""
        return self.whole.content(self.rows[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.whole.open(self.rows[index])


class Files(Captioned):
    """Picture files with their sentences, in the order in which they are added."""

    def __init__(self, skip_bad: bool = False) -> None:
        self.skip_bad = skip_bad
        self.paths: list[Path] = []
        self.keys: list[str] = []
        self.captions: list[tuple[str, ...]] = []
        self.sizes: list[int] = []
        self.written: list[int] = []

    def add(self, root: Path, name: str, raw: Iterable[object], place: str) -> None:
        """Add a picture; one without text, or that is not there, is an error or left out."""
        path = root / name
        found = sentences(raw, f"{place}: {name}", self.skip_bad)
        status = _status(path)
        if status is None and not self.skip_bad:
            raise DataError(f"{place}: {path}: no such image; name their folder with --images")
        if not found or status is None:
            self.dropped += 1
            return
        self.paths.append(path)
        self.keys.append(name)
        self.captions.append(found)
        self.sizes.append(status.st_size)
        self.written.append(status.st_mtime_ns)

    def key(self, index: int) -> str:
        """Return a picture's name inside the data set."""
        return self.keys[index]

    def where(self, index: int) -> str:
        """Name a picture's file."""
        return str(self.paths[index])

    def open(self, index: int) -> Image.Image:
        """Open a picture, not decoded yet."""
        return open_image(self.paths[index], self.where(index))


def _status(path: Path) -> os.stat_result | None:
    """Return what the system knows of a file; None when there is none, as of a name that no file can have."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def sentences(raw: Iterable[object], where: str, skip_bad: bool) -> tuple[str, ...]:
    """Return the sentences that are not empty; none at all is an error unless `skip_bad`."""
    found = tuple(text.strip() for text in raw if isinstance(text, str) and text.strip())
    if not found and not skip_bad:
        raise DataError(f"{where}: a pair without text; write one, or leave such pairs out with --skip-bad-images")
    return found


def read_table(path: Path, root: Path, image: str | None, caption: str | None, skip_bad: bool) -> Files:
    """Read a .csv or .tsv with a header; rows of the same file are sentences of one picture.

    Raises `DataError` naming file and line.
    """
    files, gathered, lines = Files(skip_bad), dict[str, list[object]](), dict[str, int]()
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
                    raise DataError(f"{path}, line {rows.line_num}: no file in the column {by_file!r}")
                gathered.setdefault(name, []).append(row[by_text])
                lines.setdefault(name, rows.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable table ({' '.join(str(error).split())[:120]})") from error
    for name, raw in gathered.items():
        files.add(root, name, raw, f"{path}, line {lines[name]}")
    return files


def _column(path: Path, columns: Sequence[str], asked: str | None, kind: str, usual: Sequence[str]) -> str:
    wanted = [asked] if asked else usual
    found = next((name for name in wanted if name in columns), None)
    if found is None:
        raise DataError(
            f"{path}: which column holds the {kind}? The columns are {', '.join(map(repr, columns)) or 'none'}; "
            f"name one with --{kind}-column NAME"
        )
    return found


def read_coco(path: Path, root: Path, splits: Sequence[str] | None, skip_bad: bool) -> Files:
    """Read COCO's captions JSON: Karpathy's (``sentences``, `splits` of it) or the official one (``annotations``).

    Raises `DataError` for a file of neither form, and when Karpathy's has none of the splits.
    """
    files = Files(skip_bad)
    try:
        listed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        images = listed["images"]
        karpathy = "annotations" not in listed
        root = root if karpathy else _coco_folder(path, root)
        texts: dict[object, list[object]] = {}
        for note in listed.get("annotations", ()):
            texts.setdefault(note["image_id"], []).append(note["caption"])
        for image in images:
            if not karpathy:
                files.add(root, image["file_name"], texts.get(image["id"], ()), str(path))
            elif splits is None or image["split"] in splits:
                raw = [sentence["raw"] for sentence in image["sentences"]]
                files.add(root, str(Path(image.get("filepath", "")) / image["filename"]), raw, str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: neither Karpathy's captions JSON (images with filename, split, sentences) nor COCO's own "
            f"(images, annotations): {type(error).__name__} {' '.join(str(error).split())[:80]}"
        ) from error
    if not files.captions:
        raise DataError(f"{path}: no captions{'' if splits is None else ' of the split ' + ' or '.join(splits)}")
    return files


def _coco_folder(path: Path, root: Path) -> Path:
    """Return ``val2017`` in or beside `root` for COCO's own ``captions_val2017.json``, where there is such a folder."""
    _, found, split = path.stem.partition("captions_")
    return next((place / split for place in (root, root.parent) if found and (place / split).is_dir()), root)


def has_splits(path: Path) -> bool:
    """Tell whether a captions JSON is Karpathy's, which says of every image to which split it belongs."""
    try:
        return any("split" in image for image in json.loads(path.read_text(encoding="utf-8"))["images"][:1])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_folder(root: Path, image: str | None, caption: str | None, skip_bad: bool) -> Files:
    """Read a folder of pictures with a .txt of the same name beside each, one sentence a line, or with a table.

    Raises `DataError` when there is neither.
    """
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is not None:
        read = read_coco(table, root, None, skip_bad) if table.suffix == ".json" else None
        return read or read_table(table, root, image, caption, skip_bad)
    files = Files(skip_bad)
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES):
        text = path.with_suffix(".txt")
        try:
            raw = text.read_text(encoding="utf-8-sig").splitlines() if text.is_file() else ()
        except UnicodeDecodeError as error:
            raise DataError(f"{text}: not a text in UTF-8 ({error.reason} at byte {error.start})") from error
        files.add(root, path.relative_to(root).as_posix(), raw, str(text))
    if not files.captions:
        raise DataError(
            f"{root}: no pictures with a .txt of the same name beside them, and none of {', '.join(TABLES)} in it"
        )
    return files


class ShardPairs(ShardPictures, Captioned):
    """Webdataset shards as img2dataset writes them: pictures with a .txt, or a .json that has a caption.

    A .txt is one caption, whatever its lines; of a .json the first field with a caption's name counts, as of a table.
    """

    def __init__(self, pattern: str, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.captions: list[tuple[str, ...]] = []
        super().__init__(pattern, BESIDE)
        if not self.captions:
            raise DataError(f"--data wds:{pattern}: no picture with a .txt or .json beside it")
        times = [path.stat().st_mtime_ns for path in self.paths]
        self.written = [times[shard] for shard, _, _ in self.places]

    def take(self, path: Path, member: Member) -> bool:
        """Note a picture's sentences."""
        where = f"{path}: {member.name}"
        try:
            described = json.loads(member.beside.get("json", b"{}")) if "txt" not in member.beside else {}
            text = member.beside.get("txt", b"").decode("utf-8-sig")
        except ValueError as error:
            raise DataError(f"{where}: its .txt or .json cannot be read ({error})") from error
        fields = described if isinstance(described, dict) else {}
        caption = text or next(filter(None, map(fields.get, CAPTION_COLUMNS)), "")
        found = sentences(caption if isinstance(caption, list) else [caption], where, self.skip_bad)
        self.dropped += not found
        self.captions += [found] if found else []
        return bool(found)


class HubPairs(HubPictures, Captioned):
    """A split of a hub data set with an image column and a column of sentences, or of lists of them."""

    def __init__(
        self, name: str, config: str, split: str, image: str | None, caption: str | None, skip_bad: bool
    ) -> None:
        super().__init__(name, config, split, image, alone=True)
        usual = next((column for column in CAPTION_COLUMNS if column in self.rows.column_names), None)
        texts = self.rows[self.column(self.rows, caption or usual, "caption", ())]
        kept: list[int] = []
        self.kept: Sequence[int] = range(len(texts))
        captions: list[tuple[str, ...]] = []
        for row, text in enumerate(texts):
            found = sentences([text] if isinstance(text, str) else text or (), self.where(row), skip_bad)
            if found:
                kept.append(row)
                captions.append(found)
        self.captions, self.dropped = captions, len(texts) - len(kept)
        self.rows, self.sizes, self.kept = self.rows.select(kept), [self.sizes[row] for row in kept], kept

    def key(self, index: int) -> str:
        """Return the row's number."""
        return str(self.kept[index])

    def where(self, index: int) -> str:
        """Name the data set and the row."""
        return f"{self.place}, row {self.kept[index]}"


class ScenePairs(SceneSplit, Captioned):
    """The built-in scenes with the sentence that describes each; numbers `start` up to `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.captions = [(scenes.caption(scenes.sample_scene(0, i)),) for i in range(start, stop)]
        self.sizes = [3 * scenes.SCENE_SIZE**2] * len(self.captions)

    def key(self, index: int) -> str:
        """Return the scene's number."""
        return str(self.start + index)
