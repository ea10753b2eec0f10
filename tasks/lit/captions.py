"""Images with sentences: image files, webdataset shards, hub data sets, the built-in scenes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from dpn_cli.data.compact import Chosen, PackedStrings, Rows, pack_integers
from dpn_cli.data.decode import open_image, resolve_below
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.remote import RemotePath
from dpn_cli.data.sources import synthetic
from dpn_cli.data.sources.base import Images, Shard, ShardIndex
from dpn_cli.data.sources.hub import HubImages
from dpn_cli.data.sources.shards import ShardImages, ShardMember
from dpn_cli.data.sources.synthetic import SceneSplit
from dpn_cli.errors import DataError, ImageError

# Names of caption columns that need no option: open_clip's, img2dataset's, Hugging Face's.
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "sentence", "sentences")
MEMBER_SUFFIXES = ("txt", "json")
# Lone surrogates, which JSON can hold and UTF-8 cannot.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CaptionedImages(Images):
    """Images, each with one or more sentences; `dropped` counts the ones left out for having none.

    `stamps` change when an image's file is replaced or written to (`stamp_of`); ``""`` stands for an unknown stamp.
    """

    captions: Sequence[tuple[str, ...]]
    sizes: Sequence[int]
    stamps: Sequence[str]
    dropped: int = 0

    @property
    def labels(self) -> Sequence[int]:
        """The images' numbers, from which a reader of batches tells the images."""
        return range(len(self.captions))

    @abstractmethod
    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""


def captions_fingerprint(data: CaptionedImages) -> str:
    """Return a hash over all sentences, in order."""
    digest = hashlib.sha256()
    for captions in data.captions:
        digest.update("\n".join((*captions, "")).encode())
    return digest.hexdigest()


class Subset(CaptionedImages):
    """Some images of a set, in the order of the set."""

    def __init__(self, data: CaptionedImages, rows: Sequence[int] | Rows) -> None:
        self.whole, self.rows, self.reading = data, pack_integers(rows), data.reading
        self.captions, self.stamps = Chosen(data.captions, rows), Chosen(data.stamps, rows)
        self.sizes = array("q", (data.sizes[row] for row in self.rows))

    @property
    def shards(self) -> ShardIndex | None:
        """The shard of the whole set that holds each image."""
        return self.whole.shards.only(self.rows) if self.whole.shards else None

    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""
        return self.whole.key(self.rows[index])

    def locate(self, index: int) -> str:
        """Name an image's location."""
        return self.whole.locate(self.rows[index])

    def content(self, index: int) -> bytes:
        """Return an image's stored bytes."""
        return self.whole.content(self.rows[index])

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return self.whole.open(self.rows[index])


class Captions(Sequence[tuple[str, ...]]):
    """Tuples of sentences in one piece of memory; see `PackedStrings`. Equal to any sequence of the same tuples."""

    def __init__(self) -> None:
        self.texts, self.ends = PackedStrings(), array("q")

    def append(self, sentences: Sequence[str]) -> None:
        """Add the sentences of an image."""
        for text in sentences:
            self.texts.append(text)
        self.ends.append(len(self.texts))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[str, ...]:  # type: ignore[override]  # no slices
        position = range(len(self.ends))[index]
        return tuple(self.texts[self.ends[position - 1] if position else 0 : self.ends[position]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class CaptionedFiles(CaptionedImages):
    """Image files below a folder with their sentences, in the order of `add`."""

    def __init__(self, root: Path, skip_bad: bool = False) -> None:
        self.root, self.skip_bad = root, skip_bad
        self.keys = PackedStrings()
        self.sizes: array[int] = array("q")
        self.stamps: PackedStrings = PackedStrings()
        self.captions: Captions = Captions()

    def add(self, name: str, raw: Iterable[object], location: str) -> None:
        """Add an image. One that is missing or has no text is left out or an error."""
        path = resolve_below(self.root, name, location)
        captions = sentences(raw, f"{location}: {name}", self.skip_bad)
        status = _status(path)
        if status is None and not self.skip_bad:
            report_error(_missing(path, location))
        if not captions or status is None:
            self.dropped += 1
            return
        self.keys.append(name)
        self.captions.append(captions)
        self.sizes.append(status.st_size)
        self.stamps.append(stamp_of(status))

    def key(self, index: int) -> str:
        """Return an image's name inside the data set."""
        return self.keys[index]

    def path(self, index: int) -> Path:
        """Return an image's file."""
        return self.root / self.keys[index]

    def locate(self, index: int) -> str:
        """Name an image's file."""
        return str(self.path(index))

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        return open_image(self.path(index), self.locate(index), self.reading, self.sizes[index])


def _missing(path: Path, location: str) -> ImageError:
    """Describe an image that `location` names and that is not there, or what there is instead of a file."""
    if os.path.lexists(path):
        try:
            open_image(path, str(path)).close()
        except ImageError as error:
            return error
    return ImageError(f"{location}: {path}: no such image; name their folder with --images")


def stamp_of(status: os.stat_result | None) -> str:
    """Return a file's size, times and inode, which change when it is replaced or written to; ``""`` without a file.

    Modification times can be set, and copies keep them. The time of the last change to the inode cannot be set, and a
    file that is renamed onto another keeps its own inode.
    """
    if status is None:
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _status(path: Path) -> os.stat_result | None:
    """Return a file's status; None when there is no file, or the name is impossible."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def sentences(raw: Iterable[object], location: str, skip_bad: bool) -> tuple[str, ...]:
    """Return the sentences that are not empty. None, or half a character in one, is an error unless `skip_bad`."""
    captions = tuple(text.strip() for text in raw if isinstance(text, str) and text.strip())
    if halved := next((text for text in captions if _LONE_SURROGATE.search(text)), None):
        if not skip_bad:
            report_error(
                DataError(
                    f"{location}: {halved[:60]!r} holds half a character (a surrogate), as texts do that were cut in "
                    "UTF-16; mend it, or leave such texts out with --skip-bad-images"
                )
            )
            return ()
        captions = tuple(text for text in captions if not _LONE_SURROGATE.search(text))
    if not captions and not skip_bad:
        report_error(
            DataError(f"{location}: a pair without text; write one, or leave such pairs out with --skip-bad-images")
        )
    return captions


class ShardCaptions(ShardImages, CaptionedImages):
    """Webdataset shards as img2dataset writes them: images with a .txt, or a .json that has a caption.

    A .txt is one caption, however many lines it has; a .json's is its first field with a caption's name, as in a table.
    """

    def __init__(self, pattern: str, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.captions: list[tuple[str, ...]] = []
        super().__init__(pattern, MEMBER_SUFFIXES)
        if not self.captions:
            raise DataError(f"--data wds:{pattern}: no image with a .txt or .json next to it")
        stamps = [path.version if isinstance(path, RemotePath) else stamp_of(_status(path)) for path in self.paths]
        self.stamps = [stamps[shard] for shard in self.shard]

    def take(self, path: Shard, member: ShardMember) -> bool:
        """Note an image's sentences."""
        location = f"{path}: {member.name}"
        try:
            described = json.loads(member.sidecars.get("json", b"{}")) if "txt" not in member.sidecars else {}
            text = member.sidecars.get("txt", b"").decode("utf-8-sig")
        except (ValueError, RecursionError) as error:
            report_error(DataError(f"{location}: its .txt or .json cannot be read ({error})"))
            self.dropped += 1
            return False
        fields = described if isinstance(described, dict) else {}
        caption = text or next(filter(None, map(fields.get, CAPTION_COLUMNS)), "")
        captions = sentences(caption if isinstance(caption, list) else [caption], location, self.skip_bad)
        self.dropped += not captions
        self.captions += [captions] if captions else []
        return bool(captions)


class HubCaptions(HubImages, CaptionedImages):
    """A split of a hub data set with an image column and a column of sentences, or of lists of them."""

    def __init__(
        self, name: str, config: str, split: str, image: str | None, caption: str | None, skip_bad: bool
    ) -> None:
        super().__init__(name, config, split, image, alone=True)
        default_column = next((column for column in CAPTION_COLUMNS if column in self.rows.column_names), None)
        texts = self.rows[self.column(self.rows, caption or default_column, "caption", ())]
        kept_rows: list[int] = []
        self.kept_rows: Sequence[int] = range(len(texts))
        captions: list[tuple[str, ...]] = []
        for row, text in enumerate(texts):
            sentence_list = sentences([text] if isinstance(text, str) else text or (), self.locate(row), skip_bad)
            if sentence_list:
                kept_rows.append(row)
                captions.append(sentence_list)
        self.captions, self.dropped = captions, len(texts) - len(kept_rows)
        self.rows, self.kept_rows = self.rows.select(kept_rows), kept_rows
        self.sizes = [self.sizes[row] for row in kept_rows]
        cache_stamps = " ".join(stamp_of(_status(Path(part["filename"]))) for part in self.rows.cache_files)
        files = [self.files[row] for row in kept_rows]
        self.stamps = [cache_stamps if file is None else stamp_of(_status(Path(file))) for file in files]

    def key(self, index: int) -> str:
        """Return the row's number."""
        return str(self.kept_rows[index])

    def locate(self, index: int) -> str:
        """Name the data set and the row."""
        return f"{self.location}, row {self.kept_rows[index]}"


class SceneCaptions(SceneSplit, CaptionedImages):
    """The built-in scenes with the sentence that describes each; numbers `start` up to `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.captions = [(synthetic.caption(synthetic.demo_scene(i)),) for i in range(start, stop)]
        self.sizes = [3 * synthetic.SCENE_SIZE**2] * len(self.captions)
        self.stamps = ["generated"] * len(self.captions)

    def key(self, index: int) -> str:
        """Return the scene's number."""
        return str(self.start + index)
